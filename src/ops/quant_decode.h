// Stored weights to float, one native vector at a time.
#pragma once

#include "ops/gemm.h"
#include "ops/native.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace rocket::ROCKET_ISA {

ROCKET_INLINE float as_float(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

// E4M3: sign, four exponent bits (bias 7), three mantissa bits, no infinity; 0x7F and 0xFF are NaN. Shifted
// into a float32's fields the value is 2^-120 times what it should be, subnormals included.
ROCKET_INLINE Fn e4m3(Bn code) {
  const Un wide = widen(code);
  const Un magnitude = wide & 0x7f;
  const Fn value = nfloat(((wide & 0x80) << 24) | (magnitude << 20)) * 0x1p120f;
  return magnitude == 0x7f ? nsplat(NAN) : value;
}

// E8M0: 2^(code - 127); 255 is NaN.
ROCKET_INLINE float e8m0(uint8_t code) {
  if (code == 255) return NAN;
  return code == 0 ? 0x1p-127f : as_float(static_cast<uint32_t>(code) << 23);
}

// The formats whose lanes are the columns themselves. load() gives kNative columns without the block's scale.
template <WeightFormat F>
struct Columns;

template <>
struct Columns<WeightFormat::kF32> {
  static constexpr int kBytes = 4;
  static constexpr int kBlock = 0;  // columns under one scale; 0 = no scale
  ROCKET_INLINE Fn load(const char* p) { return load_as<Fn>(p); }
  ROCKET_INLINE float scale(const Weight&, int64_t, int64_t) { return 1.0f; }
};

template <>
struct Columns<WeightFormat::kBF16> {
  static constexpr int kBytes = 2;
  static constexpr int kBlock = 0;
  ROCKET_INLINE Fn load(const char* p) { return nfloat(widen(load_as<Hn>(p)) << 16); }
  ROCKET_INLINE float scale(const Weight&, int64_t, int64_t) { return 1.0f; }
};

template <>
struct Columns<WeightFormat::kFP8Block> {
  static constexpr int kBytes = 1;
  static constexpr int kBlock = 128;
  ROCKET_INLINE Fn load(const char* p) { return e4m3(load_as<Bn>(p)); }
  ROCKET_INLINE float scale(const Weight& w, int64_t o, int64_t column) {
    return load_as<float>(static_cast<const char*>(w.block_scale) +
                          (o / 128 * ((w.in + 127) / 128) + column / 128) * 4);
  }
};

template <>
struct Columns<WeightFormat::kMXFP8> {
  static constexpr int kBytes = 1;
  static constexpr int kBlock = 32;
  ROCKET_INLINE Fn load(const char* p) { return e4m3(load_as<Bn>(p)); }
  ROCKET_INLINE float scale(const Weight& w, int64_t o, int64_t column) {
    return e8m0(static_cast<const uint8_t*>(w.block_scale)[(o * w.in + column) / 32]);
  }
};

// Adds up the folded lanes of outputs o … o + 3 (counted from where y begins, those from `count` on dropped)
// and writes them, times `scale`.
ROCKET_INLINE void put_sums(const RowsOut& y, int64_t r, int64_t o, int64_t count, float scale, F4v a, F4v b,
                            F4v c, F4v d) {
  F4v sums = finish_sums(a, b, c, d) * scale;
  const int64_t at = y.index ? y.index[r] : r;
  if (y.scale) sums *= y.scale[at];
  float* to = y.base + at * y.ld + o;
  if (o + kTile <= count) {
    if (y.bias) sums += load_as<F4v>(y.bias + o);
    std::memcpy(to, &sums, sizeof sums);
    return;
  }
  for (int k = 0; o + k < count; ++k) to[k] = sums[k] + (y.bias ? y.bias[o + k] : 0.0f);
}

}  // namespace rocket::ROCKET_ISA

#pragma GCC diagnostic pop
