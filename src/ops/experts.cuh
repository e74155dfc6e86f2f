// What the kernels of expert_ffn share: the list of tiles that they work through, and sums in float32 for
// weights of any format.
#pragma once

#include "ops/cuda.cuh"
#include "ops/experts.h"
#include "ops/fp4_mma.cuh"

namespace rocket::cuda {

constexpr int kChannels = 8;      // inner channels of a warp: eight gate rows and eight up rows
constexpr int kOutputs = 16;      // rows of down of a warp
constexpr int kRoundedRows = 32;  // rows of a tile, a column each

// Pairs list[first] … list[first + rows - 1] of one expert; expert -1: not here.
struct ExpertTile {
  int32_t expert;
  int32_t rows;
  int32_t first;
};

// The pairs of a step sorted by expert, and cut into tiles. For one row list and tile are null: each pair is a tile.
struct PairList {
  const int32_t* list = nullptr;     // [pairs], row * topk + place
  const ExpertTile* tile = nullptr;  // [tiles]
  const int32_t* tiles = nullptr;    // [1]
};

struct FfnArgs {
  ExpertFfnParams p;
  PairList pairs;
  float* act = nullptr;      // [pairs, inner]
  int32_t fast_rows = 0;     // rows of a tile that fit into shared memory, 0: none
  int32_t down_blocks = 0;   // blocks of down_exact for a tile
  int32_t ahead_blocks = 0;  // of down_exact, whose first weights the last blocks of gate_up_exact ask for
};

inline int64_t most_tiles(const ExpertFfnParams& p, int tile_rows) {
  const int64_t pairs = int64_t{p.rows} * p.topk, full = pairs / tile_rows + p.experts + 1;
  return pairs < full ? pairs : full;
}

// Writes the list and the tiles (experts_sort.cu). Takes them from exec.scratch; launches unless exec.measure.
PairList sort_pairs(const ExpertFfnParams& p, int tile_rows, Exec& exec);
// expert_ffn for rows that may be rounded (experts_prefill.cu).
void expert_ffn_rounded(const ExpertFfnParams& p, Exec& exec);

// A comparison with NaN is false: NaN comes through the clamps.
__device__ __forceinline__ float clamped_swiglu(float gate, float up, float limit) {
  const float g = limit < gate ? limit : gate;
  const float low = -limit > up ? -limit : up;
  const float u = limit < low ? limit : low;
  return g / (1.0f + expf(-g)) * u;
}

// Brings the table of experts near: it may be read before the wait, but which of its rows matter is known only after.
__device__ __forceinline__ void prefetch_table(const ExpertFfnParams& p) {
  constexpr int64_t kPiece = 1024;
  const int64_t bytes = p.experts * static_cast<int64_t>(sizeof(ExpertWeights)), at = blockIdx.x * kPiece;
  if (threadIdx.x != 0 || at >= bytes || reinterpret_cast<uintptr_t>(p.expert) % 16 != 0) return;
  prefetch_bytes(reinterpret_cast<const char*>(p.expert) + at,
                 static_cast<uint32_t>(min(kPiece, bytes - at)));
}
static_assert(sizeof(ExpertWeights) % 16 == 0);

__device__ __forceinline__ ExpertTile find_tile(const FfnArgs& a, int64_t i) {
  if (!a.pairs.tile) {
    const int32_t e = a.p.id[i];
    return {e >= 0 && e < a.p.experts ? e : -1, 1, static_cast<int32_t>(i)};
  }
  const int32_t tiles = *a.pairs.tiles;
  ExpertTile tile = a.pairs.tile[i];  // behind the last one: whatever lies there
  if (i >= tiles) tile = {-1, 0, 0};
  return tile;
}
__device__ __forceinline__ int find_pair(const FfnArgs& a, const ExpertTile& tile, int i) {
  return a.pairs.list ? a.pairs.list[tile.first + i] : tile.first + i;
}

// ---- any format, any alignment, in float32

__device__ __forceinline__ uint32_t load_bytes(const void* p, int n) {
  const uint8_t* b = static_cast<const uint8_t*>(p);
  uint32_t v = 0;
  for (int i = 0; i < n; ++i) v |= static_cast<uint32_t>(b[i]) << (8 * i);
  return v;
}
__device__ __forceinline__ float load_float(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % 4 == 0) return *static_cast<const float*>(p);
  return __uint_as_float(load_bytes(p, 4));
}
__device__ __forceinline__ float e4m3_value(uint32_t code) {
  const uint32_t halves = e4m3_halves(code);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(halves & 0xffffu)));
}
__device__ __forceinline__ float e2m1_value(uint32_t nibble) {
  const uint32_t half = (nibble & 8) << 12 | (nibble & 7) << 9;
  return __half2float(__ushort_as_half(static_cast<unsigned short>(half))) * 16384.0f;
}

