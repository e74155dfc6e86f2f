// The weights of gemv_mma.cuh: how work is cut, and a warp's ring of copies.
#pragma once

#include "ops/gemv.cuh"

namespace rocket::cuda {

constexpr int kMmaChunk = 32;            // columns whose weights a quad multiplies at once
constexpr int kMmaStep = 2 * kMmaChunk;  // a step of the ring
constexpr int kMmaBlock = 2 * kMmaStep;  // whose terms are added

// Eight slices, which a block's warps share, or sixteen of wide weights, which a cluster shares; of few outputs so many
// that warps have one each. Of equal size, rounded up to blocks, so that there may be fewer.
constexpr int kMmaWide = 4096;  // more columns are wide
constexpr int kMmaFew = 1024;   // no more outputs are few
constexpr int kMmaSlices = 32;  // of few outputs
inline void gemv_mma_slices(int64_t in, int64_t out, int32_t& slices, int32_t& slice) {
  const int64_t wanted = out <= kMmaFew ? kMmaSlices : in > kMmaWide ? 16 : 8;
  slice = static_cast<int32_t>(((in + wanted - 1) / wanted + kMmaBlock - 1) / kMmaBlock * kMmaBlock);
  slices = static_cast<int32_t>((in + slice - 1) / slice);
}

// Brings 16 bytes into shared memory past the first-level cache, or zeros.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ uint4 read_copy(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// What a block works on.
struct MmaRange {
  int first_group, groups, first_slice, slices;
};

// The first slice of a cluster's block.
template <typename K>
__device__ __forceinline__ int split_slice(const GemvParams& p, int block) {
  return p.slices * block / K::kSplit;
}

template <typename K>
__device__ __forceinline__ MmaRange mma_range(const GemvParams& p) {
  const int at = blockIdx.x / K::kSplit, block = blockIdx.x % K::kSplit;
  MmaRange b;
  b.first_group = at * p.each_groups + min(at, p.more_groups);
  b.groups = p.each_groups + (at < p.more_groups ? 1 : 0);
  b.first_slice = split_slice<K>(p, block);
  b.slices = split_slice<K>(p, block + 1) - b.first_slice;
  return b;
}

// A warp's units of a round. Unit u is group u % groups, counted from the round's first, in slice u / groups of the block.
struct MmaUnits {
  int groups, first, end;
};
template <typename K>
__device__ __forceinline__ MmaUnits mma_units(const GemvParams& p, const MmaRange& b, int round, int warp) {
  const int groups = min(p.block_groups, b.groups - round * p.block_groups), units = groups * b.slices;
  return {groups, units * warp / K::kWarps, units * (warp + 1) / K::kWarps};
}

// Those of a warp's units from one on that are of one slice: groups [from, to) of the round.
struct MmaSegment {
  int slice, from, to;  // the slice of all
  int column, columns;  // of the slice
  __device__ __forceinline__ MmaSegment(const GemvParams& p, const MmaRange& b, const MmaUnits& units,
                                        int unit) {
    slice = b.first_slice + unit / units.groups;
    from = unit % units.groups;
    to = min(units.groups, from + units.end - unit);
    column = slice * p.slice;
    columns = min(p.slice, p.in - column);
  }
};

// Steps of the block that begins at this column of a slice.
__device__ __forceinline__ int block_steps(int columns, int block) {
  return columns - block > kMmaStep ? 2 : 1;
}

// A warp's copies, kStages steps ahead of what it multiplies. A step of a group is sixteen rows of 128 bytes, which eight
// lanes copy, so that a copy of the warp touches four lines of memory. Lane 4 * g + t reads 16 bytes of rows g and g + 8,
// eight columns, from each of the two chunks. Rows of odd numbers lie with their chunks the other way round: then no two of
// the eight lanes that are served at once want the same banks.
template <typename K>
struct MmaStream {
  static constexpr uint32_t kRow = kMmaStep * 2, kCopied = 4;  // bytes; rows of a copy
  int round = 0;
  bool done = false;
  MmaUnits units{};
  int unit = 0;  // the segment's first
  int from = 0, to = 0, column = 0, columns = 0;
  int block = 0, group = 0, step = 0, steps = 0;
  const char* at = nullptr;     // the first row that the lane copies, from its columns of the block on
  int outputs = 0;              // of the part, from that row on
  int part_groups = 0;          // of the part, from this one on
  uint32_t from_ring, to_ring;  // the lane's places in the warp's first slot: what it reads, what it copies
  uint32_t slot = 0;            // the next to take, from there

