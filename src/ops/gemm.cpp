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
  const int64_t full = end / kLanes * kLanes;
  LargestCode top;
  for (int64_t from = begin; from < full; from += C::kBlock) {
    const CodeScale scale = C::scale(w, o, from);
    const Fn first = nsplat(scale.first), second = nsplat(scale.second);
    const int64_t stop = min_i64(from + C::kBlock, full);
    for (int64_t i = from; i < stop; i += kLanes) {
      if (C::kCodes) LargestCode::see(top, load_as<B16v>(row + i));
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) {
        Fn v = C::load(row + (i + p * kNative) * C::kBytes);
        if (C::kCodes) v = v * first * second;
        nstore(to + (i - begin) * kTile + p * kNative, v);
      }
    }
  }
  if (full < end) decode_tail<F>(w, o, full, static_cast<int>(end - full), to + (full - begin) * kTile);
  if (C::kCodes && LargestCode::nan(top)) to[0] = NAN;
}

ROCKET_INLINE void decode_nvfp4(const Weight& w, int64_t o, int64_t begin, int64_t end, uint8_t* to,
                                float* to_scale) {
  alignas(64) uint8_t spare[kSpareBytes];
  LargestCode top;
  for (int64_t column = begin; column < end; column += kGroup) {
    const GroupBytes bytes = group_bytes(w, o, column, spare);
    LargestCode::see(
        top, load_as<B16v>(bytes.scale) & load_as<B16v>(kBlockMask + 16 - min_i64(16, (end - column) / 16)));
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
  if (LargestCode::nan(top)) to_scale[-kTile * kLanes] = NAN;
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

ROCKET_INLINE F4v fold_lanes(const float* lanes) {
  Fn part[kParts];
  for (int p = 0; p < kParts; ++p) part[p] = nload(lanes + p * kNative);
  return fold(part);
}

// The four sums of each row from its lanes [row][output][lane].
template <int R>
ROCKET_INLINE void sums_of(const float* acc, F4v* sums) {
  for (int r = 0; r < R; ++r) {
    const float* a = acc + r * kTile * kLanes;
    sums[r] = finish_sums(fold_lanes(a), fold_lanes(a + kLanes), fold_lanes(a + 2 * kLanes),
                          fold_lanes(a + 3 * kLanes));
  }
}

// What a tile does with a segment: `first` starts the lanes, `last` adds them up.
struct Segment {
  int64_t count;  // steps, or groups of NVFP4
  bool first, last;
};

// How many rows the registers hold beside four outputs.
constexpr int kRegisterRows = kNative == 8 ? 2 : kTile;

// Part p of the lanes of R rows of x and the panel's outputs.
template <int R>
ROCKET_INLINE void tile_part(const float* const* x, const float* value, Segment segment, int p, float* acc,
                             F4v* sums) {
  Fn sum[R][kTile];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int k = 0; k < kTile; ++k) sum[r][k] = Fn{};
  }
  for (int64_t s = 0; s < segment.count; ++s) {
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
  if (kParts == 1 && segment.first && segment.last) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      sums[r] = finish_sums(fold(&sum[r][0]), fold(&sum[r][1]), fold(&sum[r][2]), fold(&sum[r][3]));
    return;
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int k = 0; k < kTile; ++k) {
      float* at = acc + (r * kTile + k) * kLanes + p * kNative;
      nstore(at, segment.first ? sum[r][k] : nload(at) + sum[r][k]);
    }
  }
  if (segment.last && p == kParts - 1) sums_of<R>(acc, sums);
}

template <int R>
ROCKET_INLINE void tile_columns(const float* const* x, const Panel& panel, Segment segment, float* acc,
                                F4v* sums) {
  for (int p = 0; p < kParts; ++p) {
    if constexpr (R > kRegisterRows) {
      tile_part<kRegisterRows>(x, panel.value, segment, p, acc, sums);
      tile_part<R - kRegisterRows>(x + kRegisterRows, panel.value, segment, p,
                                   acc + kRegisterRows * kTile * kLanes, sums + kRegisterRows);
    } else {
      tile_part<R>(x, panel.value, segment, p, acc, sums);
    }
  }
}