// The scale of the block that column i of row o lies in.
__device__ __forceinline__ float block_scale(const Weight& w, int64_t o, int64_t i) {
  const uint8_t* scale = static_cast<const uint8_t*>(w.block_scale);
  if (w.format == WeightFormat::kNVFP4) return e4m3_value(scale[(o * w.in + i) / 16]);
  if (w.format == WeightFormat::kFP8Block)
    return load_float(scale + (o / 128 * ((w.in + 127) / 128) + i / 128) * 4);
  const uint32_t code = scale[(o * w.in + i) / 32];
  // kMXFP8: 0 is 2^-127, a subnormal; 255 is NaN.
  return __uint_as_float(code == 255 ? 0x7fc00000u : code == 0 ? 0x00400000u : code << 23);
}

// Without NVFP4's global scale.
__device__ __forceinline__ float stored_value(const Weight& w, int64_t o, int64_t i) {
  const int64_t at = o * w.in + i;
  const uint8_t* data = static_cast<const uint8_t*>(w.data);
  switch (w.format) {
    case WeightFormat::kF32:
      return load_float(data + at * 4);
    case WeightFormat::kBF16:
      return __uint_as_float(load_bytes(data + at * 2, 2) << 16);
    case WeightFormat::kNVFP4:
      return e2m1_value(i % 2 ? data[at / 2] >> 4 : data[at / 2] & 15) * block_scale(w, o, i);
    default:
      return e4m3_value(data[at]) * block_scale(w, o, i);
  }
}
__device__ __forceinline__ float global_scale(const Weight& w) {
  return w.format == WeightFormat::kNVFP4 ? w.global_scale : 1.0f;
}

// Whether eight columns from a multiple of eight on can be loaded at once.
__device__ __forceinline__ bool loads_eights(const Weight& w) {
  const bool blocks =
      w.format != WeightFormat::kFP8Block || reinterpret_cast<uintptr_t>(w.block_scale) % 4 == 0;
  return w.in % 8 == 0 && reinterpret_cast<uintptr_t>(w.data) % 16 == 0 && blocks;
}

// Columns i … i + 7 of row o, i a multiple of eight; zeros behind the end.
__device__ __forceinline__ void stored_eight(const Weight& w, int64_t o, int64_t i, bool whole,
                                             float (&v)[8]) {
  if (!whole) {
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = i + k < w.in ? stored_value(w, o, i + k) : 0.0f;
    return;
  }
  const int64_t at = o * w.in + i;
  const char* data = static_cast<const char*>(w.data);
  if (w.format == WeightFormat::kF32) {
    const uint4 a = load_once(data + at * 4), b = load_once(data + at * 4 + 16);
    const uint32_t bits[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = __uint_as_float(bits[k]);
  } else if (w.format == WeightFormat::kBF16) {
    const uint4 a = load_once(data + at * 2);
    const uint32_t pair[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) v[2 * k] = bf16_low(pair[k]), v[2 * k + 1] = bf16_high(pair[k]);
  } else if (w.format == WeightFormat::kNVFP4) {
    const uint32_t nibbles = *reinterpret_cast<const uint32_t*>(data + at / 2);
    const float scale = block_scale(w, o, i);
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = e2m1_value(nibbles >> (4 * k) & 15) * scale;
  } else {
    const uint2 codes = *reinterpret_cast<const uint2*>(data + at);
    const float scale = block_scale(w, o, i);
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = e4m3_value((k < 4 ? codes.x : codes.y) >> (8 * (k % 4)) & 255) * scale;
  }
}

// Row o of w with up to kExactRows rows of x, by a whole warp; the sums in every lane. A lane has eight columns at a
// time, added in ascending order.
__device__ __forceinline__ void plain_products(const Weight& w, int64_t o,
                                               const float* const (&x)[kExactRows], int rows,
                                               float (&sum)[kExactRows]) {
  const bool whole = loads_eights(w);
#pragma unroll
  for (int r = 0; r < kExactRows; ++r) sum[r] = 0;
  for (int64_t i = threadIdx.x % kWarp * 8; i < w.in; i += kWarp * 8) {
    float value[8];
    stored_eight(w, o, i, whole, value);
#pragma unroll
    for (int r = 0; r < kExactRows; ++r) {
      if (r >= rows) continue;
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        if (i + k < w.in) sum[r] = fmaf(value[k], x[r][i + k], sum[r]);
      }
    }
  }
  const float scale = global_scale(w);
#pragma unroll
  for (int r = 0; r < kExactRows; ++r) sum[r] = warp_sum(sum[r]) * scale;
}

