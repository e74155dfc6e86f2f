// Products with one matrix a head: few rows in float32 at the memory's speed, more rows on tensor cores.
#include "ops/cuda_ops.h"
#include "ops/gemv.cuh"
#include "ops/tensor_linear.cuh"

namespace rocket::cuda {
namespace {

constexpr int kMostRows = 8;  // of a tile; more rows are several tiles

struct HeadParams {
  const char* data;
  int32_t in;
  int32_t stride_out, offset, per_head;
  const float* x;
  int64_t ldx, hx;
  float* y;
  int64_t ldy, hy;
  int32_t rows;
  int32_t block_outputs;  // head_rows_kernel: outputs of a block
  int32_t vector_x;       // rows of x are aligned for loads of four floats
};

// Eight columns of a row of x in global memory; zeros past `in`, or where `there` is false.
__device__ __forceinline__ void load_x(const float* x, int column, int in, bool there, bool vector,
                                       float* v) {
  if (vector && there && column + kLaneColumns <= in) {
    const float4 low = *reinterpret_cast<const float4*>(x + column);
    const float4 high = *reinterpret_cast<const float4*>(x + column + 4);
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
    v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) v[i] = there && column + i < in ? x[column + i] : 0.0f;
}

constexpr int kRowsWarps = 8, kRowsGroup = 4;

// y[i] = sum_j x[j] W[i][j]. A warp takes four outputs at a time; lane l takes columns 8l … of each step of 256, in one
// chain, then the lanes add in a tree.
template <WeightFormat F, bool kVector, int R>
__global__ void __launch_bounds__(kRowsWarps* kWarp, 2) head_rows_kernel(HeadParams p) {
  using L = Lane<F, kVector>;
  constexpr int G = kRowsGroup, N = G * R;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int head = blockIdx.y, row0 = blockIdx.z * R;
  const int end = min(static_cast<int>(blockIdx.x + 1) * p.block_outputs, p.per_head);
  int first = blockIdx.x * p.block_outputs + warp * G;
  const WeightRow w = {p.data, nullptr, head * p.stride_out + p.offset, p.in};
  const float* x = p.x + row0 * p.ldx + head * p.hx;
  float* y = p.y + row0 * p.ldy + head * p.hy;
  const int steps = (p.in + kStep - 1) / kStep;

  typename L::Raw raw[G];
  const auto load = [&](int step) {
#pragma unroll
    for (int g = 0; g < G; ++g) {
      WeightRow row = w;
      row.row += min(first + g, end - 1);
      raw[g] = L::load(row, step * kStep + lane * kLaneColumns);
    }
  };
  start_next();
  if (first < end) load(0);
  wait_for_previous();
  for (; first < end; first += kRowsWarps * G) {
    float sum[N] = {};
    for (int step = 0; step < steps; ++step) {
      float v[G][kLaneColumns];
#pragma unroll
      for (int g = 0; g < G; ++g) L::values(raw[g], v[g]);
      const int here = first;
      if (step + 1 < steps) {
        load(step + 1);
      } else if (first + kRowsWarps * G < end) {
        first += kRowsWarps * G;
        load(0);
        first = here;
      }
#pragma unroll
      for (int r = 0; r < R; ++r) {
        float xr[kLaneColumns];
        load_x(x + r * p.ldx, step * kStep + lane * kLaneColumns, p.in, row0 + r < p.rows, p.vector_x, xr);
#pragma unroll
        for (int g = 0; g < G; ++g) {
#pragma unroll
          for (int i = 0; i < kLaneColumns; ++i) sum[g * R + r] = fmaf(v[g][i], xr[i], sum[g * R + r]);
        }
      }
    }
    lane_sums<N>(sum, lane);
    constexpr int kLanes = kWarp / N;
    const int at = lane / kLanes, g = at / R, r = at % R;
    if (lane % kLanes == 0 && first + g < end && row0 + r < p.rows) y[r * p.ldy + first + g] = sum[0];
  }
}

constexpr int kColumnsWarps = 16, kColumnsThreads = kColumnsWarps * kWarp;
constexpr int kInputs = 512;  // whose x lies in shared memory at a time

// y[j] = sum_i x[i] W[i][j]. A block takes 256 columns; warp w takes rows w, w + 16, … in one chain, then the warps'
// sums are added in order.
template <WeightFormat F, bool kVector, int R>
__global__ void __launch_bounds__(kColumnsThreads, 1) head_columns_kernel(HeadParams p) {
  using L = Lane<F, kVector>;
  constexpr int kAtOnce = 64 / sizeof(typename L::Raw);  // rows; as many again are in flight
  __shared__ __align__(16) float xs[kInputs * R];
  __shared__ __align__(16) float partial[kColumnsWarps * kStep];
  static_assert(sizeof xs + sizeof partial <= 48 * 1024);
  static_assert(kInputs % (kAtOnce * kColumnsWarps) == 0);  // no step passes the end of xs
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int head = blockIdx.y, row0 = blockIdx.z * R, column = blockIdx.x * kStep + lane * kLaneColumns;
  const WeightRow w = {p.data, nullptr, head * p.stride_out + p.offset, p.in};

  typename L::Raw raw[kAtOnce], next[kAtOnce];
  const auto load = [&](typename L::Raw* to, int first) {  // rows first, first + 16, …; zeros past the last
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int i = first + k * kColumnsWarps;
      WeightRow row = w;
      row.row += min(i, p.per_head - 1);
      to[k] = L::load(row, i < p.per_head ? column : p.in);
    }
  };
  start_next();
  load(next, warp);
  wait_for_previous();
  float sum[R][kLaneColumns] = {};
  for (int chunk = 0; chunk < p.per_head; chunk += kInputs) {
    __syncthreads();
    for (int k = threadIdx.x; k < kInputs * R; k += kColumnsThreads) {
      const int i = chunk + k % kInputs, r = k / kInputs;
      const bool there = i < p.per_head && row0 + r < p.rows;
      xs[k % kInputs * R + r] = there ? p.x[(row0 + r) * p.ldx + head * p.hx + i] : 0.0f;
    }
    __syncthreads();
    const int last = min(kInputs, p.per_head - chunk);
    for (int from = warp; from < last; from += kAtOnce * kColumnsWarps) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) raw[k] = next[k];
      load(next, chunk + from + kAtOnce * kColumnsWarps);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int i = from + k * kColumnsWarps;
        float v[kLaneColumns];
        L::values(raw[k], v);
#pragma unroll
        for (int r = 0; r < R; ++r) {
          const float x = xs[i * R + r];
#pragma unroll
          for (int c = 0; c < kLaneColumns; ++c) sum[r][c] = fmaf(v[c], x, sum[r][c]);
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kLaneColumns; c += 4) {
      *reinterpret_cast<float4*>(partial + warp * kStep + lane * kLaneColumns + c) =
          make_float4(sum[r][c], sum[r][c + 1], sum[r][c + 2], sum[r][c + 3]);
    }
    __syncthreads();
    const int j = blockIdx.x * kStep + threadIdx.x;
    if (threadIdx.x < kStep && j < p.in && row0 + r < p.rows) {
      float t = partial[threadIdx.x];
      for (int other = 1; other < kColumnsWarps; ++other) t += partial[other * kStep + threadIdx.x];
      p.y[(row0 + r) * p.ldy + head * p.hy + j] = t;
    }
  }
}

