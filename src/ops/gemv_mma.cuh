// Products of up to sixteen rows with BF16 weights whose rows are aligned: on tensor cores, at float32's precision.
//
// A value of x is the sum of three BF16 numbers, high + middle + low, each cut off from what the one before has left: all
// of float32's 24 bits, but for bits below 2^-133 (BF16's least number), which values below 2^-110 can have. Weights are
// the A side of mma.sync m16n8k16, sixteen outputs; x is the B side, a row's terms in columns of their own. A column's
// bits depend neither on its place nor on the other columns.
//
// Order of a result's sum over `in`, a matter of `in` alone:
//   slices    of whole blocks, gemv_mma_slices(); their sums are added in ascending order
//   blocks    of 128 columns in a slice; their sums, (low + middle) + high, are added in ascending order
//   steps     of 64 columns; a term's two in a block are added
//   products  four of 16 columns for a term in a step, one upon the other in the tensor core: of 32 columns first those
//             whose number ends in 0 … 3 modulo 8, then the others
//
// Precision. A product of two BF16 numbers is exact. A tensor core lines up the 17 numbers that it adds to the largest of
// them and cuts off what lies below 2^-25 (Hopper) or 2^-24 of that (others may keep one bit less), then cuts the sum to
// 24 bits: with the largest of a step's products and partial sums M, at most 4 * (17 * 2^-25 + 2^-23) * M for a step of
// 64 columns, about 2^-19.4 * M. A chain of float32 products over these columns is off by at most 64 * 2^-24 * M =
// 2^-18 * M. What is cut off leans towards zero, which long chains would add up: so four in a row, and all else in
// float32, with a seventh of the roundings of a float32 product for each column. Middle and low terms, below 2^-7 and
// 2^-15 of x, add as much less. Infinity has no other terms, so results are infinite or NaN where float32's are; only
// weights that are infinite themselves give NaN. A row's NaN stays in its columns.
//
// Weights come through a ring of copies into shared memory: many bytes in flight, few registers. Each lane reads what it
// has copied itself: its 16 bytes are eight columns, and the order of columns above is the one in which they lie. A block
// has its SM's ring to itself: the blocks of the next call start as those of this one end, one on each SM, and fill their
// rings while whatever lies between runs.
//
// A block takes a range of groups of sixteen outputs; where they have more sums than shared memory holds, in rounds. A
// warp's work is a run of units, one group in one slice, all groups of a slice before the next slice. It holds a block of
// the slice's columns of x in registers, as B fragments, and goes over its groups of the slice, then over them again with
// the next block, adding to the units' sums in shared memory. So no warp waits for another within a round.
//
// A cluster of kSplit blocks shares a range of groups, each block having a part of the slices: where `in` is wide, so
// that a block reads less of x, and where there are few groups. The sums meet through the cluster's shared memory.
#pragma once

#include <cooperative_groups.h>

#include "ops/gemv.cuh"
#include "ops/mma.cuh"

