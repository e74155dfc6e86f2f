// Eight neighbouring columns of a stored weight: loaded as they lie, decoded to float32 in registers.
#pragma once

#include "ops/cuda.cuh"
#include "ops/weight.h"

namespace rocket::cuda {

constexpr int kLaneColumns = 8;  // that a lane takes at once; every format's scale covers a multiple of it

// Two E4M3 codes, exactly; 0x7F and 0xFF become NaN.
__device__ __forceinline__ float2 decode_e4m3x2(uint16_t codes) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  float2 v;
  asm("{ .reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
      : "=f"(v.x), "=f"(v.y)
      : "r"(halves));
  return v;
}
__device__ __forceinline__ float decode_e4m3(uint8_t code) {
  return decode_e4m3x2(code).x;
}

// E8M0: 2^(code - 127); 255 is NaN.
__device__ __forceinline__ float decode_e8m0(uint8_t code) {
  if (code == 255) return __uint_as_float(0x7fffffffu);
  return code == 0 ? 0x1p-127f : __uint_as_float(static_cast<uint32_t>(code) << 23);
}

// E2M1 codes i and i + 4 of a word of eight, as halves of 2^-14 times their value: a half's fields take exponent and
// mantissa as they are, subnormals included.
template <int kIndex>
__device__ __forceinline__ uint32_t e2m1_pair(uint32_t word) {
  constexpr int kSign = 12 - 4 * kIndex, kRest = 9 - 4 * kIndex;
  const uint32_t rest = kRest >= 0 ? word << (kRest & 31) : word >> (-kRest & 31);
  return (rest & 0x0e000e00u) | ((word << kSign) & 0x80008000u);
}
constexpr float kE2m1Unit = 0x1p14f;

template <int kIndex>
__device__ __forceinline__ void e2m1_floats(uint32_t word, float* v) {
  asm("{ .reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
      : "=f"(v[kIndex]), "=f"(v[kIndex + 4])
      : "r"(e2m1_pair<kIndex>(word)));
}

// What lies where in a weight, for one row.
struct WeightRow {
  const char* data;      // of the weight
  const uint8_t* scale;  // block scales of the weight, may be null
  int32_t row;
  int32_t in;
};

// Lane<F, kVector>::Raw holds eight columns as stored. load() takes columns [column, column + 8) of a row, those from
// `in` on as zeros; with kVector rows are aligned for one vector load and `in` is a multiple of eight. values() gives
// what scale() is to be multiplied with.
template <WeightFormat F, bool kVector>
struct Lane;

template <int kBytes>  // of a unit that is loaded byte by byte
__device__ __forceinline__ uint32_t load_bytes(const uint8_t* p) {
  uint32_t v = 0;
#pragma unroll
  for (int i = 0; i < kBytes; ++i) v |= static_cast<uint32_t>(p[i]) << (8 * i);
  return v;
}

template <bool kVector>
struct Lane<WeightFormat::kBF16, kVector> {
  static constexpr bool kScaled = false;
  struct Raw {
    uint4 v;
  };
  static __device__ __forceinline__ Raw load(const WeightRow& w, int32_t column) {
    Raw raw{make_uint4(0, 0, 0, 0)};
    const char* p = w.data + (int64_t{w.row} * w.in + column) * 2;
    if constexpr (kVector) {
      if (column < w.in) raw.v = load_once(p);
    } else {
      uint32_t v[4] = {};
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        if (column + i < w.in)
          v[i / 2] |= load_bytes<2>(reinterpret_cast<const uint8_t*>(p) + 2 * i) << (16 * (i % 2));
      }
      raw.v = make_uint4(v[0], v[1], v[2], v[3]);
    }
    return raw;
  }
  static __device__ __forceinline__ void values(const Raw& raw, float* v) {
    v[0] = bf16_low(raw.v.x), v[1] = bf16_high(raw.v.x), v[2] = bf16_low(raw.v.y), v[3] = bf16_high(raw.v.y);
    v[4] = bf16_low(raw.v.z), v[5] = bf16_high(raw.v.z), v[6] = bf16_low(raw.v.w), v[7] = bf16_high(raw.v.w);
  }
  static __device__ __forceinline__ float scale(const Raw&) { return 1.0f; }
};

template <bool kVector>
struct Lane<WeightFormat::kF32, kVector> {
  static constexpr bool kScaled = false;
  struct Raw {
    uint4 low, high;
  };
  static __device__ __forceinline__ Raw load(const WeightRow& w, int32_t column) {
    Raw raw{make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
    const char* p = w.data + (int64_t{w.row} * w.in + column) * 4;
    if constexpr (kVector) {
      if (column < w.in) raw.low = load_once(p), raw.high = load_once(p + 16);
    } else {
      uint32_t v[kLaneColumns] = {};
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        if (column + i < w.in) v[i] = load_bytes<4>(reinterpret_cast<const uint8_t*>(p) + 4 * i);
      }
      raw.low = make_uint4(v[0], v[1], v[2], v[3]), raw.high = make_uint4(v[4], v[5], v[6], v[7]);
    }
    return raw;
  }
  static __device__ __forceinline__ void values(const Raw& raw, float* v) {
    v[0] = __uint_as_float(raw.low.x), v[1] = __uint_as_float(raw.low.y);
    v[2] = __uint_as_float(raw.low.z), v[3] = __uint_as_float(raw.low.w);
    v[4] = __uint_as_float(raw.high.x), v[5] = __uint_as_float(raw.high.y);
    v[6] = __uint_as_float(raw.high.z), v[7] = __uint_as_float(raw.high.w);
  }
  static __device__ __forceinline__ float scale(const Raw&) { return 1.0f; }
};