struct HeadTensorParams {
  HeadParams p;
  const __nv_bfloat16* x;  // [heads, rows, 2 * width], as cut_rows() leaves it
  int64_t width;
};

template <typename K>
__global__ void __launch_bounds__(K::kThreads, K::kBlocks) head_tensor_kernel(HeadTensorParams t) {
  extern __shared__ __align__(128) char shared[];
  wait_for_previous();
  start_next();
  const HeadParams& p = t.p;
  const int first_row = blockIdx.x * K::kRows, first = blockIdx.y * K::kOutputs, head = blockIdx.z;
  const int all = K::kAcross ? p.in : p.per_head, inputs = K::kAcross ? p.per_head : p.in;
  const int rows = min(K::kRows, p.rows - first_row), outputs = min(K::kOutputs, all - first);
  const int row0 = head * p.stride_out + p.offset;
  const TensorTile tile = {t.x + (int64_t{head} * p.rows + first_row) * 2 * t.width,
                           2 * t.width,
                           t.width,
                           nullptr,
                           rows,
                           {p.data, nullptr, K::kAcross ? row0 : row0 + first, p.in},
                           outputs,
                           inputs,
                           K::kAcross ? first : 0};
  float* y = p.y + first_row * p.ldy + head * p.hy + first;
  tensor_tile<K>(tile, shared, [&](int row, int output, float v0, float v1) {
    if (row >= rows) return;
    if (output < outputs) y[row * p.ldy + output] = v0;
    if (output + 1 < outputs) y[row * p.ldy + output + 1] = v1;
  });
}

constexpr unsigned blocks(int64_t items, int64_t each) {
  return static_cast<unsigned>((items + each - 1) / each);
}

template <WeightFormat F, bool kVector, int R>
void launch_rows(HeadParams p, const HeadLinearParams& h, Exec& exec) {
  const unsigned tiles = blocks(p.rows, R), heads = static_cast<unsigned>(h.heads);
  if (h.transposed) {
    launch("head_linear", head_columns_kernel<F, kVector, R>, dim3(blocks(p.in, kStep), heads, tiles),
           kColumnsThreads, 0, exec, p);
    return;
  }
  // About two blocks a multiprocessor, none without work for all its warps.
  constexpr int64_t kLeast = kRowsWarps * kRowsGroup;
  const int64_t cuts = blocks(2 * exec.cuda->sm_count, h.heads);
  p.block_outputs = static_cast<int32_t>(blocks(p.per_head, cuts * kLeast) * kLeast);
  launch("head_linear", head_rows_kernel<F, kVector, R>,
         dim3(blocks(p.per_head, p.block_outputs), heads, tiles), kRowsWarps * kWarp, 0, exec, p);
}

