// Everything between the two large products of a KDA layer, in one kernel for steps of few rows. A cluster of four
// blocks has one head of one segment, each block 32 of the head's channels and the same columns of its state:
//   1. products of the low-rank rows, convolution, gates, for the block's own channels and all rows of the segment; q, k
//      and the log-decays go to every block of the cluster;
//   2. row after row through the block's columns of the state; the outputs' squares go to every block;
//   3. norm and gate of the block's outputs.
// The segment's rows are worked on together where nothing keeps them apart, so that the cluster meets twice whatever
// their number. All sums have the order that the separate kernels give them: a step may be done either way.
#include "ops/cuda_ops.h"
#include "ops/gemv.cuh"
#include "ops/kda.cuh"

namespace rocket::cuda {
namespace {

constexpr int kDim = 128;            // of a head, and of the low-rank rows
constexpr int kParts = 4;            // blocks of a cluster
constexpr int kOwn = kDim / kParts;  // channels of a block
constexpr int kWarps = 4;  // two for each low-rank product; the last two have a tile of the state each
constexpr int kThreads = kWarps * kWarp;
constexpr int kTileWarps = kOwn / kKdaTile, kFirstTileWarp = kWarps - kTileWarps;
constexpr int kTaps = 4;
constexpr int kMostRows = 16;  // of a step
constexpr unsigned kAll = 0xffffffffu;
static_assert(kOwn == kWarp && kMostRows <= kWarp && kTileWarps <= kWarps);

using Shape = KdaShape<kDim / kKdaGroups, true>;
using StateTile = KdaStateTile<kDim / kKdaGroups, true>;

// One row in shared memory, in floats.
struct Row {
  static constexpr int kQ = 0, kK = Shape::kVector,
                       kG = 2 * Shape::kVector;       // of all channels, see Shape::slot()
  static constexpr int kSquare = 3 * Shape::kVector;  // of four outputs each
  static constexpr int kV = kSquare + kDim / 4, kGate = kV + kOwn,
                       kOut = kGate + kOwn;  // of the block's channels
  static constexpr int kBeta = kOut + kOwn, kQk = kBeta + 1, kFloats = (kQk + 1 + 3) / 4 * 4;
  static_assert(Shape::kVector % 4 == 0);
  __device__ static int slot(int channel) { return Shape::slot(channel, kDim / kKdaGroups); }
};
static_assert(kMostRows * Row::kFloats * sizeof(float) <= kSharedLimit);

// Whole warps come to these barriers together. At the first of a block there is nothing yet for others to see.
__device__ __forceinline__ void cluster_arrive_first() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The address in the shared memory of another block of the cluster that `mine` has in this block's.
__device__ __forceinline__ uint32_t in_block(const float* mine, int part) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(mine))), "r"(part));
  return address;
}
__device__ __forceinline__ void put_float(uint32_t address, int index, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address + 4 * index), "f"(v) : "memory");
}

// Of up to 32 rows a lane each holds the pointer to a checkpoint.
__device__ __forceinline__ float* checkpoint_of(const BlockParts& checkpoint, const Segment& segment,
                                                int lane) {
  return checkpoint && lane < segment.rows ? checkpoint[segment.first_row + lane] : nullptr;
}
__device__ __forceinline__ float* from_lane(float* p, int lane) {
  return reinterpret_cast<float*>(__shfl_sync(kAll, reinterpret_cast<unsigned long long>(p), lane));
}

// --- low-rank products ---

