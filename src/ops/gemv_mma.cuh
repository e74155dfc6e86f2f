// Products of up to sixteen rows with BF16 weights whose rows are aligned: on tensor cores, at float32's precision.
//
// A value of x is the sum of three BF16 numbers, high + middle + low, each cut off from what the one before has left: all
// of float32's 24 bits, but for bits below 2^-133 (BF16's least number), which values below 2^-110 can have. Weights are
// the A side of mma.sync m16n8k16, sixteen outputs; x is the B side, a row's terms in columns of their own. A column's
// bits depend neither on its place nor on the other columns.
//
// Order of a result's sum over `in`, a matter of the call's weights alone:
//   slices    of whole blocks, gemv_mma_slices(); their sums are added in ascending order
//   blocks    of 128 columns in a slice; their sums, (low + middle) + high, are added in ascending order
//   chunks    of 32 columns; a term's four in a block are added in ascending order
//   products  two of 16 columns for a term in a chunk, one upon the other in the tensor core: first the columns whose
//             number ends in 0 … 3 modulo 8, then the others
//
// Precision. A product of two BF16 numbers is exact. A tensor core lines up the 17 numbers that it adds to the largest of
// them, cuts off what lies below 2^-25 of that (Hopper; others keep a bit less), and cuts the sum to 24 bits. With M the
// largest of a chunk's products and partial sums, its two products lose at most 2 * (17 * 2^-25 + 2^-23) * M, which is
// 21 * 2^-24 * M, where a chain of float32 products over 32 columns may lose 32 * 2^-24 * M. What is cut off leans
// towards zero, and in a longer chain would lean more: hence two in a row, all else in float32. Middle and low terms are
// below 2^-7 and 2^-15 of x, and so is what they lose. Infinity has no other terms, so results are infinite or NaN where
// float32's are (weights that are infinite themselves give NaN); a row's NaN stays in its columns.
//
// Weights come through a ring of copies into shared memory: many bytes in flight, few registers. A lane reads 16 bytes of
// it at once: its eight columns, and the order of columns above is the one in which they lie. A block has its SM's ring to
// itself: the blocks of the next call start as those of this one end, one on each SM, and fill their rings while whatever
// lies between runs.
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

#include "ops/gemv_mma_ring.cuh"
#include "ops/mma.cuh"

namespace rocket::cuda {

// Tiles of eight columns, by rows R of a kernel; rows in brackets:
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
  static constexpr int kSets = R == 16 ? 2 : 1;  // of rows of which a lane has two
  // Of one or two rows a warp brings the terms of so many columns of x into shared memory at once. Otherwise each lane
  // would work out all of its eight columns' terms for one of them, and where a warp has few groups, a block's products
  // take less time than x of the next block needs to come.
  static constexpr int kXColumns = R > 2 ? 0 : (kStages_ > 4 ? 4 : 2) * kMmaBlock;
  static constexpr int kXLines = 3 * R;              // high, middle and low of each row
  static constexpr int kXLine = kXColumns * 2 + 64;  // bytes; so that neighbours lie in different banks
  // Of more rows registers hold x of the next block while this one's products are under way, if there are enough. But for
  // sixteen rows x must be aligned for loads of four floats.
  static constexpr bool kAhead = R == 4 || R == 8, kVectorX = R < 16;
  // Of an SM, by registers: there is one, but small kernels shall find room beside it where rows are few.
  static constexpr int kBlocks = R == 2 ? 2 : 1;
  static constexpr int kStages = kStages_;
  static constexpr int kStageBytes = G * kMmaStep * 2;  // of a warp
  static constexpr int kRingBytes = kWarps * kStages * kStageBytes;
  static constexpr int kXBytes = kXColumns > 0 ? kWarps * kXLines * kXLine : 0;
  static constexpr int kTableAt = kRingBytes + kXBytes;
  static_assert(R == 2 || R == 4 || R == 8 || R == 16);
  static constexpr int64_t table_bytes(int64_t units) { return sizeof(float) * units * N; }
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

// Puts a value's next term in its place. Where infinity was there is nothing left, so that only the first may meet one.
__device__ __forceinline__ float after_high(float x) {
  return below_upper(x);
}
__device__ __forceinline__ float after_middle(float x) {
  return x - __uint_as_float(__float_as_uint(x) & 0xffff0000u);
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
      for (int i = 0; i < kLaneColumns; ++i) v[i] = k == 0 ? after_high(v[i]) : after_middle(v[i]);
    }
  }
};

