// The recurrence of KDA. A warp has 16 columns of one head's state in registers, all Dk rows of them, so that the sums
// along Dk stay within the warp: lane 4 g + c has four columns of the g-th eighth of the rows. Few rows: each warp
// normalises q and k itself. Many: a kernel in front does, and rows come through shared memory ahead of their use.
// Both give a row the same bits.
#include <cuda_pipeline_primitives.h>

#include <algorithm>

#include "ops/cuda.cuh"
#include "ops/cuda_ops.h"

namespace rocket::cuda {
namespace {

constexpr int kMaxDim = 256;
constexpr int kWarps = 4;  // of a block, neighbouring columns of one head
constexpr int kThreads = kWarps * kWarp;
constexpr int kTile = 16;       // columns of a warp
constexpr int kGroups = 8;      // of rows, each with one lane for four columns
constexpr int kFusedRows = 32;  // steps of at most so many rows are one kernel
constexpr unsigned kAll = 0xffffffffu;

// kRows: rows of a lane, at most; kExact: D = 8 kRows, else any smaller D.
template <int kRows, bool kExact>
struct Shape {
  static constexpr int kElements = (kGroups * kRows + kWarp - 1) / kWarp;  // of a row's vector in a lane
  // Vectors over Dk lie in shared memory with a gap behind each group's part, so that groups read other banks.
  static constexpr int kPitch = kExact ? kRows + 4 : kRows + 1;
  static constexpr int kVector = kGroups * kPitch;

  __device__ static int dim(const KdaRecurrenceParams& p) { return kExact ? kGroups * kRows : p.head_dim; }
  __device__ static int slot(int i, int group_rows) { return i / group_rows * kPitch + i % group_rows; }
};

// Where a lane stands.
struct Place {
  int lane, column;     // first of its four columns
  int own;              // the column whose value, d and output it handles
  int64_t at;           // its first state element in a [heads, D, D] state
  int group_rows, dim;  // rows of a group, D
  bool inside, own_inside;
};

__device__ __forceinline__ Place place(int tile, int head, int dim) {
  Place at;
  at.lane = threadIdx.x % kWarp;
  at.dim = dim;
  at.group_rows = dim / kGroups;
  at.column = tile * kTile + at.lane % 4 * 4;
  at.own = at.column + at.lane / 4 % 4;
  at.inside = at.column < dim;
  at.own_inside = at.own < dim;
  at.at = (static_cast<int64_t>(head) * dim + at.lane / 4 * at.group_rows) * dim + at.column;
  return at;
}

template <int kRows, bool kExact>
struct StateTile {
  float4 s[kRows];

