// Products of float rows with stored weights, shared by linear.cpp and experts.cpp.
//
// Order of the sum over `in`: lane i of sixteen sums columns i, i+16, … with fused multiply-add, then the tree of vec.h
// sum(). Weights enter as float: NVFP4 without its global scale, which multiplies the sum.
#pragma once

#include "base/error.h"
#include "ops/quant_decode.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace rocket::ROCKET_ISA {

constexpr int64_t kChunk = 1024;  // columns decoded at a time; a multiple of 128

ROCKET_INLINE int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }

// Columns [begin, begin + n) of row o as floats, zero up to the next multiple of 16. begin is a multiple of 128.
ROCKET_INLINE void decode_row(const Weight& w, int64_t o, int64_t begin, int64_t n, float* out) {
  const int64_t full = n / kLanes * kLanes;
  const int rest = static_cast<int>(n - full);
  const int64_t at = o * w.in + begin;
  switch (w.format) {
    case WeightFormat::kF32: {
      const char* p = static_cast<const char*>(w.data) + at * 4;
      std::memcpy(out, p, n * 4);
      break;
    }
    case WeightFormat::kBF16: {
      const uint16_t* p = reinterpret_cast<const uint16_t*>(static_cast<const char*>(w.data) + at * 2);
      for (int64_t i = 0; i < full; i += kLanes) store(out + i, load_bf16(p + i));
      if (rest) store(out + full, load_bf16_part(p + full, rest));
      break;
    }
    case WeightFormat::kNVFP4: {
      const uint8_t* p = static_cast<const uint8_t*>(w.data) + at / 2;
      const uint8_t* s = static_cast<const uint8_t*>(w.block_scale) + at / 16;
      const U16v shift = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
      for (int64_t i = 0; i < full; i += kLanes) {
        uint32_t half[2];
        std::memcpy(half, p + i / 2, sizeof half);
        const uint32_t a = half[0], b = half[1];
        const U16v bits = {a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b};
        store(out + i, e2m1(bits >> shift) * splat(e4m3(s[i / 16])));
      }
      break;
    }
    case WeightFormat::kFP8Block: {
      const uint8_t* p = static_cast<const uint8_t*>(w.data) + at;
      const char* scales = static_cast<const char*>(w.block_scale) + (o / 128 * ((w.in + 127) / 128) + begin / 128) * 4;
      for (int64_t i = 0; i < n; i += kLanes) {
        B16v code = {};
        std::memcpy(&code, p + i, i < full ? kLanes : rest);
        float scale;
        std::memcpy(&scale, scales + i / 128 * 4, 4);
        store(out + i, e4m3(code) * splat(scale));
      }
      break;
    }
    case WeightFormat::kMXFP8: {
      const uint8_t* p = static_cast<const uint8_t*>(w.data) + at;
      const uint8_t* s = static_cast<const uint8_t*>(w.block_scale) + at / 32;
      for (int64_t i = 0; i < full; i += kLanes) {
        B16v code;
        std::memcpy(&code, p + i, kLanes);
        store(out + i, e4m3(code) * splat(e8m0(s[i / 32])));
      }
      break;
    }
  }
  if (w.format == WeightFormat::kF32) {
    for (int i = rest; rest && i < kLanes; ++i) out[full + i] = 0;
  }
}

// acc[r] += row (n floats, zero-padded) times x[r]; R rows of x.
template <int R>
ROCKET_INLINE void accumulate(const float* row, const float* x, int64_t ldx, int64_t n, F16v* acc) {
  F16v a[R];
  for (int r = 0; r < R; ++r) a[r] = acc[r];
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const F16v w = load(row + i);
    for (int r = 0; r < R; ++r) a[r] += w * load(x + r * ldx + i);
  }
  if (i < n) {
    const F16v w = load(row + i);
    for (int r = 0; r < R; ++r) a[r] += w * load_part(x + r * ldx + i, static_cast<int>(n - i));
  }
  for (int r = 0; r < R; ++r) acc[r] = a[r];
}

// out[r] = sum_i w[o][i] * x[r][i] for rows (at most 8).
ROCKET_INLINE void dot_rows(const Weight& w, int64_t o, const float* x, int64_t ldx, int rows, float* out) {
  alignas(64) float chunk[kChunk];
  F16v acc[8] = {};
  for (int64_t begin = 0; begin < w.in; begin += kChunk) {
    const int64_t n = min_i64(kChunk, w.in - begin);
    decode_row(w, o, begin, n, chunk);
    int r = 0;
    for (; r + 4 <= rows; r += 4) accumulate<4>(chunk, x + r * ldx + begin, ldx, n, acc + r);
    for (; r < rows; ++r) accumulate<1>(chunk, x + r * ldx + begin, ldx, n, acc + r);
  }
  const float scale = w.format == WeightFormat::kNVFP4 ? w.global_scale : 1.0f;
  for (int r = 0; r < rows; ++r) out[r] = sum(acc[r]) * scale;
}

// Refuses shapes that a format cannot have.
ROCKET_INLINE void check_weight(const char* op, const Weight& w) {
  if (w.out <= 0) fail_op(op, "outputs of a weight, at least", 1, w.out);
  if (w.in <= 0) fail_op(op, "inputs of a weight, at least", 1, w.in);
  if (w.format == WeightFormat::kNVFP4 && w.in % 16) fail_op(op, "remainder of an NVFP4 weight's inputs by 16", 0, w.in % 16);
  if (w.format == WeightFormat::kMXFP8 && w.in % 32) fail_op(op, "remainder of an MXFP8 weight's inputs by 32", 0, w.in % 32);
}

}  // namespace rocket::ROCKET_ISA

#pragma GCC diagnostic pop
