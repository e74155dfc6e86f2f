// Products of a few rows with stored weights at the memory's speed: float32 fused multiply-adds, weights read once.
//
// Order of a result's sum over `in`, a matter of the weight's shape and format alone:
//   `in` is cut into slices of whole steps of 256 columns; in a slice, lane l takes columns 8l … 8l + 7 of each step in
//   ascending order with one chain of fused multiply-adds (for scaled formats: a chain for the eight columns, whose sum
//   is fused with its scale into the lane's), the lanes add in a tree, and the slices' sums in ascending order.
// Rows and outputs that are worked on together, and who works on them, do not come into it.
//
// A block takes a range of groups of G outputs, over all of `in`. A warp's work is a unit: one group in one slice. Units
// are independent, so that a block has enough of them for its warps even where it has few outputs; their sums wait in
// shared memory. x lies in shared memory too, as many slices of it at once as there is room for (a phase).
//
// BF16 weights whose rows are aligned and have kMmaLeast columns go through gemv_mma.cuh, whatever the number of rows.
#pragma once

#include "ops/weight_decode.cuh"

namespace rocket::cuda {

constexpr int kStep = kWarp * kLaneColumns;  // columns that a warp takes at once
constexpr int kMostSlice = 4 * kStep;
constexpr int kMmaLeast = 256;

struct GemvPart {
  const char* data;
  const uint8_t* scale;
  float* y;
  const float* bias;  // may be null
  int64_t ldy;
  int32_t out;
  int32_t first_group;  // groups of the parts before
  float global;         // NVFP4: multiplies the sum
};

struct GemvParams {
  static constexpr int kMaxParts = 10;
  const float* x;
  int64_t ldx;
  int32_t rows;  // of all tiles; tile blockIdx.y takes R of them
  int32_t in;
  int32_t slices, slice;         // how many, columns of each but the last
  int32_t phases, phase_slices;  // slices of each phase but the last
  int32_t groups;
  int32_t block_groups;              // room for so many in a block
  int32_t each_groups, more_groups;  // gemv_mma.cuh: of a block (or cluster), and how many have one more
  int32_t vector_x;  // rows of x are aligned for loads of four floats, and whole numbers of these
  int32_t part_count;
  GemvPart part[kMaxParts];
};

// How `in` is cut: slices of equal size, rounded up to steps.
inline void gemv_slices(int64_t in, int32_t& slices, int32_t& slice) {
  slices = static_cast<int32_t>((in + kMostSlice - 1) / kMostSlice);
  slice = static_cast<int32_t>(((in + slices - 1) / slices + kStep - 1) / kStep * kStep);
}

template <WeightFormat F, bool kVector_, int R_>
struct GemvKind {
  static constexpr WeightFormat kFormat = F;
  static constexpr bool kVector = kVector_;
  static constexpr int R = R_;                               // rows of x
  static constexpr int G = F == WeightFormat::kF32 ? 2 : 4;  // outputs of a group
  static constexpr int kWarps = R == 16 ? 12 : 16;           // as many as registers allow
  static constexpr int kThreads = kWarps * kWarp;
  using L = Lane<F, kVector>;

  static constexpr size_t x_bytes(int64_t phase_columns) { return sizeof(float) * R * phase_columns; }
  // Sums of the units of a phase, and totals of the phases before.
  static constexpr size_t table_bytes(int64_t phase_slices, int64_t groups) {
    return sizeof(float) * (phase_slices + 1) * groups * G * R;
  }
};

__device__ __forceinline__ int gemv_part(const GemvParams& p, int group) {
  int i = 0;
  while (i + 1 < p.part_count && p.part[i + 1].first_group <= group) ++i;
  return i;
}

// A warp's way through its steps: phase by phase, unit by unit.
template <int G, int kWarps>
struct GemvWalk {
  int phase = 0, unit, step = 0, steps = 0;
  int slice = 0;    // of all
  int group = 0;    // of the block
  WeightRow row{};  // the group's first output
  int last = 0;     // rows of the group beyond the first
  bool done = false;

  __device__ __forceinline__ GemvWalk(const GemvParams& p, int warp, int first_group, int groups)
      : unit(warp) {
    enter(p, warp, first_group, groups);
  }
  __device__ __forceinline__ static int slices_of(const GemvParams& p, int phase) {
    return min(p.phase_slices, p.slices - phase * p.phase_slices);
  }
  // Goes on to the unit of this number, or to the first one of the next phase that has any.
  __device__ __forceinline__ void enter(const GemvParams& p, int warp, int first_group, int groups) {
    int here = slices_of(p, phase);
    while (unit >= groups * here) {
      if (++phase >= p.phases) {
        done = true;
        return;
      }
      unit = warp;
      here = slices_of(p, phase);
    }
    group = unit / here;
    slice = phase * p.phase_slices + unit % here;
    const int columns = min(p.slice, p.in - slice * p.slice);
    steps = (columns + kStep - 1) / kStep;
    step = 0;
    const GemvPart& part = p.part[gemv_part(p, first_group + group)];
    const int first = (first_group + group - part.first_group) * G;
    row = {part.data, part.scale, first, p.in};
    last = min(G, part.out - first) - 1;
  }
  __device__ __forceinline__ void advance(const GemvParams& p, int warp, int first_group, int groups) {
    if (++step < steps) return;
    unit += kWarps;
    enter(p, warp, first_group, groups);
  }
  // Output g of the group; where there is none, the last one once more.
  __device__ __forceinline__ WeightRow output(int g) const {
    WeightRow w = row;
    w.row += min(g, last);
    return w;
  }
  __device__ __forceinline__ int column(const GemvParams& p, int lane) const {
    return slice * p.slice + step * kStep + lane * kLaneColumns;
  }
};

// The steps of a warp as a stream of raw weights, straight into registers, one step ahead.
template <typename K>
struct GemvStream {
  using Walk = GemvWalk<K::G, K::kWarps>;
  Walk ahead;
  typename K::L::Raw next[K::G];

