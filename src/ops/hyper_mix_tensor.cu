// The products of many rows with fn by tensor cores that keep float32's precision, and the rows' sums of squares.
#include "ops/hyper_connection.cuh"
#include "ops/quad.cuh"
#include "ops/tf32.cuh"

namespace rocket::cuda {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * kWarp;
constexpr int kRows = 16;                       // of a warp
constexpr int kRun = 128, kGroups = kRun / 16;  // columns that tensor cores add up, before a sum in float32
constexpr int kStreams = 4, kOutputs = kStreams * (kStreams + 2), kTiles = kOutputs / 8;
static_assert(kTensorSlice % kRun == 0);

template <bool kBf16>
__device__ __forceinline__ void multiply_quads(float (&large)[4], float (&small)[4], const CutQuads& x,
                                               const float4& w) {
  if constexpr (kBf16) {  // fits as it is
    multiply_tf32(small, x.low[0], __float_as_uint(w.x), __float_as_uint(w.y));
    multiply_tf32(large, x.high[0], __float_as_uint(w.x), __float_as_uint(w.y));
    multiply_tf32(small, x.low[1], __float_as_uint(w.z), __float_as_uint(w.w));
    multiply_tf32(large, x.high[1], __float_as_uint(w.z), __float_as_uint(w.w));
  } else {
    uint32_t high[4], low[4];
    cut(w.x, high[0], low[0]);
    cut(w.y, high[1], low[1]);
    cut(w.z, high[2], low[2]);
    cut(w.w, high[3], low[3]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      multiply_tf32(small, x.low[i], high[2 * i], high[2 * i + 1]);
      multiply_tf32(small, x.high[i], low[2 * i], low[2 * i + 1]);
      multiply_tf32(large, x.high[i], high[2 * i], high[2 * i + 1]);
    }
  }
}

// partial[row][sum][slice]. Grid: slices, groups of rows. A warp has 16 rows of a slice, which it reads straight into
// registers.
template <bool kBf16>
__global__ void __launch_bounds__(kThreads) mix_kernel(HyperPreParams p, float* partial, int slices) {
  wait_for_previous();
  start_next();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, j = lane % 4;
  const int64_t first = (static_cast<int64_t>(blockIdx.y) * kWarps + warp) * kRows;
  if (first >= p.rows) return;
  const int64_t flat = static_cast<int64_t>(kStreams) * p.hidden;
  float total[kTiles][4] = {}, square[2] = {};
#pragma unroll 1
  for (int run = 0; run < kTensorSlice; run += kRun) {
    const int64_t column = static_cast<int64_t>(blockIdx.x) * kTensorSlice + run + 4 * j;
    float4 x[2][kGroups];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = first + g + 8 * half;
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const int64_t at = column + 16 * i;
        x[half][i] = load_quad<true>(p.x + row * flat + at, row < p.rows ? flat - at : 0);
      }
    }
    float large[kTiles][4] = {}, small[kTiles][4] = {};
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int64_t at = column + 16 * i;
      const CutQuads cuts(x[0][i], x[1][i]);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float4 w = load_stored_quad<kBf16, true>(static_cast<const unsigned char*>(p.fn.data),
                                                       (8 * n + g) * flat + at, flat - at);
        multiply_quads<kBf16>(large[n], small[n], cuts, w);
      }
      square[0] = plus_dot(square[0], x[0][i], x[0][i]);
      square[1] = plus_dot(square[1], x[1][i], x[1][i]);
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) total[n][c] += large[n][c] + small[n][c];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    square[half] += __shfl_xor_sync(0xffffffffu, square[half], 1);
    square[half] += __shfl_xor_sync(0xffffffffu, square[half], 2);
    const int64_t row = first + g + 8 * half;
    if (row >= p.rows) continue;
    float* to = partial + row * (kOutputs + 1) * slices + blockIdx.x;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      to[static_cast<int64_t>(8 * n + 2 * j) * slices] = total[n][2 * half];
      to[static_cast<int64_t>(8 * n + 2 * j + 1) * slices] = total[n][2 * half + 1];
    }
    if (j == 0) to[static_cast<int64_t>(kOutputs) * slices] = square[half];
  }
}

}  // namespace

bool hyper_mix_tensor(const HyperPreParams& p, float* partial, int slices, Exec& exec) {
  if (p.streams != kStreams || p.fn.in % 16 != 0) return false;
  if (!quads_aligned(p.x, p.fn.in) || !quads_aligned(p.fn.data, p.fn.in)) return false;
  constexpr int kBlockRows = kWarps * kRows;
  const dim3 grid(static_cast<unsigned>(slices),
                  static_cast<unsigned>((p.rows + kBlockRows - 1) / kBlockRows));
  launch("hyper_pre", p.fn.format == WeightFormat::kBF16 ? mix_kernel<true> : mix_kernel<false>, grid,
         kThreads, 0, exec, p, partial, slices);
  return true;
}

}  // namespace rocket::cuda
