// The widest float vector of the instruction set, for the kernels whose speed depends on registers: the
// sixteen lanes of vec.h are kParts of these. Also fused multiply-add that does not depend on what the
// compiler contracts.
#pragma once

#include "ops/vec.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace rocket::ROCKET_ISA {

#if defined(__AVX512F__)
constexpr int kNative = 16;
#elif defined(__AVX2__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif
constexpr int kParts = kLanes / kNative;

typedef float Fn __attribute__((vector_size(kNative * 4)));
typedef uint32_t Un __attribute__((vector_size(kNative * 4)));
typedef int32_t In __attribute__((vector_size(kNative * 4)));
typedef uint16_t Hn __attribute__((vector_size(kNative * 2)));
typedef uint8_t Bn __attribute__((vector_size(kNative)));

template <typename V>
ROCKET_INLINE V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

ROCKET_INLINE Fn nload(const float* p) {
  return load_as<Fn>(p);
}
ROCKET_INLINE void nstore(float* p, Fn v) {
  std::memcpy(p, &v, sizeof v);
}
ROCKET_INLINE Fn nsplat(float value) {
  return Fn{} + value;
}
ROCKET_INLINE Fn nfloat(Un bits) {
  return reinterpret_cast<Fn>(bits);
}

typedef uint8_t Wn __attribute__((vector_size(kNative * 4)));
typedef uint8_t B16v __attribute__((vector_size(16)));
typedef int32_t I4v __attribute__((vector_size(16)));

// a * b + c, rounded once where the instruction set can.
ROCKET_INLINE Fn nfma(Fn a, Fn b, Fn c) {
#if defined(__AVX512F__)
  return reinterpret_cast<Fn>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(__AVX2__)
  return reinterpret_cast<Fn>(
      _mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return reinterpret_cast<Fn>(vfmaq_f32(reinterpret_cast<float32x4_t>(c), reinterpret_cast<float32x4_t>(a),
                                        reinterpret_cast<float32x4_t>(b)));
#else
  return a * b + c;
#endif
}

// The value in a register. GCC likes to fold a load into every instruction that uses it, and where these are
// several the loads become what limits a kernel.
template <typename V>
ROCKET_INLINE V in_register(V v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#endif
  return v;
}

// Integers widened to 32 bits. GCC builds the widest conversion of vector extensions from halves, hence the
// instructions.
ROCKET_INLINE Un widen(Hn v) {
#if defined(__AVX512F__)
  return reinterpret_cast<Un>(_mm512_maskz_cvtepu16_epi32(0xffff, reinterpret_cast<__m256i>(v)));
#elif defined(__AVX2__)
  return reinterpret_cast<Un>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(v)));
#else
  return __builtin_convertvector(v, Un);
#endif
}

ROCKET_INLINE Un widen(Bn v) {
#if defined(__AVX512F__)
  return reinterpret_cast<Un>(_mm512_maskz_cvtepu8_epi32(0xffff, reinterpret_cast<__m128i>(v)));
#elif defined(__AVX2__)
  return reinterpret_cast<Un>(
      _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(load_as<uint64_t>(&v)))));
#else
  return __builtin_convertvector(v, Un);
#endif
}

ROCKET_INLINE In widen_signed(Bn v) {
#if defined(__AVX512F__)
  return reinterpret_cast<In>(_mm512_maskz_cvtepi8_epi32(0xffff, reinterpret_cast<__m128i>(v)));
#elif defined(__AVX2__)
  return reinterpret_cast<In>(
      _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(load_as<uint64_t>(&v)))));
#else
  return reinterpret_cast<In>(__builtin_convertvector(v, Un) << 24) >> 24;
#endif
}

// Rounds to the nearest integer, ties to even.
ROCKET_INLINE I4v nearest(F4v v) {
#if defined(__SSE2__)
  return reinterpret_cast<I4v>(_mm_cvtps_epi32(reinterpret_cast<__m128>(v)));
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return reinterpret_cast<I4v>(vcvtnq_s32_f32(reinterpret_cast<float32x4_t>(v)));
#else
  I4v out;
  for (int i = 0; i < 4; ++i) out[i] = static_cast<int32_t>(std::nearbyint(v[i]));
  return out;
#endif
}

// First two levels of vec.h sum(): lane i with i+8, then i+4.
ROCKET_INLINE F4v fold(const Fn* part) {
#if defined(__AVX512F__)
  const F8v s = __builtin_shufflevector(part[0], part[0], 0, 1, 2, 3, 4, 5, 6, 7) +
                __builtin_shufflevector(part[0], part[0], 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(s, s, 0, 1, 2, 3) + __builtin_shufflevector(s, s, 4, 5, 6, 7);
#elif defined(__AVX2__)
  const F8v s = part[0] + part[1];
  return __builtin_shufflevector(s, s, 0, 1, 2, 3) + __builtin_shufflevector(s, s, 4, 5, 6, 7);
#else
  return (part[0] + part[2]) + (part[1] + part[3]);
#endif
}

// The last two levels for four sums at once.
ROCKET_INLINE F4v finish_sums(F4v a, F4v b, F4v c, F4v d) {
  const F4v ab02 = __builtin_shufflevector(a, b, 0, 4, 2, 6),
            ab13 = __builtin_shufflevector(a, b, 1, 5, 3, 7);
  const F4v cd02 = __builtin_shufflevector(c, d, 0, 4, 2, 6),
            cd13 = __builtin_shufflevector(c, d, 1, 5, 3, 7);
  const F4v s0 = __builtin_shufflevector(ab02, cd02, 0, 1, 4, 5),
            s2 = __builtin_shufflevector(ab02, cd02, 2, 3, 6, 7);
  const F4v s1 = __builtin_shufflevector(ab13, cd13, 0, 1, 4, 5),
            s3 = __builtin_shufflevector(ab13, cd13, 2, 3, 6, 7);
  return (s0 + s2) + (s1 + s3);
}

}  // namespace rocket::ROCKET_ISA

#pragma GCC diagnostic pop