// `in` is a multiple of 16, so the eight columns are there or they are not.
template <bool kVector>
struct Lane<WeightFormat::kNVFP4, kVector> {
  static constexpr bool kScaled = true;
  struct Raw {
    uint32_t v;
    uint32_t scale;
  };
  static __device__ __forceinline__ Raw load(const WeightRow& w, int32_t column) {
    Raw raw{0, 0};
    if (column >= w.in) return raw;
    const int64_t at = int64_t{w.row} * w.in + column;
    if constexpr (kVector) {
      raw.v = __ldg(reinterpret_cast<const uint32_t*>(w.data + at / 2));
    } else {
      raw.v = load_bytes<4>(reinterpret_cast<const uint8_t*>(w.data + at / 2));
    }
    raw.scale = w.scale[at / 16];
    return raw;
  }
  static __device__ __forceinline__ void values(const Raw& raw, float* v) {
    // Halves i and i + 4 of the word hold codes i and i + 4: ascending columns are ascending nibbles.
    e2m1_floats<0>(raw.v, v);
    e2m1_floats<1>(raw.v, v);
    e2m1_floats<2>(raw.v, v);
    e2m1_floats<3>(raw.v, v);
  }
  static __device__ __forceinline__ float scale(const Raw& raw) {
    return decode_e4m3(static_cast<uint8_t>(raw.scale)) * kE2m1Unit;
  }
};

template <bool kVector, bool kMx>
struct LaneFp8 {
  static constexpr bool kScaled = true;
  struct Raw {
    uint2 v;
    uint32_t scale;  // E8M0, or the bits of a float32
  };
  static __device__ __forceinline__ Raw load(const WeightRow& w, int32_t column) {
    Raw raw{make_uint2(0, 0), 0};
    if (column >= w.in) return raw;
    const int64_t at = int64_t{w.row} * w.in + column;
    const uint8_t* p = reinterpret_cast<const uint8_t*>(w.data) + at;
    if constexpr (kVector) {
      raw.v = __ldg(reinterpret_cast<const uint2*>(p));
    } else {
      uint32_t v[2] = {};
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        if (column + i < w.in) v[i / 4] |= static_cast<uint32_t>(p[i]) << (8 * (i % 4));
      }
      raw.v = make_uint2(v[0], v[1]);
    }
    if constexpr (kMx) {
      raw.scale = w.scale[at / 32];
    } else {
      const int64_t block = int64_t{w.row / 128} * ((w.in + 127) / 128) + column / 128;
      if constexpr (kVector) {
        raw.scale = __ldg(reinterpret_cast<const uint32_t*>(w.scale) + block);
      } else {
        raw.scale = load_bytes<4>(w.scale + 4 * block);
      }
    }
    return raw;
  }
  static __device__ __forceinline__ void values(const Raw& raw, float* v) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = i < 2 ? raw.v.x : raw.v.y;
      const float2 two = decode_e4m3x2(static_cast<uint16_t>(i % 2 ? word >> 16 : word));
      v[2 * i] = two.x, v[2 * i + 1] = two.y;
    }
  }
  static __device__ __forceinline__ float scale(const Raw& raw) {
    return kMx ? decode_e8m0(static_cast<uint8_t>(raw.scale)) : __uint_as_float(raw.scale);
  }
};
template <bool kVector>
struct Lane<WeightFormat::kFP8Block, kVector> : LaneFp8<kVector, false> {};
template <bool kVector>
struct Lane<WeightFormat::kMXFP8, kVector> : LaneFp8<kVector, true> {};

// Whether Lane<F, true> may be used: eight columns of every row are one aligned vector.
inline bool vector_rows(const Weight& w) {
  const auto aligned = [](const void* p, uintptr_t to) { return reinterpret_cast<uintptr_t>(p) % to == 0; };
  switch (w.format) {
    case WeightFormat::kF32:
    case WeightFormat::kBF16:
      return w.in % kLaneColumns == 0 && aligned(w.data, 16);
    case WeightFormat::kNVFP4:
      return aligned(w.data, 4);
    case WeightFormat::kFP8Block:
      return w.in % kLaneColumns == 0 && aligned(w.data, 8) && aligned(w.block_scale, 4);
    case WeightFormat::kMXFP8:
      return aligned(w.data, 8);
  }
  return false;
}

}  // namespace rocket::cuda
