#include "ops/gemm.h"

#include "ops/gemv.h"
#include "ops/nvfp4_dot.h"
#include "ops/quant_decode.h"

namespace rocket::ROCKET_ISA {
namespace {

constexpr int64_t kBlockFloats = 1 << 17;  // floats of x that a core's own cache holds beside the panel
constexpr int64_t kMinRows = 16;           // of a block, however wide x is
constexpr int64_t kMaxTiles = kBlockFloats / kSegment / kTile;

// Four outputs of a segment, decoded: [step][output][lane], a step being sixteen columns; for NVFP4 bytes
// [group][quarter][output][lane] and block scales [group][output][lane].
struct Panel {
  alignas(64) float value[kSegment * kTile];
  alignas(64) float scale[kSegment / 16 * kTile];
};

template <WeightFormat F>
ROCKET_INLINE void decode_columns(const Weight& w, int64_t o, int64_t begin, int64_t end, float* to) {
  typedef Columns<F> C;
  const char* row = static_cast<const char*>(w.data) + o * w.in * C::kBytes;
  const int64_t full = end / kLanes * kLanes, block = C::kBlock > 0 ? C::kBlock : kSegment;
  for (int64_t from = begin; from < full; from += block) {
    const Fn scale = C::kBlock > 0 ? nsplat(C::scale(w, o, from)) : Fn{};
    const int64_t stop = min_i64(from + block, full);
    for (int64_t i = from; i < stop; i += kLanes) {
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) {
        Fn v = C::load(row + (i + p * kNative) * C::kBytes);
        if (C::kBlock > 0) v *= scale;
        nstore(to + (i - begin) * kTile + p * kNative, v);
      }
    }
  }
  if (full < end) decode_tail<F>(w, o, full, static_cast<int>(end - full), to + (full - begin) * kTile);
}

ROCKET_INLINE void decode_nvfp4(const Weight& w, int64_t o, int64_t begin, int64_t end, uint8_t* to,
                                float* to_scale) {
  alignas(64) uint8_t spare[kSpareBytes];
  for (int64_t column = begin; column < end; column += kGroup) {
    const GroupBytes bytes = group_bytes(w, o, column, spare);
    for (int p = 0; p < kParts; ++p) {
      Wn value[4];
      load_values(bytes.data, p, value);
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) std::memcpy(to + q * kTile * 64 + p * sizeof(Wn), &value[q], sizeof(Wn));
      nstore(to_scale + p * kNative, block_scales(bytes.scale, p));
    }
    to += 4 * kTile * 64;
    to_scale += kTile * kLanes;
  }
  const uint8_t* scales = static_cast<const uint8_t*>(w.block_scale) + (o * w.in + begin) / 16;
  if (any_nan_scale(scales, (end - begin) / 16)) to_scale[-kTile * kLanes] = NAN;
}

// Columns [begin, end) of outputs o … o + 3; those from `last` on are zero.
template <WeightFormat F>
[[gnu::noinline]] void decode_panel(const Weight& w, int64_t o, int64_t last, int64_t begin, int64_t end,
                                    Panel& panel) {
  if (o + kTile > last) std::memset(&panel, 0, sizeof panel);
  for (int k = 0; k < kTile && o + k < last; ++k) {
    if constexpr (F == WeightFormat::kNVFP4) {
      decode_nvfp4(w, o + k, begin, end, reinterpret_cast<uint8_t*>(panel.value) + k * 64,
                   panel.scale + k * kLanes);
    } else {
      decode_columns<F>(w, o + k, begin, end, panel.value + k * kLanes);
    }
  }
}

// How many rows the registers hold beside four outputs.
constexpr int kRegisterRows = kNative == 8 ? 2 : kTile;

