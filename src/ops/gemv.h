// Products of one to four rows: weights are decoded in registers and used at once. Memory is read in the
// order of its addresses, which is what hardware prefetches at full rate; several rows of weights side by
// side reach a third of it.
#pragma once

#include "ops/gemm.h"
#include "ops/nvfp4_dot.h"
#include "ops/quant_decode.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace rocket::ROCKET_ISA {

constexpr int kFewRows = 4;

// acc[r] += columns [from, to), whole steps of sixteen under one scale.
template <WeightFormat F, int R, bool kBoth>
ROCKET_INLINE void dot_steps(const char* row, int64_t from, int64_t to, CodeScale scale,
                             const float* const* x, Fn (*acc)[kParts], LargestCode& top) {
  typedef Columns<F> C;
  // A loop of single steps is too long for the window in which a core looks ahead for loads.
  constexpr int kUnroll = C::kBlock < 4 * kLanes ? C::kBlock / kLanes : 4;
  const Fn first = nsplat(scale.first), second = nsplat(scale.second);
  int64_t i = from;
  const auto step = [&](int64_t at) __attribute__((always_inline)) {
    if (C::kCodes) LargestCode::see(top, load_as<B16v>(row + at));
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      Fn v = C::load(row + (at + p * kNative) * C::kBytes);
      if (C::kCodes) v *= first;
      if (kBoth) v *= second;
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r][p] = nfma(v, nload(x[r] + at + p * kNative), acc[r][p]);
    }
  };
  if (to - from == C::kBlock) {
    // A number of turns that is known is one that branches are predicted for: the next segment's loads start
    // in time.
    for (int turn = 0; turn < C::kBlock / (kUnroll * kLanes); ++turn, i += kUnroll * kLanes) {
#pragma GCC unroll 4
      for (int u = 0; u < kUnroll; ++u) step(i + u * kLanes);
    }
    return;
  }
  for (; i + kUnroll * kLanes <= to; i += kUnroll * kLanes) {
#pragma GCC unroll 4
    for (int u = 0; u < kUnroll; ++u) step(i + u * kLanes);
  }
  for (; i < to; i += kLanes) step(i);
}

// Folded lanes of output o for R rows.
template <WeightFormat F, int R>
ROCKET_INLINE void dot_columns(const Weight& w, int64_t o, const float* const* x, F4v* folded) {
  typedef Columns<F> C;
  const char* row = static_cast<const char*>(w.data) + o * w.in * C::kBytes;
  LargestCode top;
  Fn total[R][kParts] = {};
  for (int64_t begin = 0; begin < w.in; begin += kSegment) {
    const int64_t end = min_i64(w.in, begin + kSegment), full = end / kLanes * kLanes;
    Fn acc[R][kParts];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) acc[r][p] = Fn{};
    }
    for (int64_t from = begin; from < full; from += C::kBlock) {
      const CodeScale scale = C::scale(w, o, from);
      const int64_t to = min_i64(from + C::kBlock, full);
      if (C::kCodes && scale.both) {
        dot_steps<F, R, true>(row, from, to, scale, x, acc, top);
      } else {
        dot_steps<F, R, false>(row, from, to, scale, x, acc, top);
      }
    }
    if (full < end) {
      alignas(64) float tail[kLanes], xt[kLanes];
      decode_tail<F>(w, o, full, static_cast<int>(end - full), tail);
      for (int r = 0; r < R; ++r) {
        std::memset(xt, 0, sizeof xt);
        std::memcpy(xt, x[r] + full, (end - full) * sizeof(float));
        for (int p = 0; p < kParts; ++p)
          acc[r][p] = nfma(nload(tail + p * kNative), nload(xt + p * kNative), acc[r][p]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) total[r][p] = begin == 0 ? acc[r][p] : total[r][p] + acc[r][p];
    }
  }
  const bool nan = C::kCodes && LargestCode::nan(top);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) folded[r] = nan ? F4v{} + NAN : fold(total[r]);
}

// Outputs of NVFP4 that share what they load of x. Two rows of weights are read side by side then, so the
// lines to come are asked for in the order of their addresses.
constexpr int kPair = kNative == 16 ? 2 : 1;
constexpr int64_t kAhead = 4096;

// The group at data and scale: acc[k][r] += block sums times scales.
template <int R>
ROCKET_INLINE void dot_group(const uint8_t* const* data, const uint8_t* const* scale, const uint8_t* const* x,
                             Fn (*acc)[R][kParts]) {
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) {
    Wn value[kPair][4];
#pragma GCC unroll 2
    for (int k = 0; k < kPair; ++k) load_values(data[k], p, value[k]);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      Fn sums[kPair];
      block_sums<kPair>(value, x[r], p, sums);
#pragma GCC unroll 2
      for (int k = 0; k < kPair; ++k)
        acc[k][r][p] = nfma(sums[k], block_scales(scale[k], p) * group_scales(x[r], p), acc[k][r][p]);
    }
  }
}

// Where the rows of kPair outputs start, and their last groups if these are short.
struct PairBytes {
  const uint8_t *data[kPair], *scale[kPair];
  GroupBytes last[kPair];
};

