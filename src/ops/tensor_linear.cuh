// Dense products of many rows on tensor cores: rows cut into BF16 terms once, then tiles of tensor_gemm.cuh.
#pragma once

#include "ops/gemv.cuh"
#include "ops/tensor_gemm.cuh"

namespace rocket::cuda {

constexpr int32_t kExactRows = 8;  // up to so many rows gain nothing from tensor cores

// Columns of a term of a row, those past `in` zeros.
__host__ __device__ constexpr int64_t term_width(int64_t in) {
  return (in + 63) / 64 * 64;
}

// Rows of floats, several parts (heads) a row, to two BF16 terms each: to[h][r] = x[r][h], all first terms and then all
// second ones, each filled up with zeros to term_width(in).
struct CutRowsParams {
  const float* x;
  int64_t ldx, hx;
  int32_t rows, heads, in;
  __nv_bfloat16* to;  // [heads, rows, 2 * term_width(in)]
};
void cut_rows(const CutRowsParams& p, Exec& exec);

struct TensorParams {
  const __nv_bfloat16* x;  // [rows, 2 * term_width(in)], as cut_rows() leaves it
  int32_t rows, in;
  int32_t tiles;  // of outputs
  int32_t part_count;
  GemvPart part[GemvParams::kMaxParts];  // first_group: tiles of the parts before
};

// Instances: tensor_linear.cu and tensor_linear_scaled.cu.
template <WeightFormat F>
void run_tensor(TensorParams& p, bool vector, Exec& exec);
template <>
void run_tensor<WeightFormat::kF32>(TensorParams& p, bool vector, Exec& exec);
template <>
void run_tensor<WeightFormat::kBF16>(TensorParams& p, bool vector, Exec& exec);
template <>
void run_tensor<WeightFormat::kNVFP4>(TensorParams& p, bool vector, Exec& exec);
template <>
void run_tensor<WeightFormat::kFP8Block>(TensorParams& p, bool vector, Exec& exec);
template <>
void run_tensor<WeightFormat::kMXFP8>(TensorParams& p, bool vector, Exec& exec);

template <typename K>
__global__ void __launch_bounds__(K::kThreads, K::kBlocks)
    tensor_kernel(const __grid_constant__ TensorParams p) {
  extern __shared__ __align__(128) char shared[];
  wait_for_previous();
  start_next();
  int i = 0;
  const int tile = blockIdx.y;
  while (i + 1 < p.part_count && p.part[i + 1].first_group <= tile) ++i;
  const GemvPart& part = p.part[i];
  const int first_row = blockIdx.x * K::kRows, first = (tile - part.first_group) * K::kOutputs;
  const int rows = min(K::kRows, p.rows - first_row), outputs = min(K::kOutputs, part.out - first);
  const int64_t width = term_width(p.in);
  const TensorTile t = {p.x + first_row * 2 * width,          2 * width, width, nullptr, rows,
                        {part.data, part.scale, first, p.in}, outputs,   p.in};
  float* y = part.y + first_row * part.ldy + first;
  const float* bias = part.bias ? part.bias + first : nullptr;
  tensor_tile<K>(t, shared, [&](int row, int output, float v0, float v1) {
    if (row >= rows) return;
    float* to = y + row * part.ldy + output;
    const float v[2] = {v0, v1};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (output + j >= outputs) continue;
      float sum = v[j];
      if (K::kFormat == WeightFormat::kNVFP4) sum *= part.global;
      if (bias) sum += bias[output + j];
      to[j] = sum;
    }
  });
}

template <typename K>
void launch_tensor(TensorParams& p, Exec& exec) {
  p.tiles = 0;
  for (int i = 0; i < p.part_count; ++i) {
    p.part[i].first_group = p.tiles;
    p.tiles += (p.part[i].out + K::kOutputs - 1) / K::kOutputs;
  }
  // Tiles of the same weights are neighbours, so that these are read from memory once. The grid's y ends at 65,535.
  const dim3 grid(static_cast<unsigned>((p.rows + K::kRows - 1) / K::kRows), static_cast<unsigned>(p.tiles));
  launch("linear", tensor_kernel<K>, grid, K::kThreads, K::kShared, exec, p);
}

// Big tiles where there are enough of them to fill the device, else small ones.
template <WeightFormat F, bool kVector>
void run_tensor_tiles(TensorParams& p, Exec& exec) {
  int64_t tiles = 0;
  for (int i = 0; i < p.part_count; ++i) tiles += (p.part[i].out + 127) / 128;
  if (p.rows > 64 && tiles * ((p.rows + 127) / 128) >= exec.cuda->sm_count) {
    return launch_tensor<TensorKind<F, kVector, 128, 128>>(p, exec);
  }
  launch_tensor<TensorKind<F, kVector, 64, 64>>(p, exec);
}

}  // namespace rocket::cuda