  __device__ __forceinline__ MmaStream(const GemvParams& p, const MmaRange& b, char* shared, int warp,
                                       int lane) {
    const uint32_t ring =
        static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + warp * (K::kStages * K::kStageBytes);
    from_ring = ring + place(lane / 4, lane % 4);
    to_ring = ring + place(lane / 8, lane % 8);
    open_round(p, b, warp, lane);
#pragma unroll 1
    for (int s = 0; s < K::kStages; ++s) fill(p, b, s * K::kStageBytes, warp, lane);
  }
  // Of a row's eighth of 16 bytes, in a slot. Another row of the same parity has its eighths in the same order.
  __device__ __forceinline__ static uint32_t place(int row, int eighth) {
    return row * kRow + (eighth ^ row % 2 * 4) * 16;
  }
  // This round, or the next one in which the warp has units.
  __device__ __forceinline__ void open_round(const GemvParams& p, const MmaRange& b, int warp, int lane) {
    for (; round * p.block_groups < b.groups; ++round) {
      units = mma_units<K>(p, b, round, warp);
      if (units.first == units.end) continue;
      open_segment(p, b, units.first, lane);
      return;
    }
    done = true;
  }
  __device__ __forceinline__ void open_segment(const GemvParams& p, const MmaRange& b, int first, int lane) {
    unit = first;
    const MmaSegment s(p, b, units, unit);
    from = s.from, to = s.to, column = s.column, columns = s.columns;
    open_block(p, b, 0, lane);
  }
  __device__ __forceinline__ void open_block(const GemvParams& p, const MmaRange& b, int first, int lane) {
    block = first;
    steps = block_steps(columns, block);
    group = from;
    open_part(p, b, lane);
  }
  // The part in which the group is: looking for it takes time, and most groups are in the part of the one before.
  __device__ __forceinline__ void open_part(const GemvParams& p, const MmaRange& b, int lane) {
    const int here = b.first_group + round * p.block_groups + group;
    const GemvPart& part = p.part[gemv_part(p, here)];
    const int first_group = here - part.first_group, first = first_group * K::G + lane / 8;
    at = part.data + (int64_t{first} * p.in + column + block + lane % 8 * kLaneColumns) * 2;
    outputs = part.out - first;
    part_groups = (part.out + K::G - 1) / K::G - first_group;
  }
  __device__ __forceinline__ void next(const GemvParams& p, const MmaRange& b, int warp, int lane) {
    if (++step < steps) return;
    step = 0;
    if (++group < to) {
      at += int64_t{p.in} * (K::G * 2);
      outputs -= K::G;
      if (--part_groups == 0) open_part(p, b, lane);
      return;
    }
    if (block + kMmaBlock < columns) return open_block(p, b, block + kMmaBlock, lane);
    unit += to - from;
    if (unit < units.end) return open_segment(p, b, unit, lane);
    ++round;
    open_round(p, b, warp, lane);
  }
  __device__ __forceinline__ void fill(const GemvParams& p, const MmaRange& b, uint32_t to, int warp,
                                       int lane) {
    if (!done) {
      const int first = step * kMmaStep;
      const bool column_there = first < p.in - column - block - lane % 8 * kLaneColumns;
#pragma unroll
      for (int i = 0; i < K::G / static_cast<int>(kCopied); ++i) {
        // Columns from `in` on, and outputs that are not there, are zeros; the address is then the weight's, from which
        // nothing is read.
        const int row = i * static_cast<int>(kCopied);
        const bool there = column_there && row < outputs;
        copy_async(to_ring + to + row * kRow, there ? at + (int64_t{row} * p.in + first) * 2 : p.part[0].data,
                   there);
      }
      next(p, b, warp, lane);
    }
    copy_commit();
  }
  // The next step's weights, [chunk][row]; then asks for later ones.
  __device__ __forceinline__ void take(uint4 (&raw)[2][2], const GemvParams& p, const MmaRange& b, int warp,
                                       int lane) {
    copy_wait<K::kStages - 1>();
    __syncwarp();  // what other lanes have copied
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t row = from_ring + slot + i * (8 * kRow);
      raw[0][i] = read_copy(row), raw[1][i] = read_copy(row ^ kRow / 2);
    }
    __syncwarp();  // all have read
    fill(p, b, slot, warp, lane);
    slot = slot + K::kStageBytes < K::kStages * K::kStageBytes ? slot + K::kStageBytes : 0;
  }
};

}  // namespace rocket::cuda