__device__ __forceinline__ uint4 choose(bool first, const uint4& a, const uint4& b) {
  return make_uint4(first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w);
}

// Four floats, or zeros. By predicates, so that they arrive where they are wanted much later: what a branch leads to is
// moved at its end, which waits for them.
template <bool kVector>
__device__ __forceinline__ void load_four(const float* from, bool there, float* v) {
  if constexpr (kVector) {
    asm volatile(
        "{\n.reg .pred t;\nsetp.ne.s32 t, %5, 0;\n"
        "mov.f32 %0, 0f00000000;\nmov.f32 %1, 0f00000000;\nmov.f32 %2, 0f00000000;\nmov.f32 %3, 0f00000000;\n"
        "@t ld.global.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&f"(v[0]), "=&f"(v[1]), "=&f"(v[2]), "=&f"(v[3])
        : "l"(from), "r"(static_cast<int>(there))
        : "memory");
  } else {
    asm volatile(
        "{\n.reg .pred t;\nsetp.ne.s32 t, %5, 0;\n"
        "mov.f32 %0, 0f00000000;\nmov.f32 %1, 0f00000000;\nmov.f32 %2, 0f00000000;\nmov.f32 %3, 0f00000000;\n"
        "@t ld.global.f32 %0, [%4];\n@t ld.global.f32 %1, [%4 + 4];\n"
        "@t ld.global.f32 %2, [%4 + 8];\n@t ld.global.f32 %3, [%4 + 12];\n}"
        : "=&f"(v[0]), "=&f"(v[1]), "=&f"(v[2]), "=&f"(v[3])
        : "l"(from), "r"(static_cast<int>(there))
        : "memory");
  }
}

// x of a block as B fragments: lane 4 * g + t has eight columns of column g of each tile, for each chunk.
template <typename K>
struct MmaX {
  static constexpr int kChunks = kMmaBlock / kMmaChunk;
  float raw[kChunks][K::kSets][kLaneColumns];
  uint4 v[kChunks][K::kTiles];
  char* shared;                // the warp's, [term][row] lines
  int staged = -K::kXColumns;  // the first column that lies there

  __device__ __forceinline__ MmaX(char* memory, int warp)
      : shared(memory + K::kRingBytes + warp * (K::kXLines * K::kXLine)) {}

  // Before the first block; x of a block that does not come next must have been asked for so.
  __device__ __forceinline__ void begin(const GemvParams& p, int first, int lane) {
    if (K::kAhead) fetch(p, first, true, lane);
  }
  // Fragments of the block of columns from `first` on; if `wanted`, asks for the one from `next` on.
  __device__ __forceinline__ void open(const GemvParams& p, int first, int next, bool wanted, int lane) {
    if constexpr (K::kXColumns > 0) {
      open_staged(p, first, lane);
    } else {
      if (!K::kAhead) fetch(p, first, true, lane);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int set = 0; set < K::kSets; ++set) place(MmaTerms(raw[c][set]), lane / 4, v[c], set);
      }
      if (K::kAhead) fetch(p, next, wanted, lane);
    }
  }

  __device__ __forceinline__ void open_staged(const GemvParams& p, int first, int lane) {
    if (first < staged || first >= staged + K::kXColumns) stage(p, first, lane);
    const int line = lane / 4;
    const char* from = shared + line * K::kXLine + (first - staged + lane % 4 * kLaneColumns) * 2;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      v[c][0] = make_uint4(0, 0, 0, 0);
      if (line < K::kXLines) v[c][0] = *reinterpret_cast<const uint4*>(from + c * (kMmaChunk * 2));
    }
  }
  __device__ __forceinline__ void blank(int row, int lane) {
#pragma unroll
    for (int term = 0; term < 3; ++term) {
      char* line = shared + (term * K::R + row) * K::kXLine;
#pragma unroll
      for (int k = 0; k < K::kXColumns / (8 * kWarp); ++k)
        *reinterpret_cast<uint4*>(line + (k * kWarp + lane) * 16) = make_uint4(0, 0, 0, 0);
    }
  }
  // Columns from `in` on, and rows that are not there, are zeros.
  __device__ __forceinline__ void stage(const GemvParams& p, int first, int lane) {
    constexpr int kParts = K::kXColumns / (4 * kWarp);
    float part[kParts][K::R][4];
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
#pragma unroll
      for (int r = 0; r < K::R; ++r) {
        const int column = first + (k * kWarp + lane) * 4, row = blockIdx.y * K::R + r;
        load_four<true>(p.x + row * p.ldx + column, column < p.in && row < p.rows, part[k][r]);
      }
    }
    __syncwarp();  // what lay there has been read
