#include "base/error.h"
#include "ops/cuda.cuh"
#include "ops/cuda_ops.h"
#include "ops/topk.cuh"

namespace rocket::cuda {
namespace {

// --- pooling ---

constexpr int kPoolThreads = 128;

// A stream's rows of this step, over the tail that was before. Channel c of slot s after row `offset` of the segment.
struct PoolRows {
  const PoolUpdateParams& p;
  const Segment segment;
  const float* tail;

  __device__ __forceinline__ float key(int offset, int slot, int c) const {
    const int row = offset - age(offset, slot);
    return row >= 0 ? p.k[(segment.first_row + row) * p.ldk + c]
                    : tail[static_cast<int64_t>(slot) * p.dim + c];
  }
  __device__ __forceinline__ float gate(int offset, int slot, int c) const {
    const int row = offset - age(offset, slot);
    return row >= 0 && p.gate ? p.gate[(segment.first_row + row) * p.ldgate + c]
                              : tail[static_cast<int64_t>(p.pool + slot) * p.dim + c];
  }

 private:
  // Rows since the slot was written.
  __device__ __forceinline__ int age(int offset, int slot) const {
    const int now = static_cast<int>((segment.position + offset) % p.pool);
    return now >= slot ? now - slot : now - slot + p.pool;
  }
};

// The key of the pool that ends with row `offset`.
__device__ float compress(const PoolRows& rows, int offset, int c) {
  const PoolUpdateParams& p = rows.p;
  const auto logit = [&](int t) {
    const float gate = rows.gate(offset, t, c);
    return p.ape ? gate + p.ape[static_cast<int64_t>(t) * p.dim + c] : gate;
  };
  float top = logit(0), total = 0, sum = 0;
  for (int t = 1; t < p.pool; ++t) top = fmaxf(top, logit(t));
  for (int t = 0; t < p.pool; ++t) {
    const float e = expf(logit(t) - top);
    total += e;
    sum = fmaf(e, rows.key(offset, t, c), sum);
  }
  return sum / total;
}

// What row `offset` of a segment leaves: the pool that it finishes, its checkpoint.
__device__ void finish_row(const PoolRows& rows, const PagedRows& pooled, int offset, int c) {
  const PoolUpdateParams& p = rows.p;
  const int64_t position = rows.segment.position + offset, row = rows.segment.first_row + offset;
  if (position % p.pool == p.pool - 1) {
    pooled.row(position / p.pool)[c] = p.gate ? compress(rows, offset, c) : p.k[row * p.ldk + c];
  }
  float* checkpoint = p.checkpoint ? p.checkpoint[row] : nullptr;
  if (!checkpoint) return;
  for (int slot = 0; slot < p.pool; ++slot) {
    checkpoint[static_cast<int64_t>(slot) * p.dim + c] = rows.key(offset, slot, c);
    checkpoint[static_cast<int64_t>(p.pool + slot) * p.dim + c] = rows.gate(offset, slot, c);
  }
}

// A block for each row. Only a segment's first pool - 1 rows look at the tail from before, so the block of its first row
// does all of these, and replaces the tail afterwards; a thread has a channel to itself.
__global__ void __launch_bounds__(kPoolThreads) pool_kernel(const __grid_constant__ PoolUpdateParams p) {
  wait_for_previous();
  start_next();
  const int c = blockIdx.y * kPoolThreads + threadIdx.x;
  if (c >= p.dim) return;
  const int index = find_segment(p.segment, p.segments, blockIdx.x);
  float* tail = p.tail[index];
  const PoolRows rows{p, p.segment[index], tail};
  const PagedRows pooled = p.pooled[index];
  const int offset = blockIdx.x - rows.segment.first_row;
  if (offset >= p.pool - 1) finish_row(rows, pooled, offset, c);
  if (offset > 0) return;
  for (int t = 0; t < rows.segment.rows && t < p.pool - 1; ++t) finish_row(rows, pooled, t, c);
  const int last = rows.segment.rows - 1;
  for (int t = last; t >= 0 && t > last - p.pool; --t) {
    const int64_t slot = (rows.segment.position + t) % p.pool, row = rows.segment.first_row + t;
    tail[slot * p.dim + c] = p.k[row * p.ldk + c];
    if (p.gate) tail[(p.pool + slot) * p.dim + c] = p.gate[row * p.ldgate + c];
  }
}

// --- scores ---

constexpr int kScoreWarps = 4, kScoreThreads = kScoreWarps * kWarp;
constexpr int kScorePools = 2 * kWarp;  // of a tile: two for each lane
constexpr int kScoreHeads = 8;          // that a warp does at a time
constexpr int kScoreDim = 128;          // of the fast kernel, at most; its queries take 32 KiB at most
constexpr int kScoreQueries = 8192;
static_assert(sizeof(float) * (kScorePools * (kScoreDim + 4) + kScoreQueries + kScoreWarps * kScorePools) <=
              kSharedLimit);

// Scores of a group of rows.
struct Scores {
  float* score = nullptr;  // [rows of the group, ld]
  int64_t ld = 0;
  int first_row = 0;
};

__device__ __forceinline__ int visible_pools(const IndexSelectParams& p, const Segment& segment, int row) {
  const int64_t pools = (segment.position + row - segment.first_row + 1) / p.pool;
  return static_cast<int>(pools < p.max_pools ? pools : p.max_pools);
}
__device__ __forceinline__ bool scores_wanted(const IndexSelectParams& p, int pools) {
  return p.score || pools > p.topk;
}
__device__ __forceinline__ void store_score(const IndexSelectParams& p, const Scores& out, int row, int pool,
                                            float score) {
  out.score[(row - out.first_row) * out.ld + pool] = score;
  if (p.score) p.score[row * p.ldscore + pool] = score;
}
__device__ __forceinline__ float relu(float x) {
  return x < 0 ? 0 : x;
}  // a NaN passes

// Each lane has two pools, each warp a quarter of the heads. Rows' bits do not depend on the grid.
__global__ void __launch_bounds__(kScoreThreads)
    score_kernel(const __grid_constant__ IndexSelectParams p, const Scores out) {
  extern __shared__ __align__(16) float memory[];
  const int stride = p.dim + 4, quads = p.dim / 4;
  float* keys = memory;                    // [kScorePools, stride]
  float* q = keys + kScorePools * stride;  // [heads, dim]
  float* part = q + p.heads * p.dim;       // [kScoreWarps, kScorePools]
  wait_for_previous();
  start_next();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, row = out.first_row + blockIdx.y;
  const int index = find_segment(p.segment, p.segments, row);
  const int pools = visible_pools(p, p.segment[index], row);
  if (!scores_wanted(p, pools) || static_cast<int>(blockIdx.x) * kScorePools >= pools) return;
  const PagedRows pooled = p.pooled[index];
  const float4* from = reinterpret_cast<const float4*>(p.q + row * p.ldq);
  for (int i = threadIdx.x; i < p.heads * quads; i += kScoreThreads)
    reinterpret_cast<float4*>(q)[i] = from[i];
  const float* weight = p.head_weight + row * p.ldw;
  const int heads = p.heads / kScoreWarps;

  for (int first = blockIdx.x * kScorePools; first < pools; first += gridDim.x * kScorePools) {
    __syncthreads();
    for (int i = warp; i < kScorePools; i += kScoreWarps) {
      const bool there = first + i < pools;
      const float4* key = there ? reinterpret_cast<const float4*>(pooled.row(first + i)) : nullptr;
      for (int d = lane; d < quads; d += kWarp) {
        reinterpret_cast<float4*>(keys + i * stride)[d] = there ? key[d] : make_float4(0, 0, 0, 0);
      }
    }
    __syncthreads();
    float sum[2] = {};
    for (int h = warp * heads; h < (warp + 1) * heads; h += kScoreHeads) {
      float dot[2][kScoreHeads] = {};
#pragma unroll 1
      for (int d = 0; d < p.dim; d += 4) {
        const float4 a = *reinterpret_cast<const float4*>(keys + lane * stride + d);
        const float4 b = *reinterpret_cast<const float4*>(keys + (lane + kWarp) * stride + d);
#pragma unroll
        for (int j = 0; j < kScoreHeads; ++j) {
          const float4 y = *reinterpret_cast<const float4*>(q + (h + j) * p.dim + d);
          dot[0][j] = fmaf(y.x, a.x, dot[0][j]);
          dot[1][j] = fmaf(y.x, b.x, dot[1][j]);
          dot[0][j] = fmaf(y.y, a.y, dot[0][j]);
          dot[1][j] = fmaf(y.y, b.y, dot[1][j]);
          dot[0][j] = fmaf(y.z, a.z, dot[0][j]);
          dot[1][j] = fmaf(y.z, b.z, dot[1][j]);
          dot[0][j] = fmaf(y.w, a.w, dot[0][j]);
          dot[1][j] = fmaf(y.w, b.w, dot[1][j]);
        }
      }
#pragma unroll
      for (int j = 0; j < kScoreHeads; ++j) {
        const float w = weight[h + j] * p.head_weight_scale;
        sum[0] = fmaf(w, relu(dot[0][j] * p.scale), sum[0]);
        sum[1] = fmaf(w, relu(dot[1][j] * p.scale), sum[1]);
      }
    }
    part[warp * kScorePools + lane] = sum[0];
    part[warp * kScorePools + lane + kWarp] = sum[1];
    __syncthreads();
    const int i = threadIdx.x;
    if (i < kScorePools && first + i < pools) {
      float score = part[i];
#pragma unroll
      for (int w = 1; w < kScoreWarps; ++w) score += part[w * kScorePools + i];
      store_score(p, out, row, first + i, score);
    }
  }
}

// Any shape: a thread for each pool.
__global__ void __launch_bounds__(kScoreThreads)
    score_any_kernel(const __grid_constant__ IndexSelectParams p, const Scores out) {
  wait_for_previous();
  start_next();
  const int row = out.first_row + blockIdx.y;
  const int index = find_segment(p.segment, p.segments, row);
  const int pools = visible_pools(p, p.segment[index], row);
  if (!scores_wanted(p, pools)) return;
  const PagedRows pooled = p.pooled[index];
  const float *q = p.q + row * p.ldq, *weight = p.head_weight + row * p.ldw;
  for (int pool = blockIdx.x * kScoreThreads + threadIdx.x; pool < pools; pool += gridDim.x * kScoreThreads) {
    const float* key = pooled.row(pool);
    float score = 0;
    for (int h = 0; h < p.heads; ++h) {
      float dot = 0;
      for (int d = 0; d < p.dim; ++d) dot = fmaf(q[static_cast<int64_t>(h) * p.dim + d], key[d], dot);
      score = fmaf(weight[h] * p.head_weight_scale, relu(dot * p.scale), score);
    }
    store_score(p, out, row, pool, score);
  }
}

// --- selection ---

// The tokens of a pool, at their place in the row's list.
__device__ __forceinline__ void list_pool(const IndexSelectParams& p, int32_t* token, int at, int pool) {
  for (int t = 0; t < p.pool; ++t) token[at * p.pool + t] = pool * p.pool + t;
}

// The chosen pools in order, each warp from a range of its own: first it counts, then it lists.
__device__ void list_chosen(const IndexSelectParams& p, const float* score, int pools, int32_t* token,
                            SelectShared& s) {
  const auto key = [&](int i) { return float_key(score[i]); };
  const Threshold t = find_threshold(key, pools, static_cast<uint32_t>(p.topk), s);
  constexpr int kWarps = kSelectThreads / kWarp;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int range = (pools + kSelectThreads - 1) / kSelectThreads * kWarp;
  const int begin = warp * range, end = min(begin + range, pools);
  uint32_t larger = 0, equal = 0;
#pragma unroll 4
  for (int i = begin + lane; i < end; i += kWarp) {
    const uint32_t k = key(i);
    larger += k > t.key;
    equal += k == t.key;
  }
  larger = __reduce_add_sync(0xffffffffu, larger);
  equal = __reduce_add_sync(0xffffffffu, equal);
  if (lane == 0) {
    s.count[warp] = larger;
    s.count[kWarps + warp] = equal;
  }
  __syncthreads();
  larger = equal = 0;  // of the warps before
  for (int w = 0; w < warp; ++w) {
    larger += s.count[w];
    equal += s.count[kWarps + w];
  }
  const uint32_t lower = (1u << lane) - 1;
  for (int base = begin; base < end; base += kWarp) {
    const int i = base + lane;
    const uint32_t k = i < end ? key(i) : 0;
    const uint32_t is_larger = __ballot_sync(0xffffffffu, i < end && k > t.key);
    const uint32_t is_equal = __ballot_sync(0xffffffffu, i < end && k == t.key);
    const uint32_t larger_before = larger + __popc(is_larger & lower);
    const uint32_t equal_before = equal + __popc(is_equal & lower);
    const bool taken = (is_larger >> lane & 1u) || ((is_equal >> lane & 1u) && equal_before < t.equal);
    if (taken) list_pool(p, token, static_cast<int>(larger_before + min(equal_before, t.equal)), i);
    larger += __popc(is_larger);
    equal += __popc(is_equal);
  }
}

// A block for each row.
__global__ void __launch_bounds__(kSelectThreads)
    select_kernel(const __grid_constant__ IndexSelectParams p, const Scores in) {
  __shared__ SelectShared shared;
  wait_for_previous();
  start_next();
  const int row = in.first_row + blockIdx.x;
  const int index = find_segment(p.segment, p.segments, row);
  const Segment segment = p.segment[index];
  const int pools = visible_pools(p, segment, row), chosen = min(pools, p.topk);
  int32_t* token = p.token + row * p.ldtoken;
  if (pools <= p.topk) {
    for (int i = threadIdx.x; i < pools * p.pool; i += kSelectThreads) token[i] = i;
  } else if (p.topk > 0) {
    list_chosen(p, in.score + (row - in.first_row) * in.ld, pools, token, shared);
  }
  const int first = pools * p.pool;
  const int tail =
      p.select_tail ? static_cast<int>(segment.position) + row - segment.first_row + 1 - first : 0;
  for (int t = threadIdx.x; t < tail; t += kSelectThreads) token[chosen * p.pool + t] = first + t;
  if (threadIdx.x == 0) p.count[row] = chosen * p.pool + tail;
}

bool fast_scores(const IndexSelectParams& p) {
  const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  return p.heads % (kScoreWarps * kScoreHeads) == 0 && p.dim % 4 == 0 && p.dim <= kScoreDim &&
         p.heads * p.dim <= kScoreQueries && p.ldq % 4 == 0 && aligned(p.q) && p.pooled.offset % 4 == 0;
}

void score_rows(const IndexSelectParams& p, const Scores& scores, int rows, Exec& exec) {
  const bool fast = fast_scores(p);
  const int tile = fast ? kScorePools : kScoreThreads;
  const int tiles = (p.max_pools + tile - 1) / tile;
  // Blocks beyond what fits on the device at once would only cost launches where contexts are short.
  const int most = (4 * exec.cuda->sm_count + rows - 1) / rows;
  const dim3 grid(static_cast<unsigned>(tiles < most ? tiles : most), static_cast<unsigned>(rows));
  if (!fast) {
    launch("index_select", score_any_kernel, grid, kScoreThreads, 0, exec, p, scores);
    return;
  }
  const size_t floats = kScorePools * (p.dim + 4) + p.heads * p.dim + kScoreWarps * kScorePools;
  launch("index_select", score_kernel, grid, kScoreThreads, floats * sizeof(float), exec, p, scores);
}

}  // namespace

void pool_update(const PoolUpdateParams& p, Exec& exec) {
  if (exec.measure || p.rows == 0) return;
  if (!p.gate && p.pool != 1) fail_op("pool_update", "pool without gate", 1, p.pool);
  const dim3 grid(static_cast<unsigned>(p.rows),
                  static_cast<unsigned>((p.dim + kPoolThreads - 1) / kPoolThreads));
  launch("pool_update", pool_kernel, grid, kPoolThreads, 0, exec, p);
}

void index_select(const IndexSelectParams& p, Exec& exec) {
  constexpr int64_t kScratchFloats = 16 << 20;
  Scores scores;
  scores.ld = (int64_t{p.max_pools} + 63) / 64 * 64;
  const bool choose = p.max_pools > p.topk || p.score;
  const int64_t fit = choose && scores.ld > 0 ? kScratchFloats / scores.ld : p.rows;
  const int64_t group = fit < 1 ? 1 : fit < p.rows ? fit : p.rows;
  ArenaScope scope(*exec.scratch);
  scores.score = exec.scratch->take<float>(choose ? group * scores.ld : 0);
  if (exec.measure || p.rows == 0) return;
  for (int64_t first = 0; first < p.rows; first += group) {
    const int rows = static_cast<int>(first + group < p.rows ? group : p.rows - first);
    scores.first_row = static_cast<int>(first);
    if (choose) score_rows(p, scores, rows, exec);
    launch("index_select", select_kernel, static_cast<unsigned>(rows), kSelectThreads, 0, exec, p, scores);
  }
}

}  // namespace rocket::cuda
