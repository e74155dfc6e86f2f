// Sixteen float lanes, written once and compiled for each instruction set (GCC/Clang vector extensions: one zmm, two
// ymm or four xmm/NEON registers). The lanes and the order of every reduction are the same everywhere, so results differ
// between instruction sets at most by fused multiply-add, which the portable x86 build lacks.
//
// Kernel files are compiled several times with different flags. Nothing that the linker could merge between them may be
// instantiated: every function here is static and always inlined, and kernel files use no std containers or algorithms.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/dtype.h"

#ifndef ROCKET_ISA
#define ROCKET_ISA portable
#endif

#define ROCKET_INLINE [[gnu::always_inline]] static inline

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace rocket::ROCKET_ISA {

constexpr int kLanes = 16;
typedef float F16v __attribute__((vector_size(64)));
typedef float F8v __attribute__((vector_size(32)));
typedef float F4v __attribute__((vector_size(16)));
typedef int32_t I16v __attribute__((vector_size(64)));
typedef uint32_t U16v __attribute__((vector_size(64)));
typedef uint16_t H16v __attribute__((vector_size(32)));

ROCKET_INLINE F16v splat(float value) { return F16v{} + value; }

ROCKET_INLINE F16v load(const float* p) {
  F16v v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

ROCKET_INLINE void store(float* p, F16v v) { std::memcpy(p, &v, sizeof v); }

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
  H16v half;
  std::memcpy(&half, p, sizeof half);
  const U16v wide = __builtin_convertvector(half, U16v) << 16;
  F16v v;
  std::memcpy(&v, &wide, sizeof v);
  return v;
}

ROCKET_INLINE F16v load_bf16_part(const uint16_t* p, int n) {
  uint16_t lanes[kLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load_bf16(lanes);
}

ROCKET_INLINE F16v max(F16v a, F16v b) { return a > b ? a : b; }
ROCKET_INLINE F16v min(F16v a, F16v b) { return a < b ? a : b; }

// Sum of the lanes as a fixed tree: lane i with i+8, then i+4, i+2, i+1.
ROCKET_INLINE float sum(F16v v) {
  F8v lo, hi;
  std::memcpy(&lo, &v, sizeof lo);
  std::memcpy(&hi, reinterpret_cast<const char*>(&v) + sizeof lo, sizeof hi);
  const F8v s8 = lo + hi;
  F4v a, b;
  std::memcpy(&a, &s8, sizeof a);
  std::memcpy(&b, reinterpret_cast<const char*>(&s8) + sizeof a, sizeof b);
  const F4v s4 = a + b;
  return (s4[0] + s4[2]) + (s4[1] + s4[3]);
}

ROCKET_INLINE float max_lane(F16v v) {
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

// exp for all lanes, relative error below 2 units in the last place on the normal range: x = n ln2 + r with |r| <= ln2/2,
// a degree-6 polynomial of r, then the exponent field. Below -87.3 it gives 0, above 88.7 infinity; a NaN stays a NaN.
ROCKET_INLINE F16v exp(F16v x) {
  const F16v clamped = min(max(x, splat(-87.33654f)), splat(88.72283f));
  const F16v shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the low bits
  const F16v n = shifted - 12582912.0f;
  F16v r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  F16v p = splat(1.3981999507e-3f);
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // 2^n in two halves, so that n = 128 does not overflow the exponent field before the multiplication.
  const I16v whole = __builtin_convertvector(n, I16v);
  const I16v half = whole >> 1;
  const I16v bits_a = (half + 127) << 23;
  const I16v bits_b = (whole - half + 127) << 23;
  F16v scale_a, scale_b;
  std::memcpy(&scale_a, &bits_a, sizeof scale_a);
  std::memcpy(&scale_b, &bits_b, sizeof scale_b);
  F16v y = p * scale_a * scale_b;
  y = x < -87.33654f ? splat(0.0f) : y;
  y = x > 88.72283f ? splat(INFINITY) : y;
  return x != x ? x : y;
}

ROCKET_INLINE F16v sigmoid(F16v x) { return 1.0f / (1.0f + exp(-x)); }
ROCKET_INLINE F16v silu(F16v x) { return x / (1.0f + exp(-x)); }

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
