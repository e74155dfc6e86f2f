// swiglu, expert_sum, and expert_ffn for rows whose bits must depend on the row only.
#include "ops/cuda_ops.h"
#include "ops/experts.cuh"

namespace rocket::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) swiglu_kernel(SwigluParams p, int blocks) {
  wait_for_previous();
  start_next();
  const int64_t row = blockIdx.x / blocks;
  const int i = static_cast<int>(blockIdx.x % blocks) * kThreads + threadIdx.x;
  if (i >= p.dim) return;
  p.y[row * p.ldy + i] = clamped_swiglu(p.gate[row * p.ld + i], p.up[row * p.ld + i], p.limit);
}

constexpr int kSumThreads = 64;

__device__ __forceinline__ float add(float a, float b) {
  return a + b;
}
__device__ __forceinline__ float4 add(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// T: float, or float4 where the sizes and addresses allow; width = hidden in units of T. y may be shared.
template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    sum_kernel(const T* out, const T* shared, int topk, int width, int blocks, T* y) {
  wait_for_previous();
  start_next();
  const int64_t row = blockIdx.x / blocks;
  const int i = static_cast<int>(blockIdx.x % blocks) * kSumThreads + threadIdx.x;
  if (i >= width) return;
  const T* from = out + row * topk * width + i;
  T sum = from[0];
#pragma unroll 8
  for (int j = 1; j < topk; ++j) sum = add(sum, from[int64_t{j} * width]);
  if (shared) sum = add(sum, shared[row * width + i]);
  y[row * width + i] = sum;
}

template <typename T>
void launch_sum(const ExpertSumParams& p, Exec& exec) {
  const int width = p.hidden / static_cast<int>(sizeof(T) / sizeof(float));
  const int blocks = (width + kSumThreads - 1) / kSumThreads;
  launch("expert_sum", sum_kernel<T>, static_cast<unsigned>(int64_t{p.rows} * blocks), kSumThreads, 0, exec,
         reinterpret_cast<const T*>(p.out), reinterpret_cast<const T*>(p.shared), p.topk, width, blocks,
         reinterpret_cast<T*>(p.y));
}

// ---- expert_ffn, exact

constexpr int kAlwaysExact =
    16;  // so few rows gain nothing from rounding: each expert is read for one or two of them

struct ExactShared {
  uint32_t largest[kExactRows][kFfnWarps];
};

// Rows of x as high and low columns into `to`, [steps, 4, 2 * kRows, 4] units of 16 bytes, by the whole block. The
// caller puts a barrier behind it. Returns each row's factor back.
template <int kRows>
__device__ __forceinline__ void stage_exact(const float* const (&x)[kRows], int rows, int dim,
                                            ExactShared& shared, uint4* to, float (&back)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    back[r] = 0;
    if (r >= rows) continue;
    RowReader row;
    row.open(x[r], dim);
    const uint32_t of_warp = row.largest();
    if (threadIdx.x % kWarp == 0) shared.largest[r][threadIdx.x / kWarp] = of_warp;
    __syncthreads();
    uint32_t largest = 0;
#pragma unroll
    for (int w = 0; w < kFfnWarps; ++w) largest = max(largest, shared.largest[r][w]);
    const int exponent = row_exponent(largest);
    const float factor = power_of_two(exponent);
    back[r] = back_factor(exponent);
    row.each([&](int unit, const float (&v)[8]) {
      float high[8], low[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        high[i] = v[i] * factor;
        low[i] = high[i] - __half2float(__float2half_rn(high[i]));
      }
      uint4* at = to + (unit / 4 * (2 * kRows) + 2 * r) * 4 + unit % 4;
      at[0] = unit_of(high);
      at[4] = unit_of(low);
    });
  }
}

// The sums of a warp's sixteen weight rows with all rows of the tile: rows g and g + 8 of it with the tile's row t in
// the lane 4 * g + t.
template <int kRows>
__device__ __forceinline__ void multiply_exact(WeightStream& stream, const uint4* x, int rows, int steps,
                                               float (&sum)[2]) {
  constexpr int kColumns = 2 * kRows;
  const int lane = threadIdx.x % kWarp;
  x += lane < rows * 8 ? lane : 0;
  float acc[1][4] = {};
  for (int first = 0; first < steps; first += kDepth) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      if (first + d < steps) {
        multiply_step<kColumns, true>(stream.q[d], stream.s[d], x + d * (kColumns * 16), acc);
        stream.fetch(d);
      }
    }
    stream.advance();
    x += kDepth * kColumns * 16;
  }
  sum[0] = acc[0][0] + acc[0][1];
  sum[1] = acc[0][2] + acc[0][3];
}

