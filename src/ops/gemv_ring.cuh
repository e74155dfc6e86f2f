// Products of a row or two with BF16 weights whose rows are aligned, in the order of sums that gemv.cuh states.
//
// Weights come through a ring of copies into shared memory: it holds many bytes in flight and few registers. A block has
// its SM's ring to itself: the blocks of the next product start as those of this one end, one on each SM, and fill
// their rings while whatever lies between the two products runs.
//
// A block takes a range of groups of outputs. Its units (one group in one slice) lie in a row, all groups of a slice
// before the next slice, and its warps take equal runs of them. So a warp meets few slices, mostly one or two, and keeps
// a slice's columns of x in registers: nothing of x is staged, and no warp waits for another until all sums are there.
//
// Where `in` is wide, a cluster of kSplit blocks shares a range of groups: each block has a part of the slices, and so
// reads as much less of x. The sums meet through the cluster's shared memory. How many share makes no difference to the
// bits.
#pragma once

#include <cooperative_groups.h>

#include "ops/gemv.cuh"

namespace rocket::cuda {

template <int R_, int kSplit_, int kStages_>
struct GemvRing {
  static constexpr WeightFormat kFormat = WeightFormat::kBF16;
  static constexpr int R = R_;  // rows of x
  static constexpr int kSplit = kSplit_;
  static constexpr int G = 4;  // outputs of a group
  static constexpr int N = G * R;
  static constexpr int kWarps = 8, kThreads = kWarps * kWarp;
  static constexpr int kStages = kStages_;
  static constexpr int kStageBytes = G * kStep * 2;  // of a warp
  static constexpr int kRingBytes = kWarps * kStages * kStageBytes;
  static constexpr int kMostSteps = kMostSlice / kStep;
  using L = Lane<kFormat, true>;
  static constexpr int64_t table_bytes(int64_t units) { return sizeof(float) * units * N; }
};

// Brings 16 bytes into shared memory past the first-level cache, or zeros.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// What a block works on.
struct RingBlock {
  int first_group, groups, first_slice, slices;
};

// The first slice of a cluster's block.
template <typename K>
__device__ __forceinline__ int split_slice(const GemvParams& p, int block) {
  return p.slices * block / K::kSplit;
}

template <typename K>
__device__ __forceinline__ RingBlock ring_block(const GemvParams& p) {
  const int at = blockIdx.x / K::kSplit, of = gridDim.x / K::kSplit, block = blockIdx.x % K::kSplit;
  RingBlock b;
  b.first_group = static_cast<int>(int64_t{p.groups} * at / of);
  b.groups = static_cast<int>(int64_t{p.groups} * (at + 1) / of) - b.first_group;
  b.first_slice = split_slice<K>(p, block);
  b.slices = split_slice<K>(p, block + 1) - b.first_slice;
  return b;
}

__device__ __forceinline__ int slice_steps(const GemvParams& p, int slice) {
  return (min(p.slice, p.in - slice * p.slice) + kStep - 1) / kStep;
}

// A warp's copies, kStages steps ahead of what it multiplies. Each lane reads what it has copied itself, so the ring
// needs no barriers.
template <typename K>
struct RingStream {
  int left;  // units whose copies are not all asked for, this one included
  int slice, group, step = 0, steps, last;
  const char* from;  // the lane's first columns of the group's first output in the slice
  char* ring;
  int slot = 0;

  __device__ __forceinline__ RingStream(const GemvParams& p, const RingBlock& b, int first, int units,
                                        char* shared, int warp, int lane)
      : left(units), slice(b.first_slice + first / b.groups), group(first % b.groups) {
    ring = shared + warp * (K::kStages * K::kStageBytes) + lane * 16;
    if (left > 0) enter(p, b, lane);
#pragma unroll 1
    for (int s = 0; s < K::kStages; ++s) fill(p, b, s, lane);
  }
  __device__ __forceinline__ void enter(const GemvParams& p, const RingBlock& b, int lane) {
    const GemvPart& part = p.part[gemv_part(p, b.first_group + group)];
    const int first = (b.first_group + group - part.first_group) * K::G;
    last = min(K::G, part.out - first) - 1;
    from = part.data + (int64_t{first} * p.in + slice * p.slice + lane * kLaneColumns) * 2;
    step = 0;
    steps = slice_steps(p, slice);
  }
  __device__ __forceinline__ void fill(const GemvParams& p, const RingBlock& b, int s, int lane) {
    if (left > 0) {
      // Columns from `in` on are zeros; the address is then one that nothing is read from.
      const bool there = slice * p.slice + step * kStep + lane * kLaneColumns < p.in;
      const char* at = from + (there ? step * (kStep * 2) : -lane * (kLaneColumns * 2));
#pragma unroll
      for (int g = 0; g < K::G; ++g)  // where there is no output g, the last one once more
        copy_async(ring + s * K::kStageBytes + g * (kStep * 2), at + int64_t{min(g, last)} * p.in * 2, there);
      if (++step == steps && --left > 0) {
        if (++group == b.groups) group = 0, ++slice;
        enter(p, b, lane);
      }
    }
    copy_commit();
  }
  // The next step's weights; then asks for later ones.
  __device__ __forceinline__ void take(uint4 (&raw)[K::G], const GemvParams& p, const RingBlock& b,
                                       int lane) {
    copy_wait<K::kStages - 1>();
#pragma unroll
    for (int g = 0; g < K::G; ++g)
      raw[g] = *reinterpret_cast<const uint4*>(ring + slot * K::kStageBytes + g * (kStep * 2));
    fill(p, b, slot, lane);
    slot = slot + 1 < K::kStages ? slot + 1 : 0;
  }
};

// A slice's columns of x that are the lane's, zeros where there is no column or row.
template <typename K>
struct RingX {
  float v[K::kMostSteps][K::R][kLaneColumns];

