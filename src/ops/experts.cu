// swiglu, expert_sum, and expert_ffn for rows whose bits must depend on the row only.
#include <algorithm>

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
  launch_fence("expert_sum", sum_kernel<T>, static_cast<unsigned>(int64_t{p.rows} * blocks), kSumThreads, 0,
               exec, reinterpret_cast<const T*>(p.out), reinterpret_cast<const T*>(p.shared), p.topk, width,
               blocks, reinterpret_cast<T*>(p.y));
}

// ---- expert_ffn, exact

constexpr int kAlwaysExact =
    16;  // so few rows gain nothing from rounding: each expert is read for one or two of them

// Steps of weights on their way for each warp, and blocks of an SM. A single row has little more than two blocks for each
// SM, which are spread evenly and hold many copies; more rows fill every SM with blocks one after the other.
template <int kRows>
struct Exact {
  static constexpr int kRing = kRows == 1 ? 8 : 4, kResident = kRows == 1 ? 2 : 3;
  using Stream = WeightStream<kRing>;
};
// Rows of down, of each warp's kOutputs, that gate_up_exact asks for ahead of down_exact; 0: none, and no scales.
constexpr int kDownAhead = 8;

// Rows of down, one behind the other: those of a block of down_exact. data null: none.
struct DownAhead {
  const char* data;
  const char* scale;
  int rows;
};

struct ExactShared {
  uint32_t largest[kExactRows][kFfnWarps];
  DownAhead ahead;
};

// Units of shared memory of one exact row of dim: two float16 columns.
__host__ __device__ __forceinline__ int exact_units(int dim) {
  return (dim + kStep - 1) / kStep * (kStep * 2 * static_cast<int>(sizeof(__half)) / 16);
}

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

// Between the two kernels memory would idle: while the last blocks of gate_up_exact work off their rings, and while the
// first ones of down_exact look up what they are to do. So each of these last blocks asks for weights of one of these
// first blocks. This finds them, for one thread.
__device__ __forceinline__ DownAhead find_ahead(const FfnArgs& a, int blocks) {
  const DownAhead none = {nullptr, nullptr, 0};
  if (kDownAhead == 0) return none;
  const int tiles = a.pairs.tile ? *a.pairs.tiles : static_cast<int>(gridDim.x) / blocks;
  const int block = static_cast<int>(blockIdx.x) - max(0, tiles * blocks - a.ahead_blocks);
  if (block < 0 || block / a.down_blocks >= tiles) return none;
  const ExpertTile tile = find_tile(a, block / a.down_blocks);
  if (tile.expert < 0) return none;
  const Weight& w = a.p.expert[tile.expert].down;
  if (!loads_whole(w)) return none;
  const int row = block % a.down_blocks * kFfnWarps * kOutputs;
  return {static_cast<const char*>(w.data) + row * (w.in / 2),
          static_cast<const char*>(w.block_scale) + row * (w.in / 16), a.p.hidden - row};
}

// The warp's part of it: kDownAhead rows of nibbles and all rows' scales. The other rows come from memory when these
// come from the cache.
__device__ __forceinline__ void ask_for_down(const DownAhead& ahead, int inner) {
  const int first = static_cast<int>(threadIdx.x) / kWarp * kOutputs, rows = ahead.rows - first;
  const int lane = threadIdx.x % kWarp;
  if (!ahead.data || rows <= 0 || lane > 1) return;
  const int row_bytes = lane == 0 ? inner / 2 : inner / 16;
  const char* from = (lane == 0 ? ahead.data : ahead.scale) + int64_t{first} * row_bytes;
  const int skip =
      static_cast<int>(-reinterpret_cast<uintptr_t>(from) % 16);  // scales are aligned to two bytes only
  const int bytes = (min(rows, lane == 0 ? kDownAhead : kOutputs) * row_bytes - skip) / 16 * 16;
  if (bytes > 0) prefetch_bytes(from + skip, static_cast<uint32_t>(bytes));
}
static_assert(kDownAhead <= kOutputs);

