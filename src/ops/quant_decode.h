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

// E4M3: sign, four exponent bits (bias 7), three mantissa bits, no infinity. Shifted into a float32's fields
// a code is 2^-120 times its value, subnormals included; this gives that. 0x7F and 0xFF are NaN: see
// LargestCode.
ROCKET_INLINE Fn e4m3_small(Bn code) {
  return nfloat((reinterpret_cast<Un>(widen_signed(code)) << 20) & 0x87f00000u);
}

// The largest magnitude among E4M3 codes. A NaN among the codes of a row makes every sum over the row NaN, so
// it is enough to know of it at the end.
struct LargestCode {
  B16v top = {};

  ROCKET_INLINE void see(LargestCode& t, B16v code) {
    const B16v magnitude = code & 0x7f;
    t.top = magnitude > t.top ? magnitude : t.top;
  }
  ROCKET_INLINE void see_some(LargestCode& t, const void* code, int64_t n) {
    B16v some = {};
    std::memcpy(&some, code, n);
    see(t, some);
  }
  ROCKET_INLINE bool nan(const LargestCode& t) {
    uint64_t half[2];
    std::memcpy(half, &t.top, sizeof half);
    // A byte of at most 0x7F carries into its top bit exactly if it is 0x7F.
    return ((half[0] + 0x0101010101010101u) | (half[1] + 0x0101010101010101u)) & 0x8080808080808080u;
  }
};

// E8M0: 2^(code - 127); 255 is NaN.
ROCKET_INLINE float e8m0(uint8_t code) {
  if (code == 255) return NAN;
  return code == 0 ? 0x1p-127f : as_float(static_cast<uint32_t>(code) << 23);
}

// A scale as what e4m3_small() is multiplied with: first, then second. One factor does unless it overflows;
// both ways round once, to the same value.
struct CodeScale {
  float first, second;
  bool both;
};

ROCKET_INLINE CodeScale code_scale(float scale) {
  const float whole = scale * 0x1p120f;
  if (whole - whole == 0) return {whole, 1.0f, false};
  return {0x1p120f, scale, true};
}

// The formats whose lanes are the columns themselves. load() gives kNative columns: their values, or with
// kCodes what scale() turns into values.
template <WeightFormat F>
struct Columns;

template <>
struct Columns<WeightFormat::kF32> {
  static constexpr int kBytes = 4;
  static constexpr int64_t kBlock = kSegment;  // columns under one scale
  static constexpr bool kCodes = false;        // E4M3 codes with a scale
  ROCKET_INLINE Fn load(const char* p) { return load_as<Fn>(p); }
  ROCKET_INLINE CodeScale scale(const Weight&, int64_t, int64_t) { return {}; }
};

template <>
struct Columns<WeightFormat::kBF16> {
  static constexpr int kBytes = 2;
  static constexpr int64_t kBlock = kSegment;
  static constexpr bool kCodes = false;
  ROCKET_INLINE Fn load(const char* p) { return nfloat(widen(load_as<Hn>(p)) << 16); }
  ROCKET_INLINE CodeScale scale(const Weight&, int64_t, int64_t) { return {}; }
};

template <>
struct Columns<WeightFormat::kFP8Block> {
  static constexpr int kBytes = 1;
  static constexpr int64_t kBlock = 128;
  static constexpr bool kCodes = true;
  ROCKET_INLINE Fn load(const char* p) { return e4m3_small(load_as<Bn>(p)); }
  ROCKET_INLINE CodeScale scale(const Weight& w, int64_t o, int64_t column) {
    return code_scale(load_as<float>(static_cast<const char*>(w.block_scale) +
                                     (o / 128 * ((w.in + 127) / 128) + column / 128) * 4));
  }
};

template <>
struct Columns<WeightFormat::kMXFP8> {
  static constexpr int kBytes = 1;
  static constexpr int64_t kBlock = 32;
  static constexpr bool kCodes = true;
  ROCKET_INLINE Fn load(const char* p) { return e4m3_small(load_as<Bn>(p)); }
  ROCKET_INLINE CodeScale scale(const Weight& w, int64_t o, int64_t column) {
    return code_scale(e8m0(static_cast<const uint8_t*>(w.block_scale)[(o * w.in + column) / 32]));
  }
};

// Sixteen columns of a row's tail as floats: n < 16 of them, then zeros.
template <WeightFormat F>
ROCKET_INLINE void decode_tail(const Weight& w, int64_t o, int64_t column, int n, float* out) {
  typedef Columns<F> C;
  alignas(64) char bytes[kLanes * C::kBytes] = {};
  std::memcpy(bytes, static_cast<const char*>(w.data) + (o * w.in + column) * C::kBytes, n * C::kBytes);
  const CodeScale scale = C::scale(w, o, column);
  LargestCode top;
  if (C::kCodes) LargestCode::see_some(top, bytes, kLanes);
  for (int p = 0; p < kParts; ++p) {
    Fn v = C::load(bytes + p * kNative * C::kBytes);
    if (C::kCodes) v = v * nsplat(scale.first) * nsplat(scale.second);
    nstore(out + p * kNative, v);
  }
  if (C::kCodes && LargestCode::nan(top)) out[0] = NAN;
}

// Writes the sums of outputs o … o + 3 (counted from where y begins, those from `count` on dropped) times
// `scale`.
ROCKET_INLINE void put_sums(const RowsOut& y, int64_t r, int64_t o, int64_t count, float scale, F4v sums) {
  sums *= scale;
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
