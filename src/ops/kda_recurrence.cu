// The recurrence of KDA, of which kda.cuh has the arithmetic. Few rows: each warp normalises q and k itself. Many: a
// kernel in front does, and rows come through shared memory ahead of their use. Both give a row the same bits.
#include <cuda_pipeline_primitives.h>

#include <algorithm>

#include "ops/cuda.cuh"
#include "ops/cuda_ops.h"
#include "ops/kda.cuh"

namespace rocket::cuda {
namespace {

constexpr int kMaxDim = 256;
constexpr int kWarps = 4;  // of a block, neighbouring columns of one head
constexpr int kThreads = kWarps * kWarp;
constexpr int kFusedRows = 32;  // steps of at most so many rows are one kernel

// --- few rows ---

template <int kRows, bool kExact>
__global__ void __launch_bounds__(kThreads) fused_kernel(KdaRecurrenceParams p) {
  using S = KdaShape<kRows, kExact>;
  __shared__ __align__(16) float shared[kWarps][3][S::kVector];
  static_assert(sizeof(shared) <= kSharedLimit);
  start_next();
  wait_for_previous();
  const int warp = threadIdx.x / kWarp, head = blockIdx.y, dim = S::dim(p);
  const int tile = blockIdx.x * kWarps + warp;
  if (tile * kKdaTile >= dim) return;
  const KdaPlace at = kda_place(tile, head, dim);
  float *q = shared[warp][0], *k = shared[warp][1], *decay = shared[warp][2];
  for (int index = blockIdx.z; index < p.segments; index += gridDim.z) {
    const Segment segment = p.segment[index];
    if (segment.rows == 0) return;
    float* state = p.state[index];
    KdaRowVectors<S::kElements> vectors;
    KdaStateTile<kRows, kExact> tile_state;
    float value = 0, beta = 0;
    float* checkpoint = nullptr;
    const auto load_row = [&](int64_t row) {
      vectors.load(p, row, head, dim, at.lane);
      value = at.own_inside ? p.v[row * p.ldqkv + static_cast<int64_t>(head) * dim + at.own] : 0.0f;
      beta = p.beta[row * p.heads + head];
      checkpoint = p.checkpoint ? p.checkpoint[row] : nullptr;
    };
    load_row(segment.first_row);
    tile_state.load(state, at);
    for (int t = 0; t < segment.rows; ++t) {
      const int64_t row = segment.first_row + t;
      const float qk = vectors.prepare(dim);
#pragma unroll
      for (int i = 0; i < S::kElements; ++i) {
        const int e = at.lane + i * kWarp;
        if (!kExact && e >= dim) break;
        const int slot = S::slot(e, at.group_rows);
        q[slot] = vectors.q[i];
        k[slot] = vectors.k[i];
        decay[slot] = vectors.g[i];
      }
      __syncwarp();
      const float row_value = value, row_beta = beta;
      float* const row_checkpoint = checkpoint;
      if (t + 1 < segment.rows) load_row(row + 1);
      const float o = tile_state.row(q, k, decay, qk, row_beta, row_value, at);
      if (at.lane >= 16 && at.own_inside) p.o[(row * p.heads + head) * dim + at.own] = o;
      if (row_checkpoint) tile_state.store(row_checkpoint, at);
      __syncwarp();
    }
    tile_state.store(state, at);
  }
}

// --- many rows ---

struct Prepared {
  float *q, *k, *decay, *qk;  // [rows, heads, D] three times, [rows, heads]
};

// A warp for each row and head.
template <int kElements>
__global__ void __launch_bounds__(kThreads) prepare_kernel(KdaRecurrenceParams p, Prepared to) {
  start_next();
  wait_for_previous();
  const int lane = threadIdx.x % kWarp;
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (pair >= static_cast<int64_t>(p.rows) * p.heads) return;
  KdaRowVectors<kElements> vectors;
  vectors.load(p, pair / p.heads, static_cast<int>(pair % p.heads), p.head_dim, lane);
  const float qk = vectors.prepare(p.head_dim);
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int e = lane + i * kWarp;
    if (e >= p.head_dim) break;
    to.q[pair * p.head_dim + e] = vectors.q[i];
    to.k[pair * p.head_dim + e] = vectors.k[i];
    to.decay[pair * p.head_dim + e] = vectors.g[i];
  }
  if (lane == 0) to.qk[pair] = qk;
}

constexpr int kStageRows = 4;  // rows between two barriers
constexpr int kStages = 3;

// One row in shared memory: q, k, decay, then the values of the block's columns, beta, qk.
template <int kRows, bool kExact>
struct RowShared {
  using S = KdaShape<kRows, kExact>;
  static constexpr int kValue = 3 * S::kVector, kBeta = kValue + kWarps * kKdaTile, kQk = kBeta + 1;
  static constexpr int kFloats = (kQk + 1 + 3) / 4 * 4;