namespace rocket::cuda {

constexpr int kMmaChunk = 32;             // columns whose weights a quad copies at once
constexpr int kMmaStep = 2 * kMmaChunk;   // a step of the ring
constexpr int kMmaBlock = 2 * kMmaStep;   // whose terms are added
constexpr int kMmaLeast = 2 * kMmaBlock;  // narrower weights go through gemv.cuh

// Eight slices, which a block's warps share, or sixteen of wide weights, which a cluster shares: of equal size, rounded up
// to blocks, so that there may be fewer.
constexpr int kMmaWide = 4096;  // more columns are wide
inline void gemv_mma_slices(int64_t in, int32_t& slices, int32_t& slice) {
  const int64_t wanted = in > kMmaWide ? 16 : 8;
  slice = static_cast<int32_t>(((in + wanted - 1) / wanted + kMmaBlock - 1) / kMmaBlock * kMmaBlock);
  slices = static_cast<int32_t>((in + slice - 1) / slice);
}

// Tiles of eight columns, by rows R of a kernel; `c` is a column of the tile, (r) a row:
//   R = 2    one: high (0, 1), middle (0, 1), low (0, 1), nothing
//   R = 4    two: high (0 … 3), middle (0 … 3); low (0 … 3), twice
//   R = 8    three: high, middle, low
//   R = 16   six: rows 0 … 7 as above, then rows 8 … 15
template <int R_, int kSplit_, int kStages_>
struct GemvMma {
  static constexpr WeightFormat kFormat = WeightFormat::kBF16;
  static constexpr int R = R_;  // rows of x
  static constexpr int kSplit = kSplit_;
  static constexpr int G = 16;  // outputs of a group
  static constexpr int N = G * R;
  static constexpr int kWarps = 8, kThreads = kWarps * kWarp;
  static constexpr int kTiles = R == 2 ? 1 : R == 4 ? 2 : R / 8 * 3;
  static constexpr int kSets = R == 16 ? 2 : 1;         // of rows of which a lane has two
  static constexpr bool kAhead = R < 16;                // registers hold x of the block that comes next, too
  static constexpr int kStages = kStages_;
  static constexpr int kStageBytes = G * kMmaStep * 2;  // of a warp
  static constexpr int kRingBytes = kWarps * kStages * kStageBytes;
  static_assert(R == 2 || R == 4 || R == 8 || R == 16);
  static constexpr int64_t table_bytes(int64_t units) { return sizeof(float) * units * N; }
};

// ---- weights

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
  const int at = blockIdx.x / K::kSplit, of = gridDim.x / K::kSplit, block = blockIdx.x % K::kSplit;
  MmaRange b;
  b.first_group = static_cast<int>(int64_t{p.groups} * at / of);
  b.groups = static_cast<int>(int64_t{p.groups} * (at + 1) / of) - b.first_group;
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

// A warp's copies, kStages steps ahead of what it multiplies. Lane 4 * g + t copies 16 bytes of rows g and g + 8 of a group,
// eight columns, from each of a step's two chunks, and reads them itself, so the ring needs no barriers.
template <typename K>
struct MmaStream {
  static constexpr uint32_t kPiece = kWarp * 16;  // of a row and a chunk, all lanes
  int round = 0;
  bool done = false;
  MmaUnits units{};
  int unit = 0;  // the segment's first
  int from = 0, to = 0, column = 0, columns = 0;
  int block = 0, group = 0, step = 0, steps = 0;
  const char* at[2];  // the lane's two rows, from its first columns of the block on
  uint32_t ring;      // the lane's place in the warp's first slot
  uint32_t slot = 0;  // the next to take, from there

  __device__ __forceinline__ MmaStream(const GemvParams& p, const MmaRange& b, char* shared, int warp,
                                       int lane) {
    ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + warp * (K::kStages * K::kStageBytes) +
           lane * 16;
    open_round(p, b, warp, lane);
#pragma unroll 1
    for (int s = 0; s < K::kStages; ++s) fill(p, b, ring + s * K::kStageBytes, warp, lane);
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
    open_group(p, b, lane);
  }
  __device__ __forceinline__ void open_group(const GemvParams& p, const MmaRange& b, int lane) {
    const int here = b.first_group + round * p.block_groups + group;
    const GemvPart& part = p.part[gemv_part(p, here)];
    const int first = (here - part.first_group) * K::G + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // where there is no such output, the last one once more
      const int64_t output = min(first + 8 * i, part.out - 1);
      at[i] = part.data + (output * p.in + column + block + lane % 4 * kLaneColumns) * 2;
    }
    step = 0;
  }
  __device__ __forceinline__ void next(const GemvParams& p, const MmaRange& b, int warp, int lane) {
    if (++step < steps) return;
    if (++group < to) return open_group(p, b, lane);
    if (block + kMmaBlock < columns) return open_block(p, b, block + kMmaBlock, lane);
    unit += to - from;
    if (unit < units.end) return open_segment(p, b, unit, lane);
    ++round;
    open_round(p, b, warp, lane);
  }
  __device__ __forceinline__ void fill(const GemvParams& p, const MmaRange& b, uint32_t slot_at, int warp,
                                       int lane) {
    if (!done) {
      const int first = step * kMmaStep, left = p.in - column - block - lane % 4 * kLaneColumns;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          // Columns from `in` on are zeros; the address is then the weight's, from which nothing is read.
          const bool there = first + c * kMmaChunk < left;
          copy_async(slot_at + (c * 2 + i) * kPiece,
                     there ? at[i] + (first + c * kMmaChunk) * 2 : p.part[0].data, there);
        }
      }
      next(p, b, warp, lane);
    }
    copy_commit();
  }
  // The next step's weights, [chunk][row]; then asks for later ones.
  __device__ __forceinline__ void take(uint4 (&raw)[2][2], const GemvParams& p, const MmaRange& b, int warp,
                                       int lane) {
    copy_wait<K::kStages - 1>();
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) raw[c][i] = read_copy(ring + slot + (c * 2 + i) * kPiece);
    }
    fill(p, b, ring + slot, warp, lane);
    slot = slot + K::kStageBytes < K::kStages * K::kStageBytes ? slot + K::kStageBytes : 0;
  }
};