  __device__ __forceinline__ void load(const float* state, const Place& at) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool has = kExact || (at.inside && i < at.group_rows);
      s[i] = has ? *reinterpret_cast<const float4*>(state + at.at + static_cast<int64_t>(i) * at.dim)
                 : make_float4(0, 0, 0, 0);
    }
  }
  __device__ __forceinline__ void store(float* state, const Place& at) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (kExact || (at.inside && i < at.group_rows))
        *reinterpret_cast<float4*>(state + at.at + static_cast<int64_t>(i) * at.dim) = s[i];
    }
  }

  // Four values of a vector in shared memory, of this lane's group; zero behind the group's end.
  __device__ __forceinline__ static void get(const float* vector, int i, int group_rows, float (&to)[4]) {
    if constexpr (kExact) {
      const float4 v = *reinterpret_cast<const float4*>(vector + i);
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) to[j] = i + j < group_rows ? vector[i + j] : 0.0f;
    }
  }

  // One row; q, k, decay in shared memory. Lanes below 16 bring the value of their own column, the others return the
  // output of theirs. S is read once, as decayed: S^T q after the write is S'^T q + (k . q) d.
  __device__ __forceinline__ float row(const float* q, const float* k, const float* decay, float qk,
                                       float beta, float value, const Place& at) {
    const int lane = at.lane, group = lane / 4 * Shape<kRows, kExact>::kPitch;
    float seen[4] = {}, read[4] = {};
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      float q4[4], k4[4], w4[4];
      get(q + group, i, at.group_rows, q4);
      get(k + group, i, at.group_rows, k4);
      get(decay + group, i, at.group_rows, w4);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float4& x = s[i + j];
        x = make_float4(x.x * w4[j], x.y * w4[j], x.z * w4[j], x.w * w4[j]);
        seen[0] = fmaf(k4[j], x.x, seen[0]), read[0] = fmaf(q4[j], x.x, read[0]);
        seen[1] = fmaf(k4[j], x.y, seen[1]), read[1] = fmaf(q4[j], x.y, read[1]);
        seen[2] = fmaf(k4[j], x.z, seen[2]), read[2] = fmaf(q4[j], x.z, read[2]);
        seen[3] = fmaf(k4[j], x.w, seen[3]), read[3] = fmaf(q4[j], x.w, read[3]);
      }
    }
    const float sum = over_groups(seen, read, lane);
    const float d = beta * (value - sum);  // of lane's own column, in lanes below 16
    float4 write;
    write.x = __shfl_sync(kAll, d, lane % 4);
    write.y = __shfl_sync(kAll, d, lane % 4 + 4);
    write.z = __shfl_sync(kAll, d, lane % 4 + 8);
    write.w = __shfl_sync(kAll, d, lane % 4 + 12);
    const float own = __shfl_sync(kAll, d, lane % 16);
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      float k4[4];
      get(k + group, i, at.group_rows, k4);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float4& x = s[i + j];
        x = make_float4(fmaf(k4[j], write.x, x.x), fmaf(k4[j], write.y, x.y), fmaf(k4[j], write.z, x.z),
                        fmaf(k4[j], write.w, x.w));
      }
    }
    return fmaf(qk, own, sum);
  }

  // Sums over the eight groups. Lane l gets column l / 4 % 4 of its four: of `seen` below 16, of `read` from 16 on. At
  // each step a lane keeps half of its values and hands the other half to the lane that keeps those.
  __device__ __forceinline__ static float over_groups(const float (&seen)[4], const float (&read)[4],
                                                      int lane) {
    const bool b4 = lane & 16, b3 = lane & 8, b2 = lane & 4;
    float a[4], b[2];
#pragma unroll
    for (int c = 0; c < 4; ++c)
      a[c] = (b4 ? read[c] : seen[c]) + __shfl_xor_sync(kAll, b4 ? seen[c] : read[c], 16);
#pragma unroll
    for (int c = 0; c < 2; ++c)
      b[c] = (b3 ? a[c + 2] : a[c]) + __shfl_xor_sync(kAll, b3 ? a[c] : a[c + 2], 8);
    return (b2 ? b[1] : b[0]) + __shfl_xor_sync(kAll, b2 ? b[0] : b[1], 4);
  }
};

// --- preparing a row ---

// Element lane + 32 i of a row's vectors.
template <int kElements>
struct RowVectors {
  float q[kElements], k[kElements], g[kElements];

  __device__ __forceinline__ void load(const KdaRecurrenceParams& p, int64_t row, int head, int dim,
                                       int lane) {
    const int64_t at = row * p.ldqkv + static_cast<int64_t>(head) * dim;
    const int64_t at_g = (row * p.heads + head) * dim;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int e = lane + i * kWarp;
      const bool has = e < dim;
      q[i] = has ? p.q[at + e] : 0.0f;
      k[i] = has ? p.k[at + e] : 0.0f;
      g[i] = has ? p.g[at_g + e] : 0.0f;
    }
  }

  // Leaves l2norm(q) * D^-1/2, l2norm(k), exp(g), and returns the product of q and k.
  __device__ __forceinline__ float prepare(int dim) {
    float qq = 0, kk = 0, qk = 0;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      qq = fmaf(q[i], q[i], qq);
      kk = fmaf(k[i], k[i], kk);
    }
    // 1 / sqrt, not rsqrt: the compiler works a constant dim out, and must find what the device would.
    const float q_scale = rsqrtf(warp_sum(qq) + 1e-6f) * (1.0f / sqrtf(static_cast<float>(dim)));
    const float k_scale = rsqrtf(warp_sum(kk) + 1e-6f);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      q[i] *= q_scale;
      k[i] *= k_scale;
      g[i] = expf(g[i]);
      qk = fmaf(q[i], k[i], qk);
    }
    return warp_sum(qk);
  }
};