  // All threads of the block copy.
  __device__ __forceinline__ static void copy(const KdaRecurrenceParams& p, const Prepared& from, int64_t row,
                                              int head, int dim, int group_rows, float* to) {
    const int thread = threadIdx.x;
    const int64_t pair = row * p.heads + head;
    const float* const vectors[3] = {from.q + pair * dim, from.k + pair * dim, from.decay + pair * dim};
    if constexpr (kExact) {
      static_assert(kKdaGroups * kRows == 4 * kWarp && kRows % 4 == 0 && S::kPitch % 4 == 0);
      const int e = 4 * (thread % kWarp), which = thread / kWarp;
      const float* vector = which == 0 ? vectors[0] : which == 1 ? vectors[1] : vectors[2];
      if (which < 3)
        __pipeline_memcpy_async(to + which * S::kVector + S::slot(e, kRows), vector + e, 4 * sizeof(float));
    } else {
#pragma unroll
      for (int which = 0; which < 3; ++which) {
        for (int e = thread; e < dim; e += kThreads) {
          __pipeline_memcpy_async(to + which * S::kVector + S::slot(e, group_rows), vectors[which] + e,
                                  sizeof(float));
        }
      }
    }
    const int column = thread - kThreads / 2, own = blockIdx.x * kWarps * kKdaTile + column;
    if (column >= 0 && own < dim) {
      __pipeline_memcpy_async(to + kValue + column,
                              p.v + row * p.ldqkv + static_cast<int64_t>(head) * dim + own, sizeof(float));
    }
    if (thread == 0) __pipeline_memcpy_async(to + kBeta, p.beta + pair, sizeof(float));
    if (thread == 1) __pipeline_memcpy_async(to + kQk, from.qk + pair, sizeof(float));
  }
  static_assert(kWarps * kKdaTile == kThreads / 2);
};

template <int kRows, bool kExact>
__global__ void __launch_bounds__(kThreads) recurrence_kernel(KdaRecurrenceParams p, Prepared from) {
  using S = KdaShape<kRows, kExact>;
  using Row = RowShared<kRows, kExact>;
  __shared__ __align__(16) float shared[kStages * kStageRows][Row::kFloats];
  static_assert(sizeof(shared) <= kSharedLimit && sizeof(shared) <= 48 * 1024);
  start_next();
  wait_for_previous();
  const int warp = threadIdx.x / kWarp, head = blockIdx.y, dim = S::dim(p);
  const int tile = blockIdx.x * kWarps + warp;
  const bool works = tile * kKdaTile < dim;
  const KdaPlace at = kda_place(tile, head, dim);
  for (int index = blockIdx.z; index < p.segments; index += gridDim.z) {
    const Segment segment = p.segment[index];
    if (segment.rows == 0) return;
    float* state = p.state[index];
    const int stages = (segment.rows + kStageRows - 1) / kStageRows;
    const auto issue = [&](int stage) {
      for (int r = 0; r < kStageRows; ++r) {
        const int t = stage * kStageRows + r;
        if (t >= segment.rows) break;
        Row::copy(p, from, segment.first_row + t, head, dim, at.group_rows,
                  shared[stage % kStages * kStageRows + r]);
      }
      __pipeline_commit();
    };
    __syncthreads();  // nobody still reads the rows of the segment before
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) issue(stage);
    KdaStateTile<kRows, kExact> tile_state;
    if (works) tile_state.load(state, at);
    float* checkpoint = p.checkpoint ? p.checkpoint[segment.first_row] : nullptr;
    for (int stage = 0; stage < stages; ++stage) {
      __pipeline_wait_prior(kStages - 2);
      __syncthreads();
      issue(stage + kStages - 1);
      if (!works) continue;
      const int rows = min(kStageRows, segment.rows - stage * kStageRows);
      for (int r = 0; r < rows; ++r) {
        const float* in = shared[stage % kStages * kStageRows + r];
        const int t = stage * kStageRows + r;
        const int64_t row = segment.first_row + t;
        float* const row_checkpoint = checkpoint;
        if (p.checkpoint && t + 1 < segment.rows) checkpoint = p.checkpoint[row + 1];
        const int own = at.own - static_cast<int>(blockIdx.x) * kWarps * kKdaTile;
        const float value = at.own_inside ? in[Row::kValue + own] : 0.0f;
        const float o =
            tile_state.row(in, in + S::kVector, in + 2 * S::kVector, in[Row::kQk], in[Row::kBeta], value, at);
        if (at.lane >= 16 && at.own_inside) p.o[(row * p.heads + head) * dim + at.own] = o;
        if (row_checkpoint) tile_state.store(row_checkpoint, at);
      }
    }
    __pipeline_wait_prior(0);
    if (works) tile_state.store(state, at);
  }
}