  __device__ __forceinline__ GemvStream(const GemvParams& p, const Walk& start, int warp, int lane,
                                        int first_group, int groups)
      : ahead(start) {
    fetch(p, warp, lane, first_group, groups);
  }
  __device__ __forceinline__ void fetch(const GemvParams& p, int warp, int lane, int first_group,
                                        int groups) {
    if (ahead.done) return;
    const int column = ahead.column(p, lane);
#pragma unroll
    for (int g = 0; g < K::G; ++g) next[g] = K::L::load(ahead.output(g), column);
    ahead.advance(p, warp, first_group, groups);
  }
  // The next step's weights, decoded, and their scales; then asks for later ones.
  __device__ __forceinline__ void take(float (&w)[K::G][kLaneColumns], float (&scale)[K::G],
                                       const GemvParams& p, int warp, int lane, int first_group, int groups) {
#pragma unroll
    for (int g = 0; g < K::G; ++g) {
      K::L::values(next[g], w[g]);
      scale[g] = K::L::scale(next[g]);
    }
    fetch(p, warp, lane, first_group, groups);
  }
};

// 16 bytes to shared memory in one store, which the compiler makes four of where it pleases.
__device__ __forceinline__ void store_shared(void* to, const uint4& v) {
  asm volatile(
      "st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}

// Where the four columns that c is one of begin, in a row of x in shared memory: each step's columns as two planes
// of a float4 a lane.
__device__ __forceinline__ int gemv_x_place(int c) {
  const int inside = c % kStep;
  return c - inside + inside / 4 % 2 * (kStep / 2) + inside / kLaneColumns * 4;
}

// x of a phase: [R][columns], zeros where there is no column or row.
template <typename K>
__device__ __forceinline__ void gemv_load_x(const GemvParams& p, int phase, float* xs) {
  const int first = phase * p.phase_slices * p.slice, columns = p.phase_slices * p.slice;
  const int row0 = blockIdx.y * K::R;
  if (!p.vector_x) {
    for (int i = threadIdx.x; i < K::R * columns; i += K::kThreads) {
      const int r = i / columns, c = i - r * columns;
      const bool there = row0 + r < p.rows && first + c < p.in;
      xs[r * columns + gemv_x_place(c) + c % 4] = there ? p.x[(row0 + r) * p.ldx + first + c] : 0.0f;
    }
    return;
  }
  const int quads = columns / 4, all = K::R * quads;
  constexpr int kBatch = 4;  // loads in flight
  for (int base = threadIdx.x; base < all; base += kBatch * K::kThreads) {
    uint4 v[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = base + j * K::kThreads, r = K::R == 1 ? 0 : i / quads,
                column = first + (i - r * quads) * 4;
      v[j] = make_uint4(0, 0, 0, 0);
      if (i < all && row0 + r < p.rows && column < p.in)
        v[j] = *reinterpret_cast<const uint4*>(p.x + (row0 + r) * p.ldx + column);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = base + j * K::kThreads, r = K::R == 1 ? 0 : i / quads;
      if (i < all) store_shared(xs + r * columns + gemv_x_place((i - r * quads) * 4), v[j]);
    }
  }
}

// sum[g][r] += the lane's eight columns of output g times row r.
template <typename K>
__device__ __forceinline__ void gemv_step(const float (&w)[K::G][kLaneColumns], const float (&scale)[K::G],
                                          const float* xs, int row_columns, int lane,
                                          float (&sum)[K::G * K::R]) {
#pragma unroll
  for (int r = 0; r < K::R; ++r) {
    const float4 low = *reinterpret_cast<const float4*>(xs + r * row_columns + lane * 4);
    const float4 high = *reinterpret_cast<const float4*>(xs + r * row_columns + kStep / 2 + lane * 4);
    const float x[kLaneColumns] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int g = 0; g < K::G; ++g) {
      float s = K::L::kScaled ? 0.0f : sum[g * K::R + r];
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) s = fmaf(w[g][i], x[i], s);
      sum[g * K::R + r] = K::L::kScaled ? fmaf(s, scale[g], sum[g * K::R + r]) : s;
    }
  }
}

// Sums N values over the lanes by the same tree as warp_sum(), each value's result in a lane or two of its own: lane l
// ends with value(s) number l * N / 32 …, in v[0] (and v[1] for N = 64).
template <int N, int kStepLanes = kWarp / 2>
__device__ __forceinline__ void lane_sums(float* v, int lane) {
  if constexpr (kStepLanes > 0 && N > 1) {
    constexpr int kHalf = N / 2;
    const bool upper = lane & kStepLanes;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float give = upper ? v[i] : v[i + kHalf], keep = upper ? v[i + kHalf] : v[i];
      v[i] = keep + __shfl_xor_sync(0xffffffffu, give, kStepLanes);
    }
    lane_sums<kHalf, kStepLanes / 2>(v, lane);
  } else if constexpr (kStepLanes > 0) {
    v[0] += __shfl_xor_sync(0xffffffffu, v[0], kStepLanes);
    lane_sums<1, kStepLanes / 2>(v, lane);
  }
}