#pragma unroll
    for (int r = 0; r < K::R; ++r) {
      if (r > 0 && blockIdx.y * K::R + r >= p.rows) {
        blank(r, lane);
        continue;
      }
#pragma unroll
      for (int k = 0; k < kParts; ++k) {
        float* x = part[k][r];
#pragma unroll
        for (int term = 0; term < 3; ++term) {
          char* line = shared + (term * K::R + r) * K::kXLine;
          *reinterpret_cast<uint2*>(line + (k * kWarp + lane) * 8) =
              make_uint2(upper_halves(x[0], x[1]), upper_halves(x[2], x[3]));
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] = term == 0 ? after_high(x[i]) : after_middle(x[i]);
        }
      }
    }
    __syncwarp();
    staged = first;
  }

  // Asks for the columns from `first` on; those from `in` on, and rows that are not there, are zeros, and all if not
  // `wanted`.
  __device__ __forceinline__ void fetch(const GemvParams& p, int first, bool wanted, int lane) {
    if (K::kVectorX || p.vector_x) {
      fetch_all<true>(p, first, wanted, lane);
    } else {
      fetch_all<false>(p, first, wanted, lane);
    }
  }
  template <bool kVector>
  __device__ __forceinline__ void fetch_all(const GemvParams& p, int first, bool wanted, int lane) {
    const int g = lane / 4, row = blockIdx.y * K::R + (K::R < 8 ? g % K::R : g);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = first + c * kMmaChunk + lane % 4 * kLaneColumns;
#pragma unroll
      for (int set = 0; set < K::kSets; ++set) {
        // `in` is a multiple of a lane's columns, as rows of weights are aligned.
        const bool there = wanted && column < p.in && row + 8 * set < p.rows;
        const float* from = p.x + (row + 8 * set) * p.ldx + column;
        load_four<kVector>(from, there, &raw[c][set][0]);
        load_four<kVector>(from + 4, there, &raw[c][set][4]);
      }
    }
  }
  __device__ __forceinline__ static void place(const MmaTerms& x, int g, uint4 (&tile)[K::kTiles], int set) {
    if constexpr (K::R == 4) {
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

// A chunk's two products, one upon the other, for each tile; raw are the lane's two rows.
template <typename K>
__device__ __forceinline__ void mma_chunk(const uint4 (&raw)[2], const uint4 (&x)[K::kTiles],
                                          float (&acc)[K::kTiles][4]) {
  float part[K::kTiles][4] = {};
  const uint32_t first[4] = {raw[0].x, raw[1].x, raw[0].y, raw[1].y};
  const uint32_t second[4] = {raw[0].z, raw[1].z, raw[0].w, raw[1].w};
#pragma unroll
  for (int n = 0; n < K::kTiles; ++n) multiply_add(part[n], first, x[n].x, x[n].y);
#pragma unroll
  for (int n = 0; n < K::kTiles; ++n) multiply_add(part[n], second, x[n].z, x[n].w);
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
__device__ __forceinline__ void mma_block(const GemvParams& p, const MmaRange& b, MmaStream<K>& stream,
                                          const MmaX<K>& x, int steps, float (&sum)[K::kSets][4], int warp,
                                          int lane) {
  float acc[K::kTiles][4] = {};
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    if (step < steps) {
      uint4 raw[2][2];
      stream.take(raw, p, b, warp, lane);
      __syncwarp();  // the products want the whole warp
#pragma unroll
      for (int c = 0; c < 2; ++c) mma_chunk<K>(raw[c], x.v[step * 2 + c], acc);
    }
  }
  add_terms<K>(acc, sum);
}

// A warp's units of a round. Its columns of x lie in a row, whatever slices they are of.
template <typename K>
__device__ __forceinline__ void mma_round(const GemvParams& p, const MmaRange& b, const MmaUnits& units,
                                          MmaStream<K>& stream, char* shared, float* table, int warp,
                                          int lane) {
  const MmaPlace<K> place(lane);
  MmaX<K> x(shared, warp);
  if (units.first == units.end) return;
  x.begin(p, MmaSegment(p, b, units, units.first).column, lane);
#pragma unroll 1
  for (int unit = units.first; unit < units.end;) {
    const MmaSegment s(p, b, units, unit);
    unit += s.to - s.from;
    float* const sums = table + (s.slice - b.first_slice) * p.block_groups * K::N;
#pragma unroll 1
    for (int block = 0; block < s.columns; block += kMmaBlock) {
      const int next = block + kMmaBlock;
      x.open(p, s.column + block, s.column + next, next < s.columns || unit < units.end, lane);
      const int steps = block_steps(s.columns, block);
#pragma unroll 1
      for (int group = s.from; group < s.to; ++group) {
        float sum[K::kSets][4] = {};
        if (block > 0) place.load(sums + group * K::N, sum);
        mma_block<K>(p, b, stream, x, steps, sum, warp, lane);
        place.store(sums + group * K::N, sum);
      }
    }
  }
}

// t and a block's slices from `from` on, one after the other: asked for together, as another block's take a while to come.
__device__ __forceinline__ float add_slices(float t, const float* from, int slices, int stride) {
  constexpr int kAtOnce = 8;
#pragma unroll 1
  for (int first = 0; first < slices; first += kAtOnce) {
    float v[kAtOnce];
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) v[s] = first + s < slices ? from[(first + s) * stride] : 0.0f;
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) t += v[s];
  }
  return t;
}