// A tile's rows in float32, for weights that have no fast path: channels [channel, channel + kChannels) of act.
static __device__ __noinline__ void plain_gate_up(const FfnArgs& a, ExpertTile tile, int channel) {
  const ExpertWeights& e = a.p.expert[tile.expert];
  for (int first = 0; first < tile.rows; first += kExactRows) {
    const int rows = min(kExactRows, tile.rows - first);
    const float* x[kExactRows];
    int64_t pair[kExactRows];
#pragma unroll
    for (int r = 0; r < kExactRows; ++r) {
      pair[r] = find_pair(a, tile, first + (r < rows ? r : 0));
      x[r] = a.p.x + pair[r] / a.p.topk * a.p.ldx;
    }
    for (int c = channel; c < min(channel + kChannels, a.p.inner); ++c) {
      float gate[kExactRows], up[kExactRows];
      plain_products(e.gate, c, x, rows, gate);
      plain_products(e.up, c, x, rows, up);
#pragma unroll
      for (int r = 0; r < kExactRows; ++r) {
        if (r < rows && threadIdx.x % kWarp == r)
          a.act[pair[r] * a.p.inner + c] = clamped_swiglu(gate[r], up[r], a.p.limit);
      }
    }
  }
}

// Rows [output, output + kOutputs) of out.
static __device__ __noinline__ void plain_down(const FfnArgs& a, ExpertTile tile, int output) {
  const Weight& w = a.p.expert[tile.expert].down;
  for (int first = 0; first < tile.rows; first += kExactRows) {
    const int rows = min(kExactRows, tile.rows - first);
    const float* x[kExactRows];
    int64_t pair[kExactRows];
#pragma unroll
    for (int r = 0; r < kExactRows; ++r) {
      pair[r] = find_pair(a, tile, first + (r < rows ? r : 0));
      x[r] = a.act + pair[r] * a.p.inner;
    }
    for (int o = output; o < min(output + kOutputs, a.p.hidden); ++o) {
      float sum[kExactRows];
      plain_products(w, o, x, rows, sum);
#pragma unroll
      for (int r = 0; r < kExactRows; ++r) {
        if (r < rows && threadIdx.x % kWarp == r)
          a.p.out[pair[r] * a.p.hidden + o] = sum[r] * a.p.weight[pair[r]];
      }
    }
  }
}

// The rows of absent experts: outputs [output, output + count) of each pair of the tile become 0, by the whole block,
// unless they are another call's.
__device__ __forceinline__ void clear_outputs(const FfnArgs& a, const ExpertTile& tile, int output,
                                              int count) {
  if (a.p.keep_absent) return;
  for (int r = 0; r < tile.rows; ++r) {
    float* out = a.p.out + int64_t{find_pair(a, tile, r)} * a.p.hidden;
    for (int o = output + threadIdx.x; o < min(output + count, a.p.hidden); o += kFfnThreads) out[o] = 0;
  }
}

}  // namespace rocket::cuda