template <int kRows, bool kExact>
void launch_all(const KdaRecurrenceParams& p, const Prepared* through, Exec& exec) {
  const int tiles = (p.head_dim + kKdaTile - 1) / kKdaTile;
  // Segments are as many as rows at most, and most of them empty in a long step: blocks go through them in turns.
  const dim3 grid(static_cast<unsigned>((tiles + kWarps - 1) / kWarps), static_cast<unsigned>(p.heads),
                  static_cast<unsigned>(std::min(p.segments, 16)));
  if (!through) {
    launch("kda_recurrence", fused_kernel<kRows, kExact>, grid, kThreads, 0, exec, p);
    return;
  }
  const int64_t pairs = static_cast<int64_t>(p.rows) * p.heads;
  launch("kda_recurrence", prepare_kernel<KdaShape<kRows, kExact>::kElements>,
         static_cast<unsigned>((pairs + kWarps - 1) / kWarps), kThreads, 0, exec, p, *through);
  launch("kda_recurrence", recurrence_kernel<kRows, kExact>, grid, kThreads, 0, exec, p, *through);
}

}  // namespace

void kda_recurrence(const KdaRecurrenceParams& p, Exec& exec) {
  if (p.rows == 0) return;
  if (p.head_dim % 8 != 0 || p.head_dim < 8 || p.head_dim > kMaxDim) {
    fail_op("kda_recurrence", "head_dim, a multiple of 8 up to", kMaxDim, p.head_dim);
  }
  if (p.state.offset % 4 != 0 || p.checkpoint.offset % 4 != 0) {
    fail_op("kda_recurrence", "offset of the state, its remainder by 4", 0,
            p.state.offset % 4 + p.checkpoint.offset % 4);
  }
  ArenaScope scope(*exec.scratch);
  Prepared prepared{};
  const bool many = p.rows > kFusedRows;
  if (many) {
    const int64_t pairs = static_cast<int64_t>(p.rows) * p.heads;
    for (float** part : {&prepared.q, &prepared.k, &prepared.decay})
      *part = exec.scratch->take<float>(pairs * p.head_dim);
    prepared.qk = exec.scratch->take<float>(pairs);
  }
  if (exec.measure) return;
  const auto run = p.head_dim == 128   ? launch_all<16, true>
                   : p.head_dim <= 32  ? launch_all<4, false>
                   : p.head_dim <= 128 ? launch_all<16, false>
                                       : launch_all<32, false>;
  run(p, many ? &prepared : nullptr, exec);
}

}  // namespace rocket::cuda