// Part p of the lanes: acc[r][k] += the sum over steps of x[r] times panel output k.
template <int R>
ROCKET_INLINE void tile_part(const float* const* x, const float* value, int64_t steps, float* acc, int p) {
  Fn sum[R][kTile];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int k = 0; k < kTile; ++k) sum[r][k] = Fn{};
  }
  for (int64_t s = 0; s < steps; ++s) {
    Fn xr[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) xr[r] = nload(x[r] + s * kLanes + p * kNative);
#pragma GCC unroll 4
    for (int k = 0; k < kTile; ++k) {
      const Fn v = nload(value + (s * kTile + k) * kLanes + p * kNative);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r][k] = nfma(v, xr[r], sum[r][k]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int k = 0; k < kTile; ++k) {
      float* at = acc + (r * kTile + k) * kLanes + p * kNative;
      nstore(at, nload(at) + sum[r][k]);
    }
  }
}

template <int R>
ROCKET_INLINE void tile_columns(const float* const* x, const Panel& panel, int64_t steps, float* acc) {
  for (int p = 0; p < kParts; ++p) {
    if constexpr (R > kRegisterRows) {
      tile_part<kRegisterRows>(x, panel.value, steps, acc, p);
      tile_part<R - kRegisterRows>(x + kRegisterRows, panel.value, steps,
                                   acc + kRegisterRows * kTile * kLanes, p);
    } else {
      tile_part<R>(x, panel.value, steps, acc, p);
    }
  }
}

// acc[r][k] gets the groups' block sums times both scales.
template <int R>
ROCKET_INLINE void tile_nvfp4(const float* const* x, const Panel& panel, int64_t groups, float* acc) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(panel.value);
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* value = bytes + g * 4 * kTile * 64;
    const float* scale = panel.scale + g * kTile * kLanes;
#if defined(__AVX512F__)
    In sum[R][kTile];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int k = 0; k < kTile; ++k) sum[r][k] = In{};
    }
#pragma GCC unroll 3
    for (int digit = 0; digit < 3; ++digit) {
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
        Wn v[kTile];
#pragma GCC unroll 4
        for (int k = 0; k < kTile; ++k) v[k] = load_as<Wn>(value + (q * kTile + k) * 64);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const Wn d = digits(group_of(x[r], g * kGroup), digit, q, 0);
#pragma GCC unroll 4
          for (int k = 0; k < kTile; ++k) sum[r][k] = dot_bytes(sum[r][k], v[k], d);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const In offset = load_as<In>(group_of(x[r], g * kGroup) + kOffsetAt);
#pragma GCC unroll 4
        for (int k = 0; k < kTile; ++k) sum[r][k] = digit < 2 ? sum[r][k] << 8 : sum[r][k] + offset;
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Fn xs = group_scales(group_of(x[r], g * kGroup), 0);
#pragma GCC unroll 4
      for (int k = 0; k < kTile; ++k) {
        float* at = acc + (r * kTile + k) * kLanes;
        nstore(at, nfma(__builtin_convertvector(sum[r][k], Fn), nload(scale + k * kLanes) * xs, nload(at)));
      }
    }
#else
    for (int p = 0; p < kParts; ++p) {
      for (int k = 0; k < kTile; ++k) {
        Wn v[4];
        for (int q = 0; q < 4; ++q) v[q] = load_as<Wn>(value + (q * kTile + k) * 64 + p * sizeof(Wn));
        const Fn s = nload(scale + k * kLanes + p * kNative);
        for (int r = 0; r < R; ++r) {
          const uint8_t* group = group_of(x[r], g * kGroup);
          float* at = acc + (r * kTile + k) * kLanes + p * kNative;
          nstore(at, nfma(block_sums(v, group, p), s * group_scales(group, p), nload(at)));
        }
      }
    }
#endif
  }
}

template <bool kFour, int R>
ROCKET_INLINE void tile(const float* const* x, const Panel& panel, int64_t count, float* acc) {
  if constexpr (kFour) {
    tile_nvfp4<R>(x, panel, count, acc);
  } else {
    tile_columns<R>(x, panel, count, acc);
  }
}