template <typename T, int kRows>
__device__ __forceinline__ T pick(const T (&v)[kRows], int i) {
  T found = v[0];
#pragma unroll
  for (int k = 1; k < kRows; ++k) {
    if (i == k) found = v[k];
  }
  return found;
}

// act = swiglu(gate x, up x) of all pairs. Blocks of one tile follow each other: kFfnWarps * kChannels channels each.
template <int kRows>
__global__ void __launch_bounds__(kFfnThreads, 2)
    gate_up_exact(const __grid_constant__ FfnArgs a, int blocks) {
  extern __shared__ uint4 staged[];
  __shared__ ExactShared shared;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const int channel = (static_cast<int>(blockIdx.x % blocks) * kFfnWarps + warp) * kChannels;
  prefetch_table(a.p);
  wait_for_previous();
  // Only now: what starts next may read the ids and the list before it waits, and relies on this kernel's wait.
  start_next();
  const ExpertTile tile = find_tile(a, blockIdx.x / blocks);
  if (tile.expert < 0) return;
  const Weight gate = a.p.expert[tile.expert].gate, up = a.p.expert[tile.expert].up;
  if ((a.fast_rows == 0) | !(loads_whole(gate) & loads_whole(up))) {
    plain_gate_up(a, tile, channel);
    return;
  }
  WeightStream stream;
  const int row = min(channel + g, a.p.inner - 1);
  stream.open(gate, row, up, row);
  stream.ask_ahead(gate.in);
  const float* x[kRows];
  int pair[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    pair[r] = find_pair(a, tile, r < tile.rows ? r : 0);
    x[r] = a.p.x + int64_t{pair[r] / a.p.topk} * a.p.ldx;
  }
  float back[kRows], sum[2];
  stage_exact<kRows>(x, tile.rows, a.p.hidden, shared, staged, back);
  __syncthreads();
  multiply_exact<kRows>(stream, staged, tile.rows, (a.p.hidden + kStep - 1) / kStep, sum);
  if (t >= tile.rows || channel + g >= a.p.inner) return;
  const float factor = pick(back, t);
  a.act[int64_t{pick(pair, t)} * a.p.inner + channel + g] =
      clamped_swiglu(sum[0] * gate.global_scale * factor, sum[1] * up.global_scale * factor, a.p.limit);
}

// out = down act times the pair's weight; kFfnWarps * kOutputs rows of down a block.
//
// Before it waits, a block reads the ids (or the list) and fetches its first weights. It cannot be too early: a block of
// this kernel starts only after every block of gate_up_exact has called start_next(), which each does after its own
// wait, and that ended when the kernels that wrote ids and list were done.
template <int kRows>
__global__ void __launch_bounds__(kFfnThreads, 2) down_exact(const __grid_constant__ FfnArgs a, int blocks) {
  extern __shared__ uint4 staged[];
  __shared__ ExactShared shared;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const int begin = static_cast<int>(blockIdx.x % blocks) * kFfnWarps * kOutputs,
            output = begin + warp * kOutputs;
  const ExpertTile tile = find_tile(a, blockIdx.x / blocks);
  if (tile.expert < 0) {
    wait_for_previous();
    start_next();
    clear_outputs(a, tile, begin, kFfnWarps * kOutputs);
    return;
  }
  const Weight w = a.p.expert[tile.expert].down;
  if ((a.fast_rows == 0) | !loads_whole(w)) {
    wait_for_previous();
    start_next();
    plain_down(a, tile, output);
    return;
  }
  WeightStream stream;
  stream.open(w, min(output + g, a.p.hidden - 1), w, min(output + g + 8, a.p.hidden - 1));
  stream.ask_ahead(w.in);
  const float* x[kRows];
  int pair[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    pair[r] = find_pair(a, tile, r < tile.rows ? r : 0);
    x[r] = a.act + int64_t{pair[r]} * a.p.inner;
  }
  const int64_t mine = pick(pair, t);
  wait_for_previous();
  start_next();
  const float weight = a.p.weight[mine];
  float back[kRows], sum[2];
  stage_exact<kRows>(x, tile.rows, a.p.inner, shared, staged, back);
  __syncthreads();
  multiply_exact<kRows>(stream, staged, tile.rows, (a.p.inner + kStep - 1) / kStep, sum);
  if (t >= tile.rows) return;
  const float factor = pick(back, t);
  float* out = a.p.out + mine * a.p.hidden + output + g;
  if (output + g < a.p.hidden) out[0] = sum[0] * w.global_scale * factor * weight;
  if (output + g + 8 < a.p.hidden) out[8] = sum[1] * w.global_scale * factor * weight;
}