// 16 bytes of weights that are read once. Not as read-only data: loads of such may sink below wait_for_previous().
__device__ __forceinline__ uint4 load_early(const char* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// Decoded weights would stay in twice the registers from row to row, which the state needs.
__device__ __forceinline__ void keep_stored(Lane<WeightFormat::kBF16, true>::Raw& raw) {
  asm volatile("" : "+r"(raw.v.x), "+r"(raw.v.y), "+r"(raw.v.z), "+r"(raw.v.w));
}
__device__ __forceinline__ void keep_stored(const Lane<WeightFormat::kF32, true>::Raw&) {}

// Sixteen outputs of one weight by a warp: a half has eight of them, each lane eight columns.
template <WeightFormat F>
struct LowRank {
  using L = Lane<F, true>;
  static constexpr int kOutputs = 8, kLanes = kDim / kLaneColumns;
  static_assert(kLanes == kWarp / 2);
  static_assert(kDim < kMmaLeast);  // sums have gemv.cuh's order in linear, too
  typename L::Raw weight[kOutputs];
  float4 low, high;  // of the row that comes next

  __device__ __forceinline__ void load_weight(const Weight& w, int first, int lane) {
#pragma unroll
    for (int j = 0; j < kOutputs; ++j) {
      const int64_t at = int64_t{first + lane / kLanes * kOutputs + j} * kDim + lane % kLanes * kLaneColumns;
      if constexpr (F == WeightFormat::kBF16) {
        weight[j].v = load_early(static_cast<const char*>(w.data) + 2 * at);
      } else {
        weight[j].low = load_early(static_cast<const char*>(w.data) + 4 * at);
        weight[j].high = load_early(static_cast<const char*>(w.data) + 4 * at + 16);
      }
    }
  }
  __device__ __forceinline__ void load_row(const float* x, int lane) {
    const auto* at = reinterpret_cast<const float4*>(x + lane % kLanes * kLaneColumns);
    low = at[0];
    high = at[1];
  }
  // Lane l gets output l / 2 of the warp's sixteen.
  __device__ __forceinline__ float product(int lane) {
    const float x[kLaneColumns] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    float sum[kOutputs];
#pragma unroll
    for (int j = 0; j < kOutputs; ++j) {
      float w[kLaneColumns];
      keep_stored(weight[j]);
      L::values(weight[j], w);
      sum[j] = 0;
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) sum[j] = fmaf(w[i], x[i], sum[j]);
    }
    lane_sums<kOutputs, kLanes / 2>(sum, lane);
    return sum[0];
  }
};

// --- convolution ---

// One channel of q, k or v.
struct ConvChannel {
  static constexpr int kBatch = 4;  // rows that are loaded at once
  float weight[kTaps], u[kTaps - 1], raw[kBatch];
  int64_t channel;  // of all

  __device__ __forceinline__ void load_weight(const KdaConvParams& p, int64_t at) {
    channel = at;
#pragma unroll
    for (int j = 0; j < kTaps; ++j) weight[j] = p.weight[j * int64_t{p.channels} + channel];
  }
  __device__ __forceinline__ void load_tail(const KdaConvParams& p, const float* tail) {
#pragma unroll
    for (int j = 0; j + 1 < kTaps; ++j) u[j] = tail[j * int64_t{p.channels} + channel];
  }
  __device__ __forceinline__ void load_rows(const KdaConvParams& p, const Segment& segment, int from) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (from + i < segment.rows) raw[i] = p.x[(segment.first_row + from + i) * p.ldx + channel];
    }
  }
  __device__ __forceinline__ void store_tail(const KdaConvParams& p, float* tail) const {
#pragma unroll
    for (int j = 0; j + 1 < kTaps; ++j) tail[j * int64_t{p.channels} + channel] = u[j];
  }
  // The output of the next row, after which the window moves on.
  __device__ __forceinline__ float next(float x) {
    float s = weight[0] * u[0];
    s = fmaf(weight[1], u[1], s);
    s = fmaf(weight[2], u[2], s);
    s = fmaf(weight[3], x, s);
    u[0] = u[1], u[1] = u[2], u[2] = x;
    return s * sigmoid(s);
  }
};