// `rows` rows (at most four) and the panel: acc [4][4][16]. count: groups of NVFP4, steps otherwise.
template <bool kFour>
[[gnu::noinline]] void tile_rows(int rows, const float* const* x, const Panel& panel, int64_t count,
                                 float* acc) {
  switch (rows) {
    case 1:
      return tile<kFour, 1>(x, panel, count, acc);
    case 2:
      return tile<kFour, 2>(x, panel, count, acc);
    case 3:
      return tile<kFour, 3>(x, panel, count, acc);
    default:
      return tile<kFour, 4>(x, panel, count, acc);
  }
}

// A segment whose last step has columns past the row's end: these rows are copied and padded with zeros.
[[gnu::noinline]] void tile_padded(int rows, const float* const* x, const Panel& panel, int64_t columns,
                                   float* acc) {
  alignas(64) float padded[kTile][kSegment];
  const float* xp[kTile];
  const int64_t steps = (columns + kLanes - 1) / kLanes;
  for (int k = 0; k < rows; ++k) {
    std::memcpy(padded[k], x[k], columns * sizeof(float));
    for (int64_t i = columns; i < steps * kLanes; ++i) padded[k][i] = 0;
    xp[k] = padded[k];
  }
  tile_rows<false>(rows, xp, panel, steps, acc);
}

ROCKET_INLINE F4v fold_lanes(const float* lanes) {
  Fn part[kParts];
  for (int p = 0; p < kParts; ++p) part[p] = nload(lanes + p * kNative);
  return fold(part);
}

// More than a few rows: four outputs of a segment are decoded at a time for a block of rows.
template <WeightFormat F>
void gemm(const Weight& w, int64_t begin, int64_t end, int64_t rows, const RowsIn& xs, const RowsOut& y) {
  constexpr bool kFour = F == WeightFormat::kNVFP4;
  Panel panel;
  alignas(64) float acc[kMaxTiles][kTile * kTile * kLanes];
  const bool carry = w.in > kSegment;  // lanes of several tiles live on from segment to segment
  int64_t block = kBlockFloats / round_up(w.in, kSegment) / kTile * kTile;
  if (block < kMinRows) block = kMinRows;
  for (int64_t row0 = 0; row0 < rows; row0 += block) {
    const int64_t row1 = min_i64(rows, row0 + block);
    for (int64_t o = begin; o < end; o += kTile) {
      for (int64_t from = 0; from < w.in; from += kSegment) {
        const int64_t to = min_i64(w.in, from + kSegment), columns = to - from;
        decode_panel<F>(w, o, end, from, to, panel);
        for (int64_t r = row0; r < row1; r += kTile) {
          const int n = static_cast<int>(min_i64(kTile, row1 - r));
          float* a = acc[carry ? (r - row0) / kTile : 0];
          const float* x[kTile];
          for (int k = 0; k < n; ++k)
            x[k] = row_of(xs, r + k) + (kFour ? from / kGroup * kGroupFloats : from);
          if (from == 0) std::memset(a, 0, sizeof acc[0]);
          if (kFour || columns % kLanes == 0) {
            tile_rows<kFour>(n, x, panel, kFour ? (columns + kGroup - 1) / kGroup : columns / kLanes, a);
          } else {
            tile_padded(n, x, panel, columns, a);
          }
          if (to < w.in) continue;
          for (int k = 0; k < n; ++k, a += kTile * kLanes) {
            put_sums(y, r + k, o - begin, end - begin, kFour ? w.global_scale : 1.0f, fold_lanes(a),
                     fold_lanes(a + kLanes), fold_lanes(a + 2 * kLanes), fold_lanes(a + 3 * kLanes));
          }
        }
      }
    }
  }
}

template <WeightFormat F>
void product(const Weight& w, int64_t begin, int64_t end, int64_t rows, const RowsIn& x, const RowsOut& y) {
  switch (rows) {
    case 1:
      return gemv<F, 1>(w, begin, end, x, y);
    case 2:
      return gemv<F, 2>(w, begin, end, x, y);
    case 3:
      return gemv<F, 3>(w, begin, end, x, y);
    case 4:
      return gemv<F, 4>(w, begin, end, x, y);
    default:
      return gemm<F>(w, begin, end, rows, x, y);
  }
}

}  // namespace