// The sums of a warp's sixteen weight rows with all rows of the tile: rows g and g + 8 of it with the tile's row t in
// the lane 4 * g + t. Calls last_asked() when no more of these rows is to be asked for.
template <int kRows, typename F>
__device__ __forceinline__ void multiply_exact(typename Exact<kRows>::Stream& stream, const uint4* x,
                                               int rows, int steps, F last_asked, float (&sum)[2]) {
  constexpr int kColumns = 2 * kRows, kRing = Exact<kRows>::kRing;
  const int lane = threadIdx.x % kWarp;
  const int last_copies = max(0, (steps - kRing - 1) / kGroup * kGroup);
  x += lane < rows * 8 ? lane : 0;
  float acc[1][4] = {};
  for (int first = 0; first < steps; first += kGroup) {
    uint32_t s[kGroup][2];
    stream.take_scales(s);
#pragma unroll
    for (int d = 0; d < kGroup; ++d) {
      if (first + d < steps) {
        uint4 q[2];
        stream.template take<kRing - 1>(d, q);
        multiply_step<kColumns, true>(q, s[d], x + d * (kColumns * 16), acc);
        stream.copy(d);
      }
    }
    stream.advance();
    x += kGroup * kColumns * 16;
    if (first == last_copies) last_asked();
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
__global__ void __launch_bounds__(kFfnThreads, Exact<kRows>::kResident)
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
  typename Exact<kRows>::Stream stream;
  const int row = min(channel + g, a.p.inner - 1);
  stream.open(gate, row, up, row, staged + kRows * exact_units(a.p.hidden));
  stream.ask_ahead(gate.in, a.p.inner - row);
  const float* x[kRows];
  int pair[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    pair[r] = find_pair(a, tile, r < tile.rows ? r : 0);
    x[r] = a.p.x + int64_t{pair[r] / a.p.topk} * a.p.ldx;
  }
  float back[kRows], sum[2];
  stage_exact<kRows>(x, tile.rows, a.p.hidden, shared, staged, back);
  if (threadIdx.x == 0) shared.ahead = find_ahead(a, blocks);
  __syncthreads();
  multiply_exact<kRows>(
      stream, staged, tile.rows, (a.p.hidden + kStep - 1) / kStep,
      [&] { ask_for_down(shared.ahead, a.p.inner); }, sum);
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
__global__ void __launch_bounds__(kFfnThreads, Exact<kRows>::kResident)
    down_exact(const __grid_constant__ FfnArgs a, int blocks) {
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
  typename Exact<kRows>::Stream stream;
  const int row = min(output + g, a.p.hidden - 1);
  stream.open(w, row, w, min(output + g + 8, a.p.hidden - 1), staged + kRows * exact_units(a.p.inner));
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
  stream.ask_ahead(w.in, a.p.hidden - row);  // not earlier: the caches might not hold it until it is needed
  const float weight = a.p.weight[mine];
  float back[kRows], sum[2];
  stage_exact<kRows>(x, tile.rows, a.p.inner, shared, staged, back);
  __syncthreads();
  multiply_exact<kRows>(stream, staged, tile.rows, (a.p.inner + kStep - 1) / kStep, [] {}, sum);
  if (t >= tile.rows) return;
  const float factor = pick(back, t);
  float* out = a.p.out + mine * a.p.hidden + output + g;
  if (output + g < a.p.hidden) out[0] = sum[0] * w.global_scale * factor * weight;
  if (output + g + 8 < a.p.hidden) out[8] = sum[1] * w.global_scale * factor * weight;
}

// Dynamic shared memory for so many rows of dim and the ring.
size_t exact_bytes(int dim, int rows) {
  return sizeof(uint4) * exact_units(dim) * rows +
         (rows == 1 ? Exact<1>::Stream::kBytes : Exact<2>::Stream::kBytes);
}
static_assert(Exact<2>::Stream::kBytes == Exact<kExactRows>::Stream::kBytes);

// Rows of an exact tile: 1, 2 or kExactRows; 0 if shared memory does not hold one. Where few experts have more than two
// rows, tiles have no more, and leave room for more blocks: two tiles of an expert are worked on at about the same time,
// so that the second finds its weights in the second-level cache.
int exact_rows(const ExpertFfnParams& p) {
  const int dim = p.hidden > p.inner ? p.hidden : p.inner;
  const auto fits = [&](int rows) { return exact_bytes(dim, rows) + sizeof(ExactShared) <= kSharedLimit; };
  int rows = 2 * int64_t{p.rows} * p.topk > p.experts ? kExactRows : 2;
  while (rows > 0 && (!fits(rows) || (rows > 1 && rows / 2 >= p.rows))) rows /= 2;
  return rows;
}

template <int kRows>
void launch_exact(const FfnArgs& from, int64_t tiles, Exec& exec) {
  FfnArgs a = from;
  const int inner_blocks = (a.p.inner + kFfnWarps * kChannels - 1) / (kFfnWarps * kChannels);
  a.down_blocks = (a.p.hidden + kFfnWarps * kOutputs - 1) / (kFfnWarps * kOutputs);
  a.ahead_blocks = Exact<kRows>::kResident * exec.cuda->sm_count;
  const auto shared = [&](int dim) {
    if (a.fast_rows == 0) return size_t{0};
    const size_t even = kRows == 1 ? shared_to_spread(*exec.cuda, Exact<kRows>::kResident) : 0;
    return std::max(exact_bytes(dim, kRows), even);
  };
  launch("expert_ffn", gate_up_exact<kRows>, static_cast<unsigned>(tiles * inner_blocks), kFfnThreads,
         shared(a.p.hidden), exec, a, inner_blocks);
  launch("expert_ffn", down_exact<kRows>, static_cast<unsigned>(tiles * a.down_blocks), kFfnThreads,
         shared(a.p.inner), exec, a, a.down_blocks);
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