// All rows of the segment, the first of which are loaded; put(t, y) takes the outputs. Lane t has the checkpoint of row t
// in `kept`, here and below.
template <typename F>
__device__ __forceinline__ void convolve(const KdaConvParams& p, const Segment& segment, ConvChannel& conv,
                                         float* kept, F put) {
  for (int from = 0; from < segment.rows; from += ConvChannel::kBatch) {
    if (from > 0) conv.load_rows(p, segment, from);
#pragma unroll
    for (int i = 0; i < ConvChannel::kBatch; ++i) {
      if (from + i >= segment.rows) break;
      put(from + i, conv.next(conv.raw[i]));
      float* const checkpoint = from_lane(kept, from + i);
      if (checkpoint) conv.store_tail(p, checkpoint);
    }
  }
}

// --- the recurrence ---

// Normalises q and k of a row, exponentiates its log-decays; a warp does it.
__device__ __forceinline__ void prepare_row(float* row, int lane) {
  KdaRowVectors<kDim / kWarp> vectors;
#pragma unroll
  for (int i = 0; i < kDim / kWarp; ++i) {
    const int slot = Row::slot(lane + i * kWarp);
    vectors.q[i] = row[Row::kQ + slot];
    vectors.k[i] = row[Row::kK + slot];
    vectors.g[i] = row[Row::kG + slot];
  }
  const float qk = vectors.prepare(kDim);
#pragma unroll
  for (int i = 0; i < kDim / kWarp; ++i) {
    const int slot = Row::slot(lane + i * kWarp);
    row[Row::kQ + slot] = vectors.q[i];
    row[Row::kK + slot] = vectors.k[i];
    row[Row::kG + slot] = vectors.g[i];
  }
  if (lane == 0) row[Row::kQk] = qk;
}

// The rows of the segment through one warp's tile of the state.
__device__ __forceinline__ void recur(const Segment& segment, StateTile& state, const KdaPlace& at, int part,
                                      float* kept, float* shared) {
  const int lane = at.lane, own = at.own - part * kOwn;
  const uint32_t squares = in_block(shared + Row::kSquare + at.column / 4, lane / 4 % kParts);
  for (int t = 0; t < segment.rows; ++t) {
    float* const row = shared + t * Row::kFloats;
    const float o = state.row(row + Row::kQ, row + Row::kK, row + Row::kG, row[Row::kQk], row[Row::kBeta],
                              row[Row::kV + own], at);
    // Lanes from 16 on have the outputs; the four of a quad are four lanes apart.
    const float x = __shfl_sync(kAll, o, 16 + lane % 4), y = __shfl_sync(kAll, o, 20 + lane % 4),
                z = __shfl_sync(kAll, o, 24 + lane % 4), w = __shfl_sync(kAll, o, 28 + lane % 4);
    if (lane >= 16) row[Row::kOut + own] = o;
    if (lane < 4 * kParts)
      put_float(squares, t * Row::kFloats, fmaf(w, w, fmaf(z, z, fmaf(y, y, fmaf(x, x, 0.0f)))));
    float* const checkpoint = from_lane(kept, t);
    if (checkpoint) state.store(checkpoint, at);
  }
}

// --- the kernel ---

struct HeadArgs {
  Weight f_b, g_b;
  const float *f_low, *g_low;  // rows ldf, ldg apart
  int64_t ldf, ldg;
  KdaConvParams conv;
  KdaGatesParams gates;
  KdaRecurrenceParams recurrence;
  GatedNormParams norm;
  bool early;  // the state may be read before the wait
};