void matmul(const Weight& w, int64_t begin, int64_t end, int64_t rows, const RowsIn& x, const RowsOut& y) {
  if (rows <= 0 || begin >= end) return;
  switch (w.format) {
    case WeightFormat::kF32:
      return product<WeightFormat::kF32>(w, begin, end, rows, x, y);
    case WeightFormat::kBF16:
      return product<WeightFormat::kBF16>(w, begin, end, rows, x, y);
    case WeightFormat::kNVFP4:
      return product<WeightFormat::kNVFP4>(w, begin, end, rows, x, y);
    case WeightFormat::kFP8Block:
      return product<WeightFormat::kFP8Block>(w, begin, end, rows, x, y);
    case WeightFormat::kMXFP8:
      return product<WeightFormat::kMXFP8>(w, begin, end, rows, x, y);
  }
}

void fixed_block(const float* x, int64_t block, float* to) {
  F4v v[4];
  I4v largest = {};
  for (int i = 0; i < 4; ++i) {
    v[i] = load_as<F4v>(x + 4 * i);
    const I4v magnitude = reinterpret_cast<I4v>(v[i]) & 0x7fffffff;  // orders like the float
    largest = magnitude > largest ? magnitude : largest;
  }
  int32_t top = 0;
  for (int i = 0; i < 4; ++i) top = largest[i] > top ? largest[i] : top;
  // Digits reach 127 * (1 + 256 + 65536): a mantissa above that counts as the next exponent. Far down, the
  // exponent stays where its powers of two are still floats.
  const bool finite = top < 0x7f800000;
  int32_t exponent = (top + 0x10200) >> 23;
  exponent = exponent < 24 ? 24 : exponent;
  const float factor = finite ? as_float(static_cast<uint32_t>(276 - exponent) << 23) : 0.0f;
  I4v sum = {};
  B16v bytes[4];
  for (int i = 0; i < 4; ++i) {
    const I4v whole = finite ? nearest(v[i] * factor) : I4v{};
    sum += whole;
    bytes[i] = reinterpret_cast<B16v>((whole + 0x808080) ^ 0x808080);
  }
  char* lane = reinterpret_cast<char*>(to + block / 16 * kGroupFloats) + block % 16 * 4;
  for (int half = 0; half < 2; ++half) {
    const B16v a = bytes[2 * half], b = bytes[2 * half + 1];
    const I4v low = reinterpret_cast<I4v>(
        __builtin_shufflevector(a, b, 0, 8, 16, 24, 4, 12, 20, 28, 1, 9, 17, 25, 5, 13, 21, 29));
    const I4v high = reinterpret_cast<I4v>(
        __builtin_shufflevector(a, b, 2, 10, 18, 26, 6, 14, 22, 30, 2, 10, 18, 26, 6, 14, 22, 30));
    for (int odd = 0; odd < 2; ++odd) {
      const int32_t digit[3] = {high[odd], low[2 + odd], low[odd]};
      for (int d = 0; d < 3; ++d) std::memcpy(lane + (d * 4 + 2 * half + odd) * 64, &digit[d], 4);
    }
  }
  const uint32_t offset = 0u - 12u * static_cast<uint32_t>(sum[0] + sum[1] + sum[2] + sum[3]);
  const float scale = finite ? as_float(static_cast<uint32_t>(exponent - 23) << 23) : NAN;
  std::memcpy(lane + kOffsetAt, &offset, 4);
  std::memcpy(lane + kScaleAt, &scale, 4);
}

void fixed_clear_tail(int64_t in, float* to) {
  if (in % kGroup) std::memset(to + in / kGroup * kGroupFloats, 0, kGroupFloats * sizeof(float));
}

void fixed_row(const float* x, int64_t in, float* to) {
  fixed_clear_tail(in, to);
  for (int64_t block = 0; block < in / 16; ++block) fixed_block(x + block * 16, block, to);
}

}  // namespace rocket::ROCKET_ISA
