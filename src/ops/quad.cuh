// Four neighbouring floats as what a thread works on: one 16-byte access where rows are aligned, else single floats.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace rocket {

// Whether quads of rows that start at p, `ld` floats apart, can be read and written as 16 bytes.
inline bool quads_aligned(const void* p, int64_t ld) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0 && ld % 4 == 0;
}

// `left`: floats from p to the end of its row; those behind it are zero, and not stored. With kVector rows are whole
// quads.
template <bool kVector>
__device__ __forceinline__ float4 load_quad(const float* p, int64_t left) {
  float4 v = make_float4(0, 0, 0, 0);
  if constexpr (kVector) {
    if (left > 0) v = *reinterpret_cast<const float4*>(p);
  } else {
    if (left > 0) v.x = p[0];
    if (left > 1) v.y = p[1];
    if (left > 2) v.z = p[2];
    if (left > 3) v.w = p[3];
  }
  return v;
}

template <bool kVector>
__device__ __forceinline__ void store_quad(float* p, float4 v, int64_t left) {
  if constexpr (kVector) {
    if (left > 0) *reinterpret_cast<float4*>(p) = v;
  } else {
    if (left > 0) p[0] = v.x;
    if (left > 1) p[1] = v.y;
    if (left > 2) p[2] = v.z;
    if (left > 3) p[3] = v.w;
  }
}

__device__ __forceinline__ float4 scaled(float f, float4 v) {
  return make_float4(f * v.x, f * v.y, f * v.z, f * v.w);
}

// s + f * v
__device__ __forceinline__ float4 plus_scaled(float4 s, float f, float4 v) {
  return make_float4(fmaf(f, v.x, s.x), fmaf(f, v.y, s.y), fmaf(f, v.z, s.z), fmaf(f, v.w, s.w));
}

// s + a . b
__device__ __forceinline__ float plus_dot(float s, float4 a, float4 b) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, s))));
}

// Elements of stored float32 or bfloat16 that may lie at any address.
template <bool kBf16>
__device__ __forceinline__ float load_stored(const unsigned char* base, int64_t i) {
  if constexpr (kBf16) {
    const unsigned char* p = base + 2 * i;
    return __uint_as_float(static_cast<uint32_t>(p[0]) << 16 | static_cast<uint32_t>(p[1]) << 24);
  } else {
    const unsigned char* p = base + 4 * i;
    return __uint_as_float(static_cast<uint32_t>(p[0]) | static_cast<uint32_t>(p[1]) << 8 |
                           static_cast<uint32_t>(p[2]) << 16 | static_cast<uint32_t>(p[3]) << 24);
  }
}

// Four of them; with kVector the first lies on a multiple of their size together.
template <bool kBf16, bool kVector>
__device__ __forceinline__ float4 load_stored_quad(const unsigned char* base, int64_t i, int64_t left) {
  float4 v = make_float4(0, 0, 0, 0);
  if constexpr (kVector && kBf16) {
    if (left <= 0) return v;
    const uint2 bits = __ldg(reinterpret_cast<const uint2*>(base + 2 * i));
    v = make_float4(__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u),
                    __uint_as_float(bits.y << 16), __uint_as_float(bits.y & 0xffff0000u));
  } else if constexpr (kVector) {
    if (left > 0) v = __ldg(reinterpret_cast<const float4*>(base + 4 * i));
  } else {
    if (left > 0) v.x = load_stored<kBf16>(base, i);
    if (left > 1) v.y = load_stored<kBf16>(base, i + 1);
    if (left > 2) v.z = load_stored<kBf16>(base, i + 2);
    if (left > 3) v.w = load_stored<kBf16>(base, i + 3);
  }
  return v;
}

}  // namespace rocket