template <WeightFormat F>
__global__ void __cluster_dims__(kParts, 1, 1) __launch_bounds__(kThreads, F == WeightFormat::kBF16 ? 3 : 2)
    head_kernel(const __grid_constant__ HeadArgs p) {
  extern __shared__ __align__(16) float shared[];
  cluster_arrive_first();  // behind this barrier all blocks of the cluster run
  start_next();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int part = blockIdx.x, head = blockIdx.y, index = blockIdx.z;
  const int first = head * kDim + part * kOwn;  // channel of C
  const bool decays = warp < kWarps / 2;        // else the warp has the output gates
  const int output = warp % 2 * (kOwn / 2) + lane / 2;
  const bool convolves = warp < 3;  // q, k, v
  LowRank<F> low_rank;
  ConvChannel conv;
  float bias, a_log, norm_weight;
  const auto load_weights = [&] {
    low_rank.load_weight(decays ? p.f_b : p.g_b, first + warp % 2 * (kOwn / 2), lane);
    if (convolves) conv.load_weight(p.conv, warp * (p.conv.channels / 3) + first + lane);
    bias = p.gates.dt_bias[first + output];
    a_log = p.gates.a_log[head];
    norm_weight = p.norm.weight[part * kOwn + lane];
  };
  if (index == 0) load_weights();  // the other segments may be empty, and find them in the second-level cache
  if (!p.early) wait_for_previous();

  // Arrays of the step are older than its kernels.
  const Segment segment = p.conv.segment[index];
  float *const state = p.recurrence.state[index], *const tail = p.conv.tail[index];
  if (segment.rows == 0) {
    if (p.early) wait_for_previous();
    cluster_wait();
    return;
  }
  if (index > 0) load_weights();
  const bool recurs = warp >= kFirstTileWarp;
  const KdaPlace at = kda_place(part * kTileWarps + warp - kFirstTileWarp, head, kDim);
  StateTile tile;
  float *kept_state = nullptr, *kept_tail = nullptr;
  if (recurs) {  // the farthest away
    tile.load(state, at);
    kept_state = checkpoint_of(p.recurrence.checkpoint, segment, lane);
  }
  if (convolves) {
    conv.load_tail(p.conv, tail);
    kept_tail = checkpoint_of(p.conv.checkpoint, segment, lane);
  }
  if (p.early) wait_for_previous();

  const float* const low = decays ? p.f_low : p.g_low;
  const int64_t ld = decays ? p.ldf : p.ldg;
  low_rank.load_row(low + segment.first_row * ld, lane);
  float strength = 0;
  if (convolves) {
    conv.load_rows(p.conv, segment, 0);
  } else if (lane < segment.rows) {
    strength = p.gates.b[(segment.first_row + lane) * int64_t{p.gates.heads} + head];
  }
  if (!convolves && lane < segment.rows) shared[lane * Row::kFloats + Row::kBeta] = sigmoid(strength);

  uint32_t block[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) block[i] = in_block(shared, i);
  cluster_wait();
  if (convolves) {
    convolve(p.conv, segment, conv, kept_tail, [&](int t, float y) {
      if (warp == 2) {
        shared[t * Row::kFloats + Row::kV + lane] = y;
        return;
      }
      const int to = t * Row::kFloats + (warp == 0 ? Row::kQ : Row::kK) + Row::slot(part * kOwn + lane);
#pragma unroll
      for (int i = 0; i < kParts; ++i) put_float(block[i], to, y);
    });
  }
  const float a = expf(a_log);
  for (int t = 0; t < segment.rows; ++t) {
    const float sum = low_rank.product(lane);
    if (t + 1 < segment.rows) low_rank.load_row(low + (segment.first_row + t + 1) * ld, lane);
    if (!decays) {
      shared[t * Row::kFloats + Row::kGate + output] = sum;  // twice the same
      continue;
    }
    const float g = kda_decay(p.gates, sum + bias, a);
    const int to = t * Row::kFloats + Row::kG + Row::slot(part * kOwn + output);
#pragma unroll
    for (int i = 0; i < kParts; i += 2) put_float(lane % 2 ? block[i + 1] : block[i], to, g);
  }
  cluster_arrive();
  if (convolves) conv.store_tail(p.conv, tail);
  cluster_wait();

  for (int t = warp; t < segment.rows; t += kWarps) prepare_row(shared + t * Row::kFloats, lane);
  __syncthreads();
  if (recurs) recur(segment, tile, at, part, kept_state, shared);
  cluster_arrive();
  if (recurs) tile.store(state, at);
  cluster_wait();

  for (int t = warp; t < segment.rows; t += kWarps) {
    const float* const row = shared + t * Row::kFloats;
    const float r = rsqrtf(warp_sum(row[Row::kSquare + lane]) / static_cast<float>(kDim) + p.norm.eps);
    const int64_t to = (segment.first_row + t) * (int64_t{p.norm.heads} * kDim) + first + lane;
    p.norm.y[to] = kda_gated(row[Row::kOut + lane], r, norm_weight, row[Row::kGate + lane]);
  }
}