// Adds all slices in order; table is [slices of a block][groups of a round][N]. Ends when no block needs the table.
template <typename K>
__device__ __forceinline__ void mma_combine(const GemvParams& p, const MmaRange& b, int round, int groups,
                                            const float* table) {
  constexpr int kAtOnce = K::kThreads / K::N;  // groups
  static_assert(kAtOnce * K::N == K::kThreads);
  const int stride = p.block_groups * K::N, first_group = b.first_group + round * p.block_groups;
  // A row's sixteen outputs side by side: so they go out together.
  const int at = threadIdx.x / K::N, place = threadIdx.x % K::G * K::R + threadIdx.x / K::G % K::R;
  if constexpr (K::kSplit == 1) {
    __syncthreads();
#pragma unroll 2
    for (int group = at; group < groups; group += kAtOnce) {
      const int i = group * K::N + place;
      gemv_result<K>(p, first_group, i, add_slices(0.0f, table + i, b.slices, stride));
    }
    __syncthreads();
  } else {
    const auto cluster = cooperative_groups::this_cluster();
    __syncwarp();  // whole warps come to the cluster's barriers together
    cluster.sync();
    for (int group = static_cast<int>(cluster.block_rank()) * kAtOnce + at; group < groups;
         group += K::kSplit * kAtOnce) {
      const int i = group * K::N + place;
      float t = 0.0f;
#pragma unroll
      for (int o = 0; o < K::kSplit; ++o) {
        const int slices = split_slice<K>(p, o + 1) - split_slice<K>(p, o);
        t = add_slices(t, cluster.map_shared_rank(table, o) + i, slices, stride);
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
  float* table = reinterpret_cast<float*>(shared + K::kTableAt);

  MmaStream<K> stream(p, b, shared, warp, lane);
  wait_for_previous();
  start_next();  // only now: launch_fence()
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    const MmaUnits units = mma_units<K>(p, b, round, warp);
    mma_round<K>(p, b, units, stream, shared, table, warp, lane);
    mma_combine<K>(p, b, round, units.groups, table);
  }
}

template <typename K>
__global__ void __launch_bounds__(K::kThreads, K::kBlocks)
    gemv_mma_kernel(const __grid_constant__ GemvParams p) {
  static_assert(K::kSplit == 1);
  gemv_mma<K>(p);
}
template <typename K>
__global__ void __cluster_dims__(K::kSplit, 1, 1) __launch_bounds__(K::kThreads, K::kBlocks)
    gemv_mma_cluster_kernel(const __grid_constant__ GemvParams p) {
  gemv_mma<K>(p);
}

}  // namespace rocket::cuda