// ---- x

// What is left of x without its upper 16 bits; exact. Infinity leaves nothing, NaN leaves NaN.
__device__ __forceinline__ float below_upper(float x) {
  const float left = x - __uint_as_float(__float_as_uint(x) & 0xffff0000u);
  return fabsf(x) == __uint_as_float(0x7f800000u) ? 0.0f : left;
}
// The upper 16 bits of two values, those of a in the lower half.
__device__ __forceinline__ uint32_t upper_halves(float a, float b) {
  return __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632);
}

// Eight columns of a row as three terms.
struct MmaTerms {
  uint4 term[3];  // high, middle, low
  __device__ __forceinline__ explicit MmaTerms(float (&v)[kLaneColumns]) {
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      term[k] = make_uint4(upper_halves(v[0], v[1]), upper_halves(v[2], v[3]), upper_halves(v[4], v[5]),
                           upper_halves(v[6], v[7]));
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) v[i] = below_upper(v[i]);
    }
  }
};

__device__ __forceinline__ uint4 choose(bool first, const uint4& a, const uint4& b) {
  return make_uint4(first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w);
}

// x of a block as B fragments: lane 4 * g + t has eight columns of column g of each tile, for each chunk.
template <typename K>
struct MmaX {
  static constexpr int kChunks = kMmaBlock / kMmaChunk;
  float raw[kChunks][K::kSets][kLaneColumns];
  uint4 v[kChunks][K::kTiles];

  // Asks for the columns from `first` on; those from `in` on, and rows that are not there, are zeros.
  __device__ __forceinline__ void fetch(const GemvParams& p, int first, int lane) {
    const int g = lane / 4, row = blockIdx.y * K::R + (K::R < 8 ? g % K::R : g);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = first + c * kMmaChunk + lane % 4 * kLaneColumns;
#pragma unroll
      for (int set = 0; set < K::kSets; ++set) load_columns(p, row + 8 * set, column, raw[c][set]);
    }
  }
  // Makes fragments of what was fetched.
  __device__ __forceinline__ void open(int lane) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int set = 0; set < K::kSets; ++set) place(MmaTerms(raw[c][set]), lane / 4, v[c], set);
    }
  }
  __device__ __forceinline__ static void load_columns(const GemvParams& p, int row, int column,
                                                      float (&to)[kLaneColumns]) {
    // `in` is a multiple of a lane's columns, as rows of weights are aligned.
    const bool there = column < p.in && row < p.rows;
    const float* from = p.x + row * p.ldx + column;
#pragma unroll
    for (int i = 0; i < kLaneColumns; i += 4) {
      float4 q = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (there && p.vector_x) q = *reinterpret_cast<const float4*>(from + i);
      if (there && !p.vector_x) q = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
      to[i] = q.x, to[i + 1] = q.y, to[i + 2] = q.z, to[i + 3] = q.w;
    }
  }
  __device__ __forceinline__ static void place(const MmaTerms& x, int g, uint4 (&tile)[K::kTiles], int set) {
    if constexpr (K::R == 2) {
      const uint4 lower = choose(g < 6, x.term[2], make_uint4(0, 0, 0, 0));
      tile[0] = choose(g < 2, x.term[0], choose(g < 4, x.term[1], lower));
    } else if constexpr (K::R == 4) {
      tile[0] = choose(g < 4, x.term[0], x.term[1]);
      tile[1] = x.term[2];
    } else {
#pragma unroll
      for (int k = 0; k < 3; ++k) tile[set * 3 + k] = x.term[k];
    }
  }
};

// ---- products