// --- launch ---

bool fits(const LinearParams& p, WeightFormat format, int64_t width, const float* to) {
  const LinearPart& part = p.part[0];
  return p.part_count == 1 && part.w.format == format && part.w.in == kDim && part.w.out == width &&
         !part.bias && part.y == to && part.ldy == width &&
         reinterpret_cast<uintptr_t>(part.w.data) % 16 == 0 && reinterpret_cast<uintptr_t>(p.x) % 16 == 0 &&
         p.ldx % 4 == 0;
}

// Whether the shapes are the kernel's.
bool fits(const KdaHeadParams& p) {
  const KdaConvParams& conv = p.conv;
  const KdaRecurrenceParams& r = p.recurrence;
  const int64_t width = int64_t{r.heads} * kDim;
  const WeightFormat format = p.f_b.part[0].w.format;
  return r.rows <= kMostRows && r.head_dim == kDim && p.gates.head_dim == kDim && p.norm.head_dim == kDim &&
         p.gates.heads == r.heads && p.norm.heads == r.heads && conv.taps == kTaps &&
         conv.channels == 3 * width && r.state.offset % 4 == 0 && r.checkpoint.offset % 4 == 0 &&
         (format == WeightFormat::kBF16 || format == WeightFormat::kF32) &&
         fits(p.f_b, format, width, p.gates.f) && fits(p.g_b, format, width, p.norm.gate);
}

// Whether each op hands on to the next what the kernel keeps to itself.
bool chained(const KdaHeadParams& p) {
  const KdaConvParams& conv = p.conv;
  const KdaRecurrenceParams& r = p.recurrence;
  const int64_t width = int64_t{r.heads} * kDim;
  return p.f_b.rows == r.rows && p.g_b.rows == r.rows && conv.rows == r.rows && p.gates.rows == r.rows &&
         p.norm.rows == r.rows && conv.segments == r.segments && conv.segment == r.segment && r.q == conv.y &&
         r.k == conv.y + width && r.v == conv.y + 2 * width && r.ldqkv == conv.ldy && r.g == p.gates.g &&
         r.beta == p.gates.beta && p.norm.o == r.o;
}

}  // namespace

void kda_head(const KdaHeadParams& p, Exec& exec) {
  const int32_t rows = p.recurrence.rows;
  if (exec.measure || exec.tensor_cores || !fits(p) || !chained(p)) {
    linear(p.f_b, exec);
    linear(p.g_b, exec);
    kda_conv(p.conv, exec);
    kda_gates(p.gates, exec);
    kda_recurrence(p.recurrence, exec);
    gated_norm(p.norm, exec);
    return;
  }
  if (rows == 0) return;
  const WeightFormat format = p.f_b.part[0].w.format;
  const HeadArgs args{p.f_b.part[0].w,
                      p.g_b.part[0].w,
                      p.f_b.x,
                      p.g_b.x,
                      p.f_b.ldx,
                      p.g_b.ldx,
                      p.conv,
                      p.gates,
                      p.recurrence,
                      p.norm,
                      exec.cuda->behind_fence};
  const dim3 grid(kParts, static_cast<unsigned>(p.recurrence.heads),
                  static_cast<unsigned>(p.recurrence.segments));
  launch("kda_head",
         format == WeightFormat::kBF16 ? head_kernel<WeightFormat::kBF16> : head_kernel<WeightFormat::kF32>,
         grid, kThreads, rows * Row::kFloats * sizeof(float), exec, args);
}

}  // namespace rocket::cuda
