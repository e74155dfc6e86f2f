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

// Sixteen columns of a row's tail as floats, scale included: n < 16 of them, then zeros.
template <WeightFormat F>
ROCKET_INLINE void decode_tail(const Weight& w, int64_t o, int64_t column, int n, float* out) {
  typedef Columns<F> C;
  alignas(64) char bytes[kLanes * C::kBytes] = {};
  std::memcpy(bytes, static_cast<const char*>(w.data) + (o * w.in + column) * C::kBytes, n * C::kBytes);
  for (int p = 0; p < kParts; ++p) {
    Fn v = C::load(bytes + p * kNative * C::kBytes);
    if (C::kBlock > 0) v *= nsplat(C::scale(w, o, column));
    nstore(out + p * kNative, v);
  }
}

// Folded lanes of output o for R rows.
template <WeightFormat F, int R>
ROCKET_INLINE void dot_columns(const Weight& w, int64_t o, const float* const* x, F4v* folded) {
  typedef Columns<F> C;
  const char* row = static_cast<const char*>(w.data) + o * w.in * C::kBytes;
  Fn total[R][kParts];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) total[r][p] = Fn{};
  }
  for (int64_t begin = 0; begin < w.in; begin += kSegment) {
    const int64_t end = min_i64(w.in, begin + kSegment), full = end / kLanes * kLanes,
                  block = C::kBlock > 0 ? C::kBlock : kSegment;
    Fn acc[R][kParts];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) acc[r][p] = Fn{};
    }
    for (int64_t from = begin; from < full; from += block) {
      const Fn scale = C::kBlock > 0 ? nsplat(C::scale(w, o, from)) : Fn{};
      const int64_t stop = min_i64(from + block, full);
      for (int64_t i = from; i < stop; i += kLanes) {
#pragma GCC unroll 4
        for (int p = 0; p < kParts; ++p) {
          Fn v = C::load(row + (i + p * kNative) * C::kBytes);
          if (C::kBlock > 0) v *= scale;
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) acc[r][p] = nfma(v, nload(x[r] + i + p * kNative), acc[r][p]);
        }
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
      for (int p = 0; p < kParts; ++p) total[r][p] += acc[r][p];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) folded[r] = fold(total[r]);
}

// Outputs of NVFP4 that share what they load of x. Two rows of weights are read side by side then, so the
// lines to come are asked for in the order of their addresses.
constexpr int kPair = kNative == 16 ? 2 : 1;
constexpr int64_t kAhead = 4096;

// Folded lanes of outputs o and, if kPair is 2, o + 1 (or o again from `end` on): folded[k][r].
template <int R>
ROCKET_INLINE void dot_nvfp4(const Weight& w, int64_t o, int64_t end, const float* const* x,
                             F4v (*folded)[R]) {
  alignas(64) uint8_t spare[kPair][kSpareBytes];
  int64_t output[kPair];
  const uint8_t *data[kPair], *scale[kPair];
  Fn acc[kPair][R][kParts];
#pragma GCC unroll 2
  for (int k = 0; k < kPair; ++k) {
    output[k] = min_i64(o + k, end - 1);
    data[k] = static_cast<const uint8_t*>(w.data) + output[k] * w.in / 2;
    scale[k] = static_cast<const uint8_t*>(w.block_scale) + output[k] * w.in / 16;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) acc[k][r][p] = Fn{};
    }
  }
  const uint8_t* ahead = data[0] + kAhead;
  for (int64_t column = 0; column < w.in; column += kGroup) {
    if (column + kGroup > w.in) {
      for (int k = 0; k < kPair; ++k) {
        const GroupBytes bytes = group_bytes(w, output[k], column, spare[k]);
        data[k] = bytes.data - column / 2;
        scale[k] = bytes.scale - column / 16;
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kPair * 2; ++i) __builtin_prefetch(ahead + i * 64);
    ahead += kPair * kGroup / 2;
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      Wn value[kPair][4];
#pragma GCC unroll 2
      for (int k = 0; k < kPair; ++k) load_values(data[k] + column / 2, p, value[k]);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const uint8_t* group = group_of(x[r], column);
        Fn sums[kPair];
#pragma GCC unroll 2
        for (int k = 0; k < kPair; ++k) sums[k] = block_sums(value[k], group, p);
#pragma GCC unroll 2
        for (int k = 0; k < kPair; ++k) {
          acc[k][r][p] =
              nfma(sums[k], block_scales(scale[k] + column / 16, p) * group_scales(group, p), acc[k][r][p]);
        }
      }
    }
  }
#pragma GCC unroll 2
  for (int k = 0; k < kPair; ++k) {
    const bool nan =
        any_nan_scale(static_cast<const uint8_t*>(w.block_scale) + output[k] * w.in / 16, w.in / 16);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) folded[k][r] = nan ? F4v{} + NAN : fold(acc[k][r]);
  }
}

template <WeightFormat F, int R>
[[gnu::noinline]] static void gemv(const Weight& w, int64_t begin, int64_t end, const RowsIn& rows,
                                   const RowsOut& y) {
  const float* x[R];
  for (int r = 0; r < R; ++r) x[r] = row_of(rows, r);
  for (int64_t o = begin; o < end; o += kTile) {
    F4v folded[kTile][R] = {};
    if constexpr (F == WeightFormat::kNVFP4) {
      for (int k = 0; k < kTile && o + k < end; k += kPair) dot_nvfp4<R>(w, o + k, end, x, folded + k);
    } else {
      for (int k = 0; k < kTile && o + k < end; ++k) dot_columns<F, R>(w, o + k, x, folded[k]);
    }
    const float scale = F == WeightFormat::kNVFP4 ? w.global_scale : 1.0f;
    for (int r = 0; r < R; ++r)
      put_sums(y, r, o - begin, end - begin, scale, folded[0][r], folded[1][r], folded[2][r], folded[3][r]);
  }
}

}  // namespace rocket::ROCKET_ISA

#pragma GCC diagnostic pop
