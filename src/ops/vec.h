// Sixteen float lanes, written once and compiled for each instruction set (GCC/Clang vector extensions: one
// zmm, two ymm or four xmm/NEON registers). The lanes and the order of every reduction are the same
// everywhere, so results differ between instruction sets at most by fused multiply-add, which the portable
// x86 build lacks.
//
// F16v has + - * / with another or with a float, unary -, +=, and v[i] for reading a lane. Choices go through
// less(), max() and min(): the ?: of vector extensions does not exist where F16v is made of several
// registers.
//
// Kernel files are compiled several times with different flags. Nothing that the linker could merge between
// them may be instantiated: every function here is static and always inlined, and kernel files use no std
// containers or algorithms.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "base/dtype.h"

#ifndef ROCKET_ISA
#define ROCKET_ISA portable
#endif

#define ROCKET_INLINE [[gnu::always_inline]] static inline

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace rocket::ROCKET_ISA {

constexpr int kLanes = 16;
typedef float F4v __attribute__((vector_size(16)));
typedef float F8v __attribute__((vector_size(32)));
typedef int32_t I4v __attribute__((vector_size(16)));
typedef int32_t I8v __attribute__((vector_size(32)));

#if defined(__AVX512F__)

typedef float F16v __attribute__((vector_size(64)));
typedef int32_t I16v __attribute__((vector_size(64)));

#else

// GCC keeps a vector that is wider than a register in memory, whatever is done with it; a struct of vectors
// it does not.
template <typename V>
struct Pair {
  V lo, hi;

  [[gnu::always_inline]] float operator[](int i) const {
    constexpr int kHalf = sizeof(V) / sizeof(float);
    return i < kHalf ? lo[i] : hi[i - kHalf];
  }
  [[gnu::always_inline]] friend Pair operator+(Pair a, Pair b) { return {a.lo + b.lo, a.hi + b.hi}; }
  [[gnu::always_inline]] friend Pair operator-(Pair a, Pair b) { return {a.lo - b.lo, a.hi - b.hi}; }
  [[gnu::always_inline]] friend Pair operator*(Pair a, Pair b) { return {a.lo * b.lo, a.hi * b.hi}; }
  [[gnu::always_inline]] friend Pair operator/(Pair a, Pair b) { return {a.lo / b.lo, a.hi / b.hi}; }
  [[gnu::always_inline]] friend Pair operator+(Pair a, float b) { return {a.lo + b, a.hi + b}; }
  [[gnu::always_inline]] friend Pair operator-(Pair a, float b) { return {a.lo - b, a.hi - b}; }
  [[gnu::always_inline]] friend Pair operator*(Pair a, float b) { return {a.lo * b, a.hi * b}; }
  [[gnu::always_inline]] friend Pair operator/(Pair a, float b) { return {a.lo / b, a.hi / b}; }
  [[gnu::always_inline]] friend Pair operator+(float a, Pair b) { return {a + b.lo, a + b.hi}; }
  [[gnu::always_inline]] friend Pair operator-(float a, Pair b) { return {a - b.lo, a - b.hi}; }
  [[gnu::always_inline]] friend Pair operator*(float a, Pair b) { return {a * b.lo, a * b.hi}; }
  [[gnu::always_inline]] friend Pair operator/(float a, Pair b) { return {a / b.lo, a / b.hi}; }
  [[gnu::always_inline]] friend Pair operator-(Pair a) { return {-a.lo, -a.hi}; }
  [[gnu::always_inline]] Pair& operator+=(Pair b) { return *this = *this + b; }
  [[gnu::always_inline]] Pair& operator-=(Pair b) { return *this = *this - b; }
  [[gnu::always_inline]] Pair& operator*=(Pair b) { return *this = *this * b; }
};

#if defined(__AVX2__)
typedef Pair<F8v> F16v;
#else
typedef Pair<Pair<F4v>> F16v;
#endif

#endif

// --- loads, stores, choices: one overload for each width of a register, pairs from their halves ---

template <typename V>
struct Width {
  ROCKET_INLINE V load(const float* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  ROCKET_INLINE void store(float* p, V v) { std::memcpy(p, &v, sizeof v); }
  ROCKET_INLINE V splat(float value) { return V{} + value; }
  ROCKET_INLINE V less(V a, V b, V x, V y) { return a < b ? x : y; }
};

#if !defined(__AVX512F__)
template <typename V>
struct Width<Pair<V>> {
  static constexpr int kHalf = sizeof(V) / sizeof(float);
  ROCKET_INLINE Pair<V> load(const float* p) { return {Width<V>::load(p), Width<V>::load(p + kHalf)}; }
  ROCKET_INLINE void store(float* p, Pair<V> v) {
    Width<V>::store(p, v.lo);
    Width<V>::store(p + kHalf, v.hi);
  }
  ROCKET_INLINE Pair<V> splat(float value) { return {Width<V>::splat(value), Width<V>::splat(value)}; }
  ROCKET_INLINE Pair<V> less(Pair<V> a, Pair<V> b, Pair<V> x, Pair<V> y) {
    return {Width<V>::less(a.lo, b.lo, x.lo, y.lo), Width<V>::less(a.hi, b.hi, x.hi, y.hi)};
  }
};
#endif

ROCKET_INLINE F16v splat(float value) {
  return Width<F16v>::splat(value);
}
ROCKET_INLINE F16v load(const float* p) {
  return Width<F16v>::load(p);
}
ROCKET_INLINE void store(float* p, F16v v) {
  Width<F16v>::store(p, v);
}

// The first n lanes (n < 16); the rest are zero.
ROCKET_INLINE F16v load_part(const float* p, int n) {
  float lanes[kLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}

ROCKET_INLINE void store_part(float* p, F16v v, int n) {
  float lanes[kLanes];
  store(lanes, v);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

// Sixteen BF16 values widened to float.
ROCKET_INLINE F16v load_bf16(const uint16_t* p) {
#if defined(__AVX512F__)
  // With a mask of ones, because GCC warns about the undefined operand of the plain forms.
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(p));
  return reinterpret_cast<F16v>(
      _mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, bits), 16));
#elif defined(__AVX2__)
  const auto half = [](const uint16_t* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from));
    return reinterpret_cast<F8v>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  };
  return {half(p), half(p + 8)};