// Folded lanes of kPair outputs for R rows, of `groups` whole groups and `rest` columns.
template <int R>
ROCKET_INLINE void dot_pair(PairBytes pair, int64_t groups, int64_t rest, const uint8_t* const* x,
                            F4v (*folded)[R], LargestCode& top) {
  Fn acc[kPair][R][kParts];
#pragma GCC unroll 2
  for (int k = 0; k < kPair; ++k) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) acc[k][r][p] = Fn{};
    }
  }
  const uint8_t* xr[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) xr[r] = x[r];
  const uint8_t* ahead = pair.data[0] + kAhead;
  for (int64_t g = 0; g < groups; ++g) {
#pragma GCC unroll 4
    for (int i = 0; i < kPair * 2; ++i) __builtin_prefetch(ahead + i * 64);
    ahead += kPair * kGroup / 2;
#pragma GCC unroll 2
    for (int k = 0; k < kPair; ++k) LargestCode::see(top, load_as<B16v>(pair.scale[k]));
    dot_group<R>(pair.data, pair.scale, xr, acc);
#pragma GCC unroll 2
    for (int k = 0; k < kPair; ++k) {
      pair.data[k] += kGroup / 2;
      pair.scale[k] += kGroup / 16;
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) xr[r] += kGroupFloats * sizeof(float);
  }
  if (rest > 0) {
    const B16v mask = load_as<B16v>(kBlockMask + 16 - rest / 16);
#pragma GCC unroll 2
    for (int k = 0; k < kPair; ++k) {
      pair.data[k] = pair.last[k].data;
      pair.scale[k] = pair.last[k].scale;
      LargestCode::see(top, load_as<B16v>(pair.scale[k]) & mask);
    }
    dot_group<R>(pair.data, pair.scale, xr, acc);
  }
#pragma GCC unroll 2
  for (int k = 0; k < kPair; ++k) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) folded[k][r] = fold(acc[k][r]);
  }
}

// Whether a scale of output o is NaN.
[[gnu::noinline]] static bool nan_scales(const Weight& w, int64_t o) {
  const uint8_t* scale = static_cast<const uint8_t*>(w.block_scale) + o * w.in / 16;
  bool found = false;
  for (int64_t i = 0; i < w.in / 16; ++i) found = found || (scale[i] & 0x7f) == 0x7f;
  return found;
}

template <int R>
[[gnu::noinline]] static void gemv_nvfp4(const Weight& w, int64_t begin, int64_t end, const RowsIn& rows,
                                         const RowsOut& y) {
  const uint8_t* x[R];
  for (int r = 0; r < R; ++r) x[r] = reinterpret_cast<const uint8_t*>(row_of(rows, r));
  const int64_t groups = w.in / kGroup, rest = w.in % kGroup, data_bytes = w.in / 2, scale_bytes = w.in / 16;
  // Outputs up to here have a whole group of bytes from the start of their last group on.
  const int64_t roomy = rest > 0 ? w.out - (kGroup - rest + w.in - 1) / w.in : w.out;
  const uint8_t* data = static_cast<const uint8_t*>(w.data);
  const uint8_t* scale = static_cast<const uint8_t*>(w.block_scale);
  alignas(64) uint8_t spare[kTile][kSpareBytes];
  for (int64_t o = begin; o < end; o += kTile) {
    F4v folded[kTile][R];
    LargestCode top;
#pragma GCC unroll 4
    for (int first = 0; first < kTile; first += kPair) {
      PairBytes pair;
#pragma GCC unroll 2
      for (int k = 0; k < kPair; ++k) {
        const int64_t output = min_i64(o + first + k, end - 1);
        pair.data[k] = data + output * data_bytes;
        pair.scale[k] = scale + output * scale_bytes;
        pair.last[k] = {pair.data[k] + groups * (kGroup / 2), pair.scale[k] + groups * (kGroup / 16)};
        if (output >= roomy) pair.last[k] = group_bytes(w, output, groups * kGroup, spare[first + k]);
      }
      dot_pair<R>(pair, groups, rest, x, folded + first, top);
    }
    if (LargestCode::nan(top)) {
      for (int k = 0; k < kTile && o + k < end; ++k) {
        for (int r = 0; r < R && nan_scales(w, o + k); ++r) folded[k][r] = F4v{} + NAN;
      }
    }
    for (int r = 0; r < R; ++r)
      put_sums(y, r, o - begin, end - begin, w.global_scale,
               finish_sums(folded[0][r], folded[1][r], folded[2][r], folded[3][r]));
  }
}

template <WeightFormat F, int R>
[[gnu::noinline]] static void gemv_columns(const Weight& w, int64_t begin, int64_t end, const RowsIn& rows,
                                           const RowsOut& y) {
  const float* x[R];
  for (int r = 0; r < R; ++r) x[r] = row_of(rows, r);
  for (int64_t o = begin; o < end; o += kTile) {
    F4v folded[kTile][R] = {};
    for (int k = 0; k < kTile && o + k < end; ++k) dot_columns<F, R>(w, o + k, x, folded[k]);
    for (int r = 0; r < R; ++r)
      put_sums(y, r, o - begin, end - begin, 1.0f,
               finish_sums(folded[0][r], folded[1][r], folded[2][r], folded[3][r]));
  }
}

template <WeightFormat F, int R>
ROCKET_INLINE void gemv(const Weight& w, int64_t begin, int64_t end, const RowsIn& rows, const RowsOut& y) {
  if constexpr (F == WeightFormat::kNVFP4) {
    gemv_nvfp4<R>(w, begin, end, rows, y);
  } else {
    gemv_columns<F, R>(w, begin, end, rows, y);
  }
}

}  // namespace rocket::ROCKET_ISA

#pragma GCC diagnostic pop
