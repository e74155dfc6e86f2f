#include "base/error.h"
#include "ops/cuda_ops.h"
#include "ops/indexer.cuh"

namespace rocket::cuda {
namespace {

// --- pooling ---

constexpr int kPoolThreads = 128;

// Positions fit into 32 bits, which are quicker to divide.
__device__ __forceinline__ int slot_of(int64_t position, int pool) {
  return static_cast<int>(static_cast<uint32_t>(position) % static_cast<uint32_t>(pool));
}
__device__ __forceinline__ int64_t pool_of(int64_t position, int pool) {
  return static_cast<uint32_t>(position) / static_cast<uint32_t>(pool);
}

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
    const int now = slot_of(segment.position + offset, p.pool);
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
  if (slot_of(position, p.pool) == p.pool - 1) {
    pooled.row(pool_of(position, p.pool))[c] = p.gate ? compress(rows, offset, c) : p.k[row * p.ldk + c];
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
    const int64_t slot = slot_of(rows.segment.position + t, p.pool), row = rows.segment.first_row + t;
    tail[slot * p.dim + c] = p.k[row * p.ldk + c];
    if (p.gate) tail[(p.pool + slot) * p.dim + c] = p.gate[row * p.ldgate + c];
  }
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
  IndexScores scores;
  scores.ld = (int64_t{p.max_pools} + 63) / 64 * 64;
  const bool choose = p.max_pools > p.topk || p.score;
  const int64_t fit = choose && scores.ld > 0 ? kScratchFloats / scores.ld : p.rows;
  const int64_t group = fit < 1 ? 1 : fit < p.rows ? fit : p.rows;
  ArenaScope scope(*exec.scratch);
  scores.score = exec.scratch->take<float>(choose ? group * scores.ld : 0);
  if (p.rows == 0) return;
  if (exec.measure) {
    index_lists(p, scores, static_cast<int>(group), exec);
    return;
  }
  for (int64_t first = 0; first < p.rows; first += group) {
    const int rows = static_cast<int>(first + group < p.rows ? group : p.rows - first);
    scores.first_row = static_cast<int>(first);
    if (choose) index_scores(p, scores, rows, exec);
    index_lists(p, scores, rows, exec);
  }
}

}  // namespace rocket::cuda
