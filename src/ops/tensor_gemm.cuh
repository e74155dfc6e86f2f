// Tiles of matrix products on tensor cores: rows times stored weights, float32 sums.
//
// Tensor cores multiply BF16 numbers. A float of x is the sum of two of them but for 2^-17 of itself, so each tile is made
// in two passes, one for each term of x. Rounded to one term, x moves what is chosen where it is close, and all that follows
// (docs/measurements.md). Weights become BF16 in shared memory, which is exact (NVFP4's code
// times block scale has six significant bits, an E4M3 code four) but for F32 weights, whose second term takes a pass more.
// NVFP4's global scale and FP8's scales of 128 x 128 blocks multiply float32 sums.
//
// tensor_tile() is one block's tile; a kernel around it says which rows, which weights and where results go, so that
// grouped products can use it too.
#pragma once

#include <cuda_bf16.h>

#include "ops/mma.cuh"
#include "ops/weight_decode.cuh"

namespace rocket::cuda {

// One tile's operands.
struct TensorTile {
  const __nv_bfloat16*
      x;        // rows of x, ldx apart: 16-byte aligned, filled with zeros to a multiple of kColumns
  int64_t ldx;  // a multiple of 8
  int64_t low;  // as far behind its first term lies the second term of a number of x; a multiple of 8
  const int32_t* row_index;  // row r of the tile is row row_index[r] of x; null: row r
  int32_t rows;              // of the tile, those from here on count as zeros
  WeightRow w;               // first output of the tile; of a kind with kAcross, the first input
  int32_t outputs;           // of the tile, those from here on count as zeros
  int32_t inputs;            // length of the sums
  int32_t first_column = 0;  // kAcross: of the weight, the tile's first output
};

// kAcross: outputs are the weight's columns and inputs its rows.
template <WeightFormat F, bool kVector_, int kRows_, int kOutputs_, bool kAcross_ = false>
struct TensorKind {
  static constexpr WeightFormat kFormat = F;
  static constexpr bool kVector = kVector_, kAcross = kAcross_;
  static constexpr int kRows = kRows_, kOutputs = kOutputs_;  // of a tile
  static constexpr int kColumns = 64;                         // of a stage
  static constexpr int kStages = 3;
  static constexpr int kThreads = 256;
  static constexpr int kWarpsDown = 2, kWarpsAcross = 4;  // warps over rows and over outputs
  static constexpr int kRowBytes = kColumns * 2;
  static constexpr int kStageBytes = (kRows + kOutputs) * kRowBytes;
  static constexpr int kShared = kStages * kStageBytes;
  static constexpr int kM = kRows / kWarpsDown / 16, kN = kOutputs / kWarpsAcross / 8;  // fragments of a warp
  static constexpr bool kCopied =
      F == WeightFormat::kBF16 && kVector;  // weights go to shared memory as they are
  static constexpr bool kBlockScale = F == WeightFormat::kFP8Block;
  static constexpr bool kTwoTerms =
      F == WeightFormat::kF32;                       // of a weight; their product of second terms is left out
  static constexpr int kPasses = kTwoTerms ? 3 : 2;  // terms of x and w: 0 and 0, 1 and 0, 0 and 1
  static constexpr int kUnits =
      kOutputs * (kColumns / kLaneColumns) / kThreads;  // of 8 columns, a thread and stage
  // Two blocks share a multiprocessor where registers allow.
  static constexpr int kBlocks = kCopied || kRows * kOutputs <= 64 * 64 ? 2 : 1;
  using L = Lane<F, kVector>;
  static_assert(kShared <= static_cast<int>(kSharedLimit));
  static_assert(!kAcross || (kOutputs == kColumns && !L::kScaled));  // a stage is square, rows of 128 bytes
  static_assert(kN % 2 == 0 && kM >= 1 && kUnits >= 1 && kThreads == kWarpsDown * kWarpsAcross * kWarp);
};

// What a number's first term leaves of it, for its second one; nothing of infinity and NaN.
__device__ __forceinline__ float second_term(float x, __nv_bfloat16 first) {
  const float rest = x - __bfloat162float(first);
  return isfinite(rest) ? rest : 0.0f;
}

// Where 16 bytes (8 columns) number `chunk` of a row lie: rows of 128 bytes, their chunks exchanged so that eight rows'
// chunks of one number are in different banks.
__device__ __forceinline__ int tile_offset(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

__device__ __forceinline__ void tile_copy(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}

// x of a stage, from `x` on.
template <typename K>
__device__ __forceinline__ void tile_copy_x(const TensorTile& t, const __nv_bfloat16* x, int column,
                                            uint32_t shared) {
#pragma unroll
  for (int i = threadIdx.x; i < K::kRows * 8; i += K::kThreads) {
    const int row = i / 8, chunk = i % 8;
    const bool there = row < t.rows;
    const int64_t at = !there ? 0 : t.row_index ? t.row_index[row] : row;
    tile_copy(shared + tile_offset(row, chunk), x + at * t.ldx + (there ? column + chunk * 8 : 0), there);
  }
}

// Unit u of this thread's part of a stage of weights: its row of the weight, and its column, or `in` where there is
// none.
template <typename K>
__device__ __forceinline__ void tile_unit(const TensorTile& t, int column, int u, WeightRow& w, int& at) {
  const int i = threadIdx.x + u * K::kThreads, row = i / 8, chunk = i % 8 * kLaneColumns;
  w = t.w;
  if constexpr (K::kAcross) {
    w.row += column + row;
    at = column + row < t.inputs && chunk < t.outputs ? t.first_column + chunk : w.in;
  } else {
    w.row += row;
    at = row < t.outputs ? column + chunk : w.in;
  }
}

// Weights of a stage: copied, or loaded as they are, to be decoded once there is time.
template <typename K>
__device__ __forceinline__ void tile_copy_w(const TensorTile& t, int column, uint32_t shared) {
#pragma unroll
  for (int u = 0; u < K::kUnits; ++u) {
    const int i = threadIdx.x + u * K::kThreads;
    WeightRow w;
    int at;
    tile_unit<K>(t, column, u, w, at);
    const bool there = at < w.in;
    tile_copy(shared + tile_offset(i / 8, i % 8), w.data + (there ? (int64_t{w.row} * w.in + at) * 2 : 0),
              there);
  }
}
template <typename K>
__device__ __forceinline__ void tile_load_w(const TensorTile& t, int column, typename K::L::Raw* raw) {
#pragma unroll
  for (int u = 0; u < K::kUnits; ++u) {
    WeightRow w;
    int at;
    tile_unit<K>(t, column, u, w, at);
    raw[u] = K::L::load(w, at);
  }
}
template <typename K>
__device__ __forceinline__ void tile_store_w(const typename K::L::Raw* raw, bool second, char* to) {
#pragma unroll
  for (int u = 0; u < K::kUnits; ++u) {
    const int i = threadIdx.x + u * K::kThreads;
    float v[kLaneColumns];
    K::L::values(raw[u], v);
    if constexpr (K::L::kScaled && !K::kBlockScale) {
      const float scale = K::L::scale(raw[u]);
#pragma unroll
      for (float& x : v) x *= scale;
    }
    if (K::kTwoTerms && second) {
#pragma unroll
      for (float& x : v) x = second_term(x, __float2bfloat16_rn(x));
    }
    uint32_t pair[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(v[2 * j], v[2 * j + 1]);
      pair[j] = *reinterpret_cast<const uint32_t*>(&two);
    }
    *reinterpret_cast<uint4*>(to + tile_offset(i / 8, i % 8)) =
        make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }
}

// Adds a stage's products to the warp's sums.
template <typename K>
__device__ __forceinline__ void tile_multiply(uint32_t x, uint32_t w, int down, int across, int lane,
                                              float (&sum)[K::kM][K::kN][4]) {
  const int x_row = down * (K::kM * 16) + lane % 16, w_row = across * (K::kN * 8) + lane / 16 * 8 + lane % 8;
#pragma unroll
  for (int k = 0; k < K::kColumns / 16; ++k) {
    uint32_t a[K::kM][4], b[K::kN / 2][4];
#pragma unroll
    for (int m = 0; m < K::kM; ++m) load_matrices(a[m], x + tile_offset(x_row + m * 16, 2 * k + lane / 16));
#pragma unroll
    for (int n = 0; n < K::kN / 2; ++n) {
      if constexpr (K::kAcross) {
        load_transposed(b[n], w + tile_offset(k * 16 + lane % 16, across * K::kN + n * 2 + lane / 16));
      } else {
        load_matrices(b[n], w + tile_offset(w_row + n * 16, 2 * k + lane / 8 % 2));
      }
    }
#pragma unroll
    for (int m = 0; m < K::kM; ++m) {
#pragma unroll
      for (int n = 0; n < K::kN; ++n)
        multiply_add(sum[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
  }
}

// The scale of a tile's block of 128 outputs and 128 columns; a tile lies in one row of blocks.
__device__ __forceinline__ float tile_block_scale(const WeightRow& w, int column) {
  return __uint_as_float(
      load_bytes<4>(w.scale + 4 * (int64_t{w.row / 128} * ((w.in + 127) / 128) + column / 128)));
}

// The product; then put(row, output, value of output, value of output + 1) for every pair of results in the tile,
// those of rows and outputs that do not count too. `shared` has K::kShared bytes, 128-byte aligned. All threads of the
// block take part.
template <typename K, typename Put>
__device__ __forceinline__ void tensor_tile(const TensorTile& t, char* shared, Put put) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int down = warp % K::kWarpsDown, across = warp / K::kWarpsDown;
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  constexpr int kXBytes = K::kRows * K::kRowBytes;
  const int pass_stages = (t.inputs + K::kColumns - 1) / K::kColumns, stages = K::kPasses * pass_stages;
  typename K::L::Raw raw[K::kUnits];

  const auto start = [&](int stage) {  // asks for a stage
    if (stage < stages) {
      const uint32_t to = base + stage % K::kStages * K::kStageBytes;
      const int pass = stage / pass_stages, column = (stage - pass * pass_stages) * K::kColumns;
      tile_copy_x<K>(t, t.x + (pass == 1 ? t.low : 0), column, to);
      if constexpr (K::kCopied) {
        tile_copy_w<K>(t, column, to + kXBytes);
      } else {
        tile_load_w<K>(t, column, raw);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  const auto finish = [&](int stage) {  // decodes what start() loaded
    if constexpr (!K::kCopied) {
      if (stage < stages) {
        char* const to = shared + stage % K::kStages * K::kStageBytes + kXBytes;
        tile_store_w<K>(raw, stage >= 2 * pass_stages, to);
      }
    }
  };

  float sum[K::kM][K::kN][4] = {};
  float block[K::kBlockScale ? K::kM : 1][K::kBlockScale ? K::kN : 1][4] =
      {};  // of 128 columns, without scale
  for (int s = 0; s < K::kStages - 1; ++s) {
    start(s);
    finish(s);
  }
  for (int s = 0; s < stages; ++s) {
    asm volatile("cp.async.wait_group %0;" ::"n"(K::kStages - 2) : "memory");
    __syncthreads();  // stage s is there for all, and all are done with stage s - 1, which the next one overwrites
    start(s + K::kStages - 1);
    const uint32_t x = base + s % K::kStages * K::kStageBytes;
    if constexpr (K::kBlockScale) {
      tile_multiply<K>(x, x + kXBytes, down, across, lane, block);
      const int here = s % pass_stages;
      if (here % 2 == 1 || here + 1 == pass_stages) {
        const float scale = tile_block_scale(t.w, here * K::kColumns);
#pragma unroll
        for (int i = 0; i < K::kM * K::kN * 4; ++i) {
          float& b = block[i / (K::kN * 4)][i / 4 % K::kN][i % 4];
          float& to = sum[i / (K::kN * 4)][i / 4 % K::kN][i % 4];
          to = fmaf(b, scale, to);
          b = 0;
        }
      }
    } else {
      tile_multiply<K>(x, x + kXBytes, down, across, lane, sum);
    }
    finish(s + K::kStages - 1);
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
#pragma unroll
  for (int m = 0; m < K::kM; ++m) {
#pragma unroll
    for (int n = 0; n < K::kN; ++n) {
      const int row = down * (K::kM * 16) + m * 16 + lane / 4,
                output = across * (K::kN * 8) + n * 8 + lane % 4 * 2;
      put(row, output, sum[m][n][0], sum[m][n][1]);
      put(row + 8, output, sum[m][n][2], sum[m][n][3]);
    }
  }
}

}  // namespace rocket::cuda