#else
  typedef uint16_t H8v __attribute__((vector_size(16)));
  const auto half = [](const uint16_t* from) -> Pair<F4v> {
    H8v bits;
    std::memcpy(&bits, from, sizeof bits);
    // A zero below each value; on a big-endian machine it would have to go above.
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
    return {reinterpret_cast<F4v>(__builtin_shufflevector(H8v{}, bits, 0, 8, 1, 9, 2, 10, 3, 11)),
            reinterpret_cast<F4v>(__builtin_shufflevector(H8v{}, bits, 4, 12, 5, 13, 6, 14, 7, 15))};
  };
  return {half(p), half(p + 8)};
#endif
}

ROCKET_INLINE F16v load_bf16_part(const uint16_t* p, int n) {
  uint16_t lanes[kLanes] = {};
  for (int i = 0; i < n; ++i) std::memcpy(&lanes[i], reinterpret_cast<const char*>(p) + 2 * i, 2);
  return load_bf16(lanes);
}

// a < b ? x : y, lane by lane; a NaN in a or b gives y.
ROCKET_INLINE F16v less(F16v a, F16v b, F16v x, F16v y) {
  return Width<F16v>::less(a, b, x, y);
}
ROCKET_INLINE F16v max(F16v a, F16v b) {
  return less(b, a, a, b);
}
ROCKET_INLINE F16v min(F16v a, F16v b) {
  return less(a, b, a, b);
}

// Lane i with i+8, then i+4: the first half of sum().
ROCKET_INLINE F4v fold(F16v v) {
#if defined(__AVX512F__)
  const F8v s = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  const auto s = v.lo + v.hi;
#endif
#if defined(__AVX2__)
  return __builtin_shufflevector(s, s, 0, 1, 2, 3) + __builtin_shufflevector(s, s, 4, 5, 6, 7);
#else
  return s.lo + s.hi;
#endif
}