// Puts a unit's sums over the lanes to its place in the table.
template <typename K>
__device__ __forceinline__ void gemv_put(float (&sum)[K::G * K::R], float* to, int lane) {
  constexpr int N = K::G * K::R, kEach = N > kWarp ? N / kWarp : 1, kLanes = N > kWarp ? 1 : kWarp / N;
  static_assert(N <= 2 * kWarp && (N & (N - 1)) == 0);
  lane_sums<N>(sum, lane);
  if (lane % kLanes == 0) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) to[lane / kLanes * kEach + i] = sum[i];
  }
}

// Sum number i of a block's [groups][G][R] goes out.
template <typename K>
__device__ __forceinline__ void gemv_result(const GemvParams& p, int first_group, int i, float t) {
  constexpr int N = K::G * K::R;
  const int group = first_group + i / N, g = i % N / K::R, r = i % K::R, row0 = blockIdx.y * K::R;
  const GemvPart& part = p.part[gemv_part(p, group)];
  const int o = (group - part.first_group) * K::G + g;
  if (o >= part.out || row0 + r >= p.rows) return;
  if (K::kFormat == WeightFormat::kNVFP4) t *= part.global;
  if (part.bias) t += part.bias[o];
  part.y[(row0 + r) * part.ldy + o] = t;
}

// Adds a phase's slices to the totals, in order; after the last phase the results go out.
template <typename K>
__device__ __forceinline__ void gemv_combine(const GemvParams& p, int phase, int first_group, int groups,
                                             const float* table, float* total) {
  constexpr int N = K::G * K::R;
  const int slices = GemvWalk<K::G, K::kWarps>::slices_of(p, phase), stride = p.block_groups * N;
  for (int i = threadIdx.x; i < groups * N; i += K::kThreads) {
    float t = phase > 0 ? total[i] : 0.0f;
    for (int s = 0; s < slices; ++s) t += table[s * stride + i];
    if (phase + 1 < p.phases) {
      total[i] = t;
      continue;
    }
    gemv_result<K>(p, first_group, i, t);
  }
}

template <typename K>
__global__ void __launch_bounds__(K::kThreads, 1) gemv_kernel(const __grid_constant__ GemvParams p) {
  extern __shared__ __align__(128) char shared[];
  constexpr int N = K::G * K::R;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int first_group = static_cast<int>(int64_t{p.groups} * blockIdx.x / gridDim.x);
  const int groups = static_cast<int>(int64_t{p.groups} * (blockIdx.x + 1) / gridDim.x) - first_group;
  const int phase_columns = p.phase_slices * p.slice;
  float* xs = reinterpret_cast<float*>(shared);
  float* table = xs + K::R * phase_columns;
  float* total = table + p.phase_slices * p.block_groups * N;

  GemvWalk<K::G, K::kWarps> at(p, warp, first_group, groups);
  GemvStream<K> stream(p, at, warp, lane, first_group, groups);
  wait_for_previous();
  start_next();  // only now: launch_fence()
  for (int phase = 0; phase < p.phases; ++phase) {
    gemv_load_x<K>(p, phase, xs);
    __syncthreads();
    while (!at.done && at.phase == phase) {
      float sum[N] = {};
      const int slice = at.slice - phase * p.phase_slices, group = at.group, steps = at.steps;
      const float* x = xs + slice * p.slice;
#pragma unroll 1
      for (int step = 0; step < steps; ++step, x += kStep) {
        float w[K::G][kLaneColumns], scale[K::G];
        stream.take(w, scale, p, warp, lane, first_group, groups);
        gemv_step<K>(w, scale, x, phase_columns, lane, sum);
      }
      gemv_put<K>(sum, table + (slice * p.block_groups + group) * N, lane);
      at.step = steps - 1;
      at.advance(p, warp, first_group, groups);
    }
    __syncthreads();
    gemv_combine<K>(p, phase, first_group, groups, table, total);
    // The next phase overwrites x, which all have read, and after a barrier the table.
  }
}

}  // namespace rocket::cuda