// --- few rows ---

template <int kRows, bool kExact>
__global__ void __launch_bounds__(kThreads) fused_kernel(KdaRecurrenceParams p) {
  using S = Shape<kRows, kExact>;
  __shared__ __align__(16) float shared[kWarps][3][S::kVector];
  static_assert(sizeof(shared) <= kSharedLimit);
  start_next();
  wait_for_previous();
  const int warp = threadIdx.x / kWarp, head = blockIdx.y, dim = S::dim(p);
  const int tile = blockIdx.x * kWarps + warp;
  if (tile * kTile >= dim) return;
  const Place at = place(tile, head, dim);
  float *q = shared[warp][0], *k = shared[warp][1], *decay = shared[warp][2];
  for (int index = blockIdx.z; index < p.segments; index += gridDim.z) {
    const Segment segment = p.segment[index];
    if (segment.rows == 0) return;
    float* state = p.state[index];
    RowVectors<S::kElements> vectors;
    StateTile<kRows, kExact> tile_state;
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
  RowVectors<kElements> vectors;
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
  using S = Shape<kRows, kExact>;
  static constexpr int kValue = 3 * S::kVector, kBeta = kValue + kWarps * kTile, kQk = kBeta + 1;
  static constexpr int kFloats = (kQk + 1 + 3) / 4 * 4;

  // All threads of the block copy.
  __device__ __forceinline__ static void copy(const KdaRecurrenceParams& p, const Prepared& from, int64_t row,
                                              int head, int dim, int group_rows, float* to) {
    const int thread = threadIdx.x;
    const int64_t pair = row * p.heads + head;
    const float* const vectors[3] = {from.q + pair * dim, from.k + pair * dim, from.decay + pair * dim};
    if constexpr (kExact) {
      static_assert(kGroups * kRows == 4 * kWarp && kRows % 4 == 0 && S::kPitch % 4 == 0);
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
    const int column = thread - kThreads / 2, own = blockIdx.x * kWarps * kTile + column;
    if (column >= 0 && own < dim) {
      __pipeline_memcpy_async(to + kValue + column,
                              p.v + row * p.ldqkv + static_cast<int64_t>(head) * dim + own, sizeof(float));
    }
    if (thread == 0) __pipeline_memcpy_async(to + kBeta, p.beta + pair, sizeof(float));
    if (thread == 1) __pipeline_memcpy_async(to + kQk, from.qk + pair, sizeof(float));
  }
  static_assert(kWarps * kTile == kThreads / 2);
};

template <int kRows, bool kExact>
__global__ void __launch_bounds__(kThreads) recurrence_kernel(KdaRecurrenceParams p, Prepared from) {
  using S = Shape<kRows, kExact>;
  using Row = RowShared<kRows, kExact>;
  __shared__ __align__(16) float shared[kStages * kStageRows][Row::kFloats];
  static_assert(sizeof(shared) <= kSharedLimit && sizeof(shared) <= 48 * 1024);
  start_next();
  wait_for_previous();
  const int warp = threadIdx.x / kWarp, head = blockIdx.y, dim = S::dim(p);
  const int tile = blockIdx.x * kWarps + warp;
  const bool works = tile * kTile < dim;
  const Place at = place(tile, head, dim);
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
    StateTile<kRows, kExact> tile_state;
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
        const int own = at.own - static_cast<int>(blockIdx.x) * kWarps * kTile;
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
  const int tiles = (p.head_dim + kTile - 1) / kTile;
  // Segments are as many as rows at most, and most of them empty in a long step: blocks go through them in turns.
  const dim3 grid(static_cast<unsigned>((tiles + kWarps - 1) / kWarps), static_cast<unsigned>(p.heads),
                  static_cast<unsigned>(std::min(p.segments, 16)));
  if (!through) {
    launch("kda_recurrence", fused_kernel<kRows, kExact>, grid, kThreads, 0, exec, p);
    return;
  }
  const int64_t pairs = static_cast<int64_t>(p.rows) * p.heads;
  launch("kda_recurrence", prepare_kernel<Shape<kRows, kExact>::kElements>,
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