template <WeightFormat F, bool kVector>
void run_rows(const HeadParams& p, const HeadLinearParams& h, Exec& exec) {
  if (p.rows <= 1) return launch_rows<F, kVector, 1>(p, h, exec);
  if (p.rows <= 2) return launch_rows<F, kVector, 2>(p, h, exec);
  if (p.rows <= 4) return launch_rows<F, kVector, 4>(p, h, exec);
  launch_rows<F, kVector, kMostRows>(p, h, exec);
}

template <WeightFormat F, bool kVector>
void run_tensor_heads(const HeadTensorParams& t, const HeadLinearParams& h, Exec& exec) {
  const auto go = [&](auto kind, int64_t outputs) {
    using K = decltype(kind);
    const dim3 grid(blocks(t.p.rows, K::kRows), blocks(outputs, K::kOutputs), static_cast<unsigned>(h.heads));
    launch("head_linear", head_tensor_kernel<K>, grid, K::kThreads, K::kShared, exec, t);
  };
  if (h.transposed) {
    go(TensorKind<F, kVector, 64, 64, true>{}, t.p.in);
  } else {
    go(TensorKind<F, kVector, 64, 64>{}, t.p.per_head);
  }
}

template <WeightFormat F>
void run_heads(const HeadTensorParams& t, bool tensor, bool vector, const HeadLinearParams& h, Exec& exec) {
  if (tensor) return vector ? run_tensor_heads<F, true>(t, h, exec) : run_tensor_heads<F, false>(t, h, exec);
  return vector ? run_rows<F, true>(t.p, h, exec) : run_rows<F, false>(t.p, h, exec);
}

void check_heads(const HeadLinearParams& p) {
  if (p.w.out <= 0 || p.w.out > INT32_MAX)
    fail_op("head_linear", "outputs of a weight, at least", 1, p.w.out);
  if (p.w.in <= 0 || p.w.in > INT32_MAX) fail_op("head_linear", "inputs of a weight, at least", 1, p.w.in);
  if (p.w.format != WeightFormat::kF32 && p.w.format != WeightFormat::kBF16)
    fail_op("head_linear", "weight format, F32 or BF16 only", static_cast<int64_t>(WeightFormat::kBF16),
            static_cast<int64_t>(p.w.format));
  if (p.offset < 0 || p.offset + p.rows_per_head > p.stride_out)
    fail_op("head_linear", "offset + rows_per_head, at most", p.stride_out, p.offset + p.rows_per_head);
  if (static_cast<int64_t>(p.heads) * p.stride_out > p.w.out)
    fail_op("head_linear", "heads * stride_out, at most", p.w.out,
            static_cast<int64_t>(p.heads) * p.stride_out);
}

}  // namespace

void head_linear(const HeadLinearParams& h, Exec& exec) {
  check_heads(h);
  if (h.rows <= 0 || h.heads <= 0 || h.rows_per_head <= 0) return;
  const int64_t inputs = h.transposed ? h.rows_per_head : h.w.in, width = term_width(inputs);
  ArenaScope scope(*exec.scratch);
  const bool tensor = exec.tensor_cores && h.rows > kExactRows;
  __nv_bfloat16* terms =
      tensor ? exec.scratch->take<__nv_bfloat16>(int64_t{h.heads} * h.rows * 2 * width) : nullptr;
  if (exec.measure) return;
  const bool aligned = h.ldx % 4 == 0 && h.hx % 4 == 0 && reinterpret_cast<uintptr_t>(h.x) % 16 == 0;
  const HeadParams p = {static_cast<const char*>(h.w.data),
                        static_cast<int32_t>(h.w.in),
                        h.stride_out,
                        h.offset,
                        h.rows_per_head,
                        h.x,
                        h.ldx,
                        h.hx,
                        h.y,
                        h.ldy,
                        h.hy,
                        h.rows,
                        0,
                        aligned};
  if (tensor) cut_rows({h.x, h.ldx, h.hx, h.rows, h.heads, static_cast<int32_t>(inputs), terms}, exec);
  const bool vector = vector_rows(h.w);
  if (h.w.format == WeightFormat::kF32) {
    run_heads<WeightFormat::kF32>({p, terms, width}, tensor, vector, h, exec);
  } else {
    run_heads<WeightFormat::kBF16>({p, terms, width}, tensor, vector, h, exec);
  }
}

}  // namespace rocket::cuda