// Sum of the lanes as a fixed tree: lane i with i+8, then i+4, i+2, i+1.
ROCKET_INLINE float sum(F16v v) {
  const F4v s = fold(v);
  return (s[0] + s[2]) + (s[1] + s[3]);
}

// The sums of four vectors, each with the bits of sum().
ROCKET_INLINE F4v sum4(F16v a, F16v b, F16v c, F16v d) {
  const F4v fa = fold(a), fb = fold(b), fc = fold(c), fd = fold(d);
  const F4v ab = __builtin_shufflevector(fa, fb, 0, 1, 4, 5) + __builtin_shufflevector(fa, fb, 2, 3, 6, 7);
  const F4v cd = __builtin_shufflevector(fc, fd, 0, 1, 4, 5) + __builtin_shufflevector(fc, fd, 2, 3, 6, 7);
  return __builtin_shufflevector(ab, cd, 0, 2, 4, 6) + __builtin_shufflevector(ab, cd, 1, 3, 5, 7);
}

ROCKET_INLINE float max_lane(F16v v) {
  float lanes[kLanes];
  store(lanes, v);
  float m = lanes[0];
  for (int i = 1; i < kLanes; ++i) m = lanes[i] > m ? lanes[i] : m;
  return m;
}

// --- functions ---

// exp for all lanes, relative error below 2 units in the last place on the normal range: x = n ln2 + r with
// |r| <= ln2/2, a degree-6 polynomial of r, then the exponent field. Below -87.3 it gives 0, above 88.7
// infinity; a NaN stays a NaN.
template <typename V, typename I>
ROCKET_INLINE V exp_of(V x) {
  const V low = V{} - 87.33654f, high = V{} + 88.72283f;
  V clamped = x > low ? x : low;
  clamped = clamped < high ? clamped : high;
  const V shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the low bits
  const V n = shifted - 12582912.0f;
  V r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  V p = V{} + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // 2^n in two halves, so that n = 128 does not overflow the exponent field before the multiplication.
  const I whole = __builtin_convertvector(n, I);
  const I half = whole >> 1;
  const V scale_a = reinterpret_cast<V>((half + 127) << 23);
  const V scale_b = reinterpret_cast<V>((whole - half + 127) << 23);
  V y = p * scale_a * scale_b;
  y = x < low ? V{} : y;
  y = x > high ? V{} + INFINITY : y;
  return x != x ? x : y;
}

#if defined(__AVX512F__)
ROCKET_INLINE F16v exp(F16v x) {
  return exp_of<F16v, I16v>(x);
}
#elif defined(__AVX2__)
ROCKET_INLINE F16v exp(F16v x) {
  return {exp_of<F8v, I8v>(x.lo), exp_of<F8v, I8v>(x.hi)};
}
#else
ROCKET_INLINE Pair<F4v> exp(Pair<F4v> x) {
  return {exp_of<F4v, I4v>(x.lo), exp_of<F4v, I4v>(x.hi)};
}
ROCKET_INLINE F16v exp(F16v x) {
  return {exp(x.lo), exp(x.hi)};
}
#endif

ROCKET_INLINE F16v sigmoid(F16v x) {
  return 1.0f / (1.0f + exp(-x));
}
ROCKET_INLINE F16v silu(F16v x) {
  return x / (1.0f + exp(-x));
}

// f(0), f(16), … on full lanes, then the rest through load_part/store_part: y[i] = f(x[i]).
template <typename F>
ROCKET_INLINE void map(const float* x, float* y, int64_t n, F f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(y + i, f(load(x + i)));
  if (i < n) store_part(y + i, f(load_part(x + i, static_cast<int>(n - i))), static_cast<int>(n - i));
}

// Dot product of float rows: lane i sums elements i, i+16, …; the lanes then add as in sum().
ROCKET_INLINE float dot(const float* a, const float* b, int64_t n) {
  F16v s = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) s += load(a + i) * load(b + i);
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    s += load_part(a + i, rest) * load_part(b + i, rest);
  }
  return sum(s);
}

}  // namespace rocket::ROCKET_ISA

#pragma GCC diagnostic pop
