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
  float* act = nullptr;   // [pairs, inner]
  int32_t fast_rows = 0;  // rows of a tile that fit into shared memory, 0: none
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
  const int64_t at = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 128;
  if (at < p.experts * static_cast<int64_t>(sizeof(ExpertWeights)))
    asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const char*>(p.expert) + at));
}

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

// Without NVFP4's global scale.
__device__ __forceinline__ float stored_value(const Weight& w, int64_t o, int64_t i) {
  const int64_t at = o * w.in + i;
  const uint8_t* data = static_cast<const uint8_t*>(w.data);
  const uint8_t* scale = static_cast<const uint8_t*>(w.block_scale);
  switch (w.format) {
    case WeightFormat::kF32:
      return load_float(data + at * 4);
    case WeightFormat::kBF16:
      return __uint_as_float(load_bytes(data + at * 2, 2) << 16);
    case WeightFormat::kNVFP4: {
      const uint32_t byte = data[at / 2];
      return e2m1_value(i % 2 ? byte >> 4 : byte & 15) * e4m3_value(scale[at / 16]);
    }
    case WeightFormat::kFP8Block:
      return e4m3_value(data[at]) * load_float(scale + (o / 128 * ((w.in + 127) / 128) + i / 128) * 4);
    case WeightFormat::kMXFP8: {
      const uint32_t code = scale[at / 32];
      // 0 is 2^-127, a subnormal; 255 is NaN.
      const uint32_t bits = code == 255 ? 0x7fc00000u : code == 0 ? 0x00400000u : code << 23;
      return e4m3_value(data[at]) * __uint_as_float(bits);
    }
  }
  return 0;
}
__device__ __forceinline__ float global_scale(const Weight& w) {
  return w.format == WeightFormat::kNVFP4 ? w.global_scale : 1.0f;
}

// Row o of w with up to kExactRows rows of x, by a whole warp; the sums in every lane.
__device__ __forceinline__ void plain_products(const Weight& w, int64_t o,
                                               const float* const (&x)[kExactRows], int rows,
                                               float (&sum)[kExactRows]) {
#pragma unroll
  for (int r = 0; r < kExactRows; ++r) sum[r] = 0;
  for (int64_t i = threadIdx.x % kWarp; i < w.in; i += kWarp) {
    const float value = stored_value(w, o, i);
#pragma unroll
    for (int r = 0; r < kExactRows; ++r) {
      if (r < rows) sum[r] = fmaf(value, x[r][i], sum[r]);
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

// The rows of absent experts: outputs [output, output + count) of each pair of the tile become 0, by the whole block.
__device__ __forceinline__ void clear_outputs(const FfnArgs& a, const ExpertTile& tile, int output,
                                              int count) {
  for (int r = 0; r < tile.rows; ++r) {
    float* out = a.p.out + int64_t{find_pair(a, tile, r)} * a.p.hidden;
    for (int o = output + threadIdx.x; o < min(output + count, a.p.hidden); o += kFfnThreads) out[o] = 0;
  }
}

}  // namespace rocket::cuda