#if defined(__AVX512F__)

// Block sums of a group: v * X. The digits come one after the other, highest first, so that one sum each is
// enough.
template <int R>
ROCKET_INLINE void tile_group(const uint8_t* const* group, const uint8_t* value, In (*sum)[kTile]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int k = 0; k < kTile; ++k) sum[r][k] = In{};
  }
#pragma GCC unroll 3
  for (int digit = 0; digit < 3; ++digit) {
    // The registers are for the sums: without this, GCC would keep the weights of one digit for the next.
    asm volatile("" ::: "memory");
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      Wn v[kTile];
#pragma GCC unroll 4
      for (int k = 0; k < kTile; ++k) v[k] = load_as<Wn>(value + (q * kTile + k) * 64);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Wn d = digits(group[r], digit, q, 0);
#pragma GCC unroll 4
        for (int k = 0; k < kTile; ++k) sum[r][k] = dot_bytes(sum[r][k], v[k], d);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const In offset = load_as<In>(group[r] + kOffsetAt);
#pragma GCC unroll 4
      for (int k = 0; k < kTile; ++k) sum[r][k] = digit < 2 ? sum[r][k] << 8 : sum[r][k] + offset;
    }
  }
}

template <int R>
ROCKET_INLINE void tile_nvfp4(const float* const* x, const Panel& panel, Segment segment, float* acc,
                              F4v* sums) {
  alignas(64) static constexpr float kZeros[kTile * kTile * kLanes] = {};
  const uint8_t* value = reinterpret_cast<const uint8_t*>(panel.value);
  const float* scale = panel.scale;
  const float* from = segment.first ? kZeros : acc;
  const uint8_t* group[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) group[r] = reinterpret_cast<const uint8_t*>(x[r]);
  for (int64_t g = 0; g < segment.count; ++g) {
    In sum[R][kTile];
    tile_group<R>(group, value, sum);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Fn xs = group_scales(group[r], 0);
#pragma GCC unroll 4
      for (int k = 0; k < kTile; ++k) {
        const int at = (r * kTile + k) * kLanes;
        const Fn scales = nload(scale + k * kLanes) * xs;
        nstore(acc + at, nfma(__builtin_convertvector(sum[r][k], Fn), scales, nload(from + at)));
      }
      group[r] += kGroupFloats * sizeof(float);
    }
    from = acc;
    value += 4 * kTile * 64;
    scale += kTile * kLanes;
  }
  if (segment.last) sums_of<R>(acc, sums);
}

#else

template <int R>
ROCKET_INLINE void tile_nvfp4(const float* const* x, const Panel& panel, Segment segment, float* acc,
                              F4v* sums) {
  for (int p = 0; p < kParts; ++p) {
    for (int k = 0; k < kTile; ++k) {
      Fn lanes[R];
      for (int r = 0; r < R; ++r)
        lanes[r] = segment.first ? Fn{} : nload(acc + (r * kTile + k) * kLanes + p * kNative);
      for (int64_t g = 0; g < segment.count; ++g) {
        const uint8_t* value = reinterpret_cast<const uint8_t*>(panel.value) + (g * 4 * kTile + k) * 64;
        Wn v[1][4];
        for (int q = 0; q < 4; ++q) v[0][q] = load_as<Wn>(value + q * kTile * 64 + p * sizeof(Wn));
        const Fn s = nload(panel.scale + (g * kTile + k) * kLanes + p * kNative);
        for (int r = 0; r < R; ++r) {
          const uint8_t* group = group_of(x[r], g * kGroup);
          Fn sums_of_blocks;
          block_sums<1>(v, group, p, &sums_of_blocks);
          lanes[r] = nfma(sums_of_blocks, s * group_scales(group, p), lanes[r]);
        }
      }
      for (int r = 0; r < R; ++r) nstore(acc + (r * kTile + k) * kLanes + p * kNative, lanes[r]);
    }
  }
  if (segment.last) sums_of<R>(acc, sums);
}