// Adds a block's terms: sum[set] are rows 2t and 2t + 1 of the set for output g, then for output g + 8. For R = 2 lanes of
// t = 0 have them, for R = 4 lanes of t < 2.
template <typename K>
__device__ __forceinline__ void add_terms(const float (&acc)[K::kTiles][4], float (&sum)[K::kSets][4]) {
  constexpr unsigned kAll = 0xffffffffu;
#pragma unroll
  for (int set = 0; set < K::kSets; ++set) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float high, middle, low;
      if constexpr (K::R == 2) {
        high = acc[0][k];
        middle = __shfl_xor_sync(kAll, acc[0][k], 1);
        low = __shfl_xor_sync(kAll, acc[0][k], 2);
      } else if constexpr (K::R == 4) {
        high = acc[0][k];
        middle = __shfl_xor_sync(kAll, acc[0][k], 2);
        low = acc[1][k];
      } else {
        high = acc[set * 3][k], middle = acc[set * 3 + 1][k], low = acc[set * 3 + 2][k];
      }
      sum[set][k] += (low + middle) + high;
    }
  }
}

// One step's four products, one upon the other, for each tile. x0 and x1 are the step's chunks of x.
template <typename K>
__device__ __forceinline__ void multiply_step(const uint4 (&raw)[2][2], const uint4 (&x0)[K::kTiles],
                                              const uint4 (&x1)[K::kTiles], float (&acc)[K::kTiles][4]) {
  __syncwarp();  // the products want the whole warp
  float part[K::kTiles][4] = {};
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const uint32_t a[2][4] = {{raw[c][0].x, raw[c][1].x, raw[c][0].y, raw[c][1].y},
                              {raw[c][0].z, raw[c][1].z, raw[c][0].w, raw[c][1].w}};
#pragma unroll
    for (int n = 0; n < K::kTiles; ++n) {
      const uint4& b = c == 0 ? x0[n] : x1[n];
      multiply_add(part[n], a[0], b.x, b.y);
    }
#pragma unroll
    for (int n = 0; n < K::kTiles; ++n) {
      const uint4& b = c == 0 ? x0[n] : x1[n];
      multiply_add(part[n], a[1], b.z, b.w);
    }
  }
#pragma unroll
  for (int n = 0; n < K::kTiles; ++n) {
#pragma unroll
    for (int k = 0; k < 4; ++k) acc[n][k] += part[n][k];
  }
}

// A lane's place in a unit's sums, [G][R].
template <typename K>
struct MmaPlace {
  int at;
  bool has;
  __device__ __forceinline__ explicit MmaPlace(int lane)
      : at(lane / 4 * K::R + lane % 4 * 2), has(lane % 4 * 2 < K::R) {}
  __device__ __forceinline__ float2* of(float* unit, int set, int half) const {
    return reinterpret_cast<float2*>(unit + at + half * (8 * K::R) + set * 8);
  }
  __device__ __forceinline__ void load(float* unit, float (&sum)[K::kSets][4]) const {
    if (!has) return;
#pragma unroll
    for (int set = 0; set < K::kSets; ++set) {
      const float2 low = *of(unit, set, 0), high = *of(unit, set, 1);
      sum[set][0] = low.x, sum[set][1] = low.y, sum[set][2] = high.x, sum[set][3] = high.y;
    }
  }
  __device__ __forceinline__ void store(float* unit, const float (&sum)[K::kSets][4]) const {
    if (!has) return;
#pragma unroll
    for (int set = 0; set < K::kSets; ++set) {
      *of(unit, set, 0) = make_float2(sum[set][0], sum[set][1]);
      *of(unit, set, 1) = make_float2(sum[set][2], sum[set][3]);
    }
  }
};

// Adds a block of columns of one group to its sums.
template <typename K>
__device__ __forceinline__ void multiply_block(const GemvParams& p, const MmaRange& b, MmaStream<K>& stream,
                                               const MmaX<K>& x, int steps, float (&sum)[K::kSets][4],
                                               int warp, int lane) {
  float acc[K::kTiles][4] = {};
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    if (step < steps) {
      uint4 raw[2][2];
      stream.take(raw, p, b, warp, lane);
      multiply_step<K>(raw, x.v[step * 2], x.v[step * 2 + 1], acc);
    }
  }
  add_terms<K>(acc, sum);
}