  __device__ __forceinline__ void load(const GemvParams& p, int slice, int lane) {
    const int row0 = blockIdx.y * K::R, steps = slice_steps(p, slice);
#pragma unroll
    for (int s = 0; s < K::kMostSteps; ++s) {
      const int column = slice * p.slice + s * kStep + lane * kLaneColumns;
#pragma unroll
      for (int r = 0; r < K::R; ++r) {
        // `in` is a multiple of a lane's columns, as rows of weights are aligned.
        const bool there = s < steps && column < p.in && row0 + r < p.rows;
        load_columns(p.x + (row0 + r) * p.ldx + column, there, p.vector_x, v[s][r]);
      }
    }
  }
  __device__ __forceinline__ static void load_columns(const float* from, bool there, bool vector,
                                                      float (&to)[kLaneColumns]) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; i += 4) {
      float4 q = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (there && vector) q = *reinterpret_cast<const float4*>(from + i);
      if (there && !vector) q = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
      to[i] = q.x, to[i + 1] = q.y, to[i + 2] = q.z, to[i + 3] = q.w;
    }
  }
};

// sum[g][r] += the lane's eight columns of output g times row r.
template <typename K>
__device__ __forceinline__ void ring_step(const uint4 (&raw)[K::G], const float (&x)[K::R][kLaneColumns],
                                          float (&sum)[K::N]) {
#pragma unroll
  for (int g = 0; g < K::G; ++g) {
    float w[kLaneColumns];
    K::L::values({raw[g]}, w);
#pragma unroll
    for (int r = 0; r < K::R; ++r) {
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) sum[g * K::R + r] = fmaf(w[i], x[r][i], sum[g * K::R + r]);
    }
  }
}

// Adds all slices in order; table is [slices of a block][groups of a block][N].
template <typename K>
__device__ __forceinline__ void ring_combine(const GemvParams& p, const RingBlock& b, const float* table) {
  const int stride = p.block_groups * K::N;
  if constexpr (K::kSplit == 1) {
    __syncthreads();
    for (int i = threadIdx.x; i < b.groups * K::N; i += K::kThreads) {
      float t = 0.0f;
      for (int s = 0; s < b.slices; ++s) t += table[s * stride + i];
      gemv_result<K>(p, b.first_group, i, t);
    }
  } else {
    const auto cluster = cooperative_groups::this_cluster();
    __syncwarp();  // whole warps come to the cluster's barriers together
    cluster.sync();
    const int block = static_cast<int>(cluster.block_rank());
    for (int i = block * K::kThreads + threadIdx.x; i < b.groups * K::N; i += K::kSplit * K::kThreads) {
      float t = 0.0f;
#pragma unroll
      for (int o = 0; o < K::kSplit; ++o) {
        const float* theirs = cluster.map_shared_rank(table, o);
        const int slices = split_slice<K>(p, o + 1) - split_slice<K>(p, o);
        for (int s = 0; s < slices; ++s) t += theirs[s * stride + i];
      }
      gemv_result<K>(p, b.first_group, i, t);
    }
    __syncwarp();
    cluster.sync();  // sums stay until all have read them
  }
}

template <typename K>
__device__ __forceinline__ void gemv_ring(const GemvParams& p) {
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const RingBlock b = ring_block<K>(p);
  const int units = b.groups * b.slices;
  const int first = units * warp / K::kWarps, end = units * (warp + 1) / K::kWarps;
  float* table = reinterpret_cast<float*>(shared + K::kRingBytes);

  RingStream<K> stream(p, b, first, end - first, shared, warp, lane);
  wait_for_previous();
  start_next();                                                       // only now: launch_fence()
  int slice = first / b.groups, group = first % b.groups, steps = 0;  // slice of the block
  RingX<K> x;
#pragma unroll 1
  for (int unit = first; unit < end; ++unit) {
    if (unit == first || group == 0) {
      x.load(p, b.first_slice + slice, lane);
      steps = slice_steps(p, b.first_slice + slice);
    }
    float sum[K::N] = {};
#pragma unroll
    for (int s = 0; s < K::kMostSteps; ++s) {
      if (s < steps) {
        uint4 raw[K::G];
        stream.take(raw, p, b, lane);
        ring_step<K>(raw, x.v[s], sum);
      }
    }
    gemv_put<K>(sum, table + (slice * p.block_groups + group) * K::N, lane);
    if (++group == b.groups) group = 0, ++slice;
  }
  ring_combine<K>(p, b, table);
}

template <typename K>
__global__ void __launch_bounds__(K::kThreads) gemv_ring_kernel(const __grid_constant__ GemvParams p) {
  static_assert(K::kSplit == 1);
  gemv_ring<K>(p);
}
template <typename K>
__global__ void __cluster_dims__(K::kSplit, 1, 1) __launch_bounds__(K::kThreads)
    gemv_ring_cluster_kernel(const __grid_constant__ GemvParams p) {
  gemv_ring<K>(p);
}

}  // namespace rocket::cuda