#endif

template <bool kFour, int R>
ROCKET_INLINE void tile(const float* const* x, const Panel& panel, Segment segment, float* acc, F4v* sums) {
  if constexpr (kFour) {
    tile_nvfp4<R>(x, panel, segment, acc, sums);
  } else {
    tile_columns<R>(x, panel, segment, acc, sums);
  }
}

// `rows` rows (at most four) and the panel: lanes acc [4][4][16], and after the last segment sums [4].
template <bool kFour>
[[gnu::noinline]] void tile_rows(int rows, const float* const* x, const Panel& panel, Segment segment,
                                 float* acc, F4v* sums) {
  switch (rows) {
    case 1:
      return tile<kFour, 1>(x, panel, segment, acc, sums);
    case 2:
      return tile<kFour, 2>(x, panel, segment, acc, sums);
    case 3:
      return tile<kFour, 3>(x, panel, segment, acc, sums);
    default:
      return tile<kFour, 4>(x, panel, segment, acc, sums);
  }
}

// A segment whose last step has columns past the row's end: these rows are copied and padded with zeros.
[[gnu::noinline]] void tile_padded(int rows, const float* const* x, const Panel& panel, int64_t columns,
                                   Segment segment, float* acc, F4v* sums) {
  alignas(64) float padded[kTile][kSegment];
  const float* xp[kTile];
  segment.count = (columns + kLanes - 1) / kLanes;
  for (int k = 0; k < rows; ++k) {
    std::memcpy(padded[k], x[k], columns * sizeof(float));
    for (int64_t i = columns; i < segment.count * kLanes; ++i) padded[k][i] = 0;
    xp[k] = padded[k];
  }
  tile_rows<false>(rows, xp, panel, segment, acc, sums);
}

// More than a few rows: four outputs of a segment are decoded at a time for a block of rows.
template <WeightFormat F>
void gemm(const Weight& w, int64_t begin, int64_t end, int64_t rows, const RowsIn& xs, const RowsOut& y) {
  constexpr bool kFour = F == WeightFormat::kNVFP4;
  const float scale = kFour ? w.global_scale : 1.0f;
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
        const Segment segment = {kFour ? (columns + kGroup - 1) / kGroup : columns / kLanes, from == 0,
                                 to == w.in};
        decode_panel<F>(w, o, end, from, to, panel);
        for (int64_t r = row0; r < row1; r += kTile) {
          const int n = static_cast<int>(min_i64(kTile, row1 - r));
          float* a = acc[carry ? (r - row0) / kTile : 0];
          F4v sums[kTile];
          const float* x[kTile];
          for (int k = 0; k < n; ++k)
            x[k] = row_of(xs, r + k) + (kFour ? from / kGroup * kGroupFloats : from);
          if (kFour || columns % kLanes == 0) {
            tile_rows<kFour>(n, x, panel, segment, a, sums);
          } else {
            tile_padded(n, x, panel, columns, segment, a, sums);
          }
          for (int k = 0; k < n && segment.last; ++k)
            put_sums(y, r + k, o - begin, end - begin, scale, sums[k]);
        }
      }
    }
  }
}

template <WeightFormat F>
void product(const Weight& w, int64_t begin, int64_t end, int64_t rows, const RowsIn& x, const RowsOut& y) {
  if (rows == 1) return gemv<F, 1>(w, begin, end, x, y);
  // Worth it while the rows leave room in the first-level cache, or where decoding is dear.
  if (rows * w.in <= 4096 || F == WeightFormat::kNVFP4) {
    if (rows == 2) return gemv<F, 2>(w, begin, end, x, y);
    if (rows == 3) return gemv<F, 3>(w, begin, end, x, y);
    if (rows == 4) return gemv<F, 4>(w, begin, end, x, y);
  }
  gemm<F>(w, begin, end, rows, x, y);
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