// A warp's units of a round. Its columns of x lie in a row, whatever slices they are of.
template <typename K>
__device__ __forceinline__ void mma_round(const GemvParams& p, const MmaRange& b, const MmaUnits& units,
                                          MmaStream<K>& stream, float* table, int warp, int lane) {
  const MmaPlace<K> place(lane);
  MmaX<K> x;
  if (units.first < units.end && K::kAhead) x.fetch(p, MmaSegment(p, b, units, units.first).column, lane);
#pragma unroll 1
  for (int unit = units.first; unit < units.end;) {
    const MmaSegment s(p, b, units, unit);
    unit += s.to - s.from;
    float* const sums = table + (s.slice - b.first_slice) * p.block_groups * K::N;
#pragma unroll 1
    for (int block = 0; block < s.columns; block += kMmaBlock) {
      if (!K::kAhead) x.fetch(p, s.column + block, lane);
      x.open(lane);
      const int next = s.column + block + kMmaBlock;
      if (K::kAhead && (block + kMmaBlock < s.columns || unit < units.end)) x.fetch(p, next, lane);
      const int steps = block_steps(s.columns, block);
#pragma unroll 1
      for (int group = s.from; group < s.to; ++group) {
        float sum[K::kSets][4] = {};
        if (block > 0) place.load(sums + group * K::N, sum);
        multiply_block<K>(p, b, stream, x, steps, sum, warp, lane);
        place.store(sums + group * K::N, sum);
      }
    }
  }
}

// Adds all slices in order; table is [slices of a block][groups of a round][N]. Ends when no block needs the table.
template <typename K>
__device__ __forceinline__ void mma_combine(const GemvParams& p, const MmaRange& b, int round, int groups,
                                            const float* table) {
  const int stride = p.block_groups * K::N, first_group = b.first_group + round * p.block_groups;
  if constexpr (K::kSplit == 1) {
    __syncthreads();
    for (int i = threadIdx.x; i < groups * K::N; i += K::kThreads) {
      float t = 0.0f;
      for (int s = 0; s < b.slices; ++s) t += table[s * stride + i];
      gemv_result<K>(p, first_group, i, t);
    }
    __syncthreads();
  } else {
    const auto cluster = cooperative_groups::this_cluster();
    __syncwarp();  // whole warps come to the cluster's barriers together
    cluster.sync();
    const int block = static_cast<int>(cluster.block_rank());
    for (int i = block * K::kThreads + threadIdx.x; i < groups * K::N; i += K::kSplit * K::kThreads) {
      float t = 0.0f;
#pragma unroll
      for (int o = 0; o < K::kSplit; ++o) {
        const float* theirs = cluster.map_shared_rank(table, o);
        const int slices = split_slice<K>(p, o + 1) - split_slice<K>(p, o);
        for (int s = 0; s < slices; ++s) t += theirs[s * stride + i];
      }
      gemv_result<K>(p, first_group, i, t);
    }
    __syncwarp();
    cluster.sync();
  }
}

template <typename K>
__device__ __forceinline__ void gemv_mma(const GemvParams& p) {
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const MmaRange b = mma_range<K>(p);
  const int rounds = (b.groups + p.block_groups - 1) / p.block_groups;
  float* table = reinterpret_cast<float*>(shared + K::kRingBytes);

  MmaStream<K> stream(p, b, shared, warp, lane);
  wait_for_previous();
  start_next();  // only now: launch_fence()
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    const MmaUnits units = mma_units<K>(p, b, round, warp);
    mma_round<K>(p, b, units, stream, table, warp, lane);
    mma_combine<K>(p, b, round, units.groups, table);
  }
}

template <typename K>
__global__ void __launch_bounds__(K::kThreads, K::R == 2 ? 2 : 1) gemv_mma_kernel(const __grid_constant__ GemvParams p) {
  static_assert(K::kSplit == 1);
  gemv_mma<K>(p);
}
template <typename K>
__global__ void __cluster_dims__(K::kSplit, 1, 1) __launch_bounds__(K::kThreads, K::R == 2 ? 2 : 1)
    gemv_mma_cluster_kernel(const __grid_constant__ GemvParams p) {
  gemv_mma<K>(p);
}

}  // namespace rocket::cuda