// Shared memory of one exact row of dim: two float16 columns.
size_t exact_bytes(int dim) {
  return static_cast<size_t>((dim + kStep - 1) / kStep) * kStep * 2 * sizeof(__half);
}

// Rows of an exact tile: 1, 2 or kExactRows, as many as the step has and shared memory holds; 0 if it holds none.
int exact_rows(const ExpertFfnParams& p) {
  const size_t row = exact_bytes(p.hidden > p.inner ? p.hidden : p.inner),
               fit = (kSharedLimit - sizeof(ExactShared)) / row;
  int rows = kExactRows;
  while (rows > 0 && (static_cast<size_t>(rows) > fit || (rows > 1 && rows / 2 >= p.rows))) rows /= 2;
  return rows;
}

template <int kRows>
void launch_exact(const FfnArgs& a, int64_t tiles, Exec& exec) {
  const int inner_blocks = (a.p.inner + kFfnWarps * kChannels - 1) / (kFfnWarps * kChannels);
  const int hidden_blocks = (a.p.hidden + kFfnWarps * kOutputs - 1) / (kFfnWarps * kOutputs);
  const size_t rows = a.fast_rows == 0 ? 0 : kRows;
  launch("expert_ffn", gate_up_exact<kRows>, static_cast<unsigned>(tiles * inner_blocks), kFfnThreads,
         exact_bytes(a.p.hidden) * rows, exec, a, inner_blocks);
  launch("expert_ffn", down_exact<kRows>, static_cast<unsigned>(tiles * hidden_blocks), kFfnThreads,
         exact_bytes(a.p.inner) * rows, exec, a, hidden_blocks);
}

void expert_ffn_exact(const ExpertFfnParams& p, Exec& exec) {
  FfnArgs a;
  a.p = p;
  a.fast_rows = exact_rows(p);
  const int tile_rows = a.fast_rows > 0 ? a.fast_rows : kExactRows;
  const int64_t pairs = int64_t{p.rows} * p.topk;
  if (p.rows > 1) a.pairs = sort_pairs(p, tile_rows, exec);
  a.act = exec.scratch->take<float>(pairs * p.inner);
  if (exec.measure) return;
  const int64_t tiles = p.rows > 1 ? most_tiles(p, tile_rows) : pairs;
  if (tile_rows == 1) {
    launch_exact<1>(a, tiles, exec);
  } else if (tile_rows == 2) {
    launch_exact<2>(a, tiles, exec);
  } else {
    launch_exact<kExactRows>(a, tiles, exec);
  }
}

}  // namespace

void swiglu(const SwigluParams& p, Exec& exec) {
  if (exec.measure || p.rows <= 0 || p.dim <= 0) return;
  const int blocks = (p.dim + kThreads - 1) / kThreads;
  launch("swiglu", swiglu_kernel, static_cast<unsigned>(int64_t{p.rows} * blocks), kThreads, 0, exec, p,
         blocks);
}

void expert_ffn(const ExpertFfnParams& p, Exec& exec) {
  if (p.rows <= 0 || p.topk <= 0) return;
  ArenaScope scope(*exec.scratch);
  if (exec.tensor_cores && p.rows > kAlwaysExact) {
    expert_ffn_rounded(p, exec);
  } else {
    expert_ffn_exact(p, exec);
  }
}

void expert_sum(const ExpertSumParams& p, Exec& exec) {
  if (exec.measure || p.rows <= 0 || p.hidden <= 0) return;
  if (p.topk <= 0)
    throw InputError("expert_sum: topk, at least 1, found " + std::to_string(p.topk),
                     "see num_experts_per_tok");
  const bool whole = p.hidden % 4 == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0 &&
                     reinterpret_cast<uintptr_t>(p.shared) % 16 == 0 &&
                     reinterpret_cast<uintptr_t>(p.y) % 16 == 0;
  if (whole) {
    launch_sum<float4>(p, exec);
  } else {
    launch_sum<float>(p, exec);
  }
}

}  // namespace rocket::cuda
