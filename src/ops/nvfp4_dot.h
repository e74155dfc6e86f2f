// Dot products with NVFP4 weights in integers.
//
// A block is sixteen columns. Of x it is held as x = X * 2^(e - 22) with integers |X| < 2^23, e the exponent
// of the block's largest magnitude: the error is half a unit of 2^-22 of that magnitude at most, what float32
// products of such a block lose when they are added. Twice a weight's E2M1 value is an integer v of -12 … 12,
// so the block's sum of v * X is exact in 32 bits. X is split into three signed digits of eight bits for byte
// dot products, and v + 12 stands for v because these want one side unsigned; the surplus 12 * sum(X) is
// taken off with the block's `offset`.
//
// Sixteen blocks make a group of 256 columns, a 32-bit lane each:
//   digit   [3, highest first][4][lane] four bytes: columns 0,2,4,6 then 1,3,5,7 then 8,10,12,14 then
//   9,11,13,15 offset  [lane] int32 scale   [lane] float: 2^(e - 23), half because v is doubled; NaN if the
//   block has a value that is not finite
// Missing blocks of the last group are zero in all of these, so what their lanes find in the weight does not
// count.
#pragma once

#include "ops/gemm.h"
#include "ops/quant_decode.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace rocket::ROCKET_ISA {

constexpr int64_t kGroup = 256;
constexpr int64_t kGroupFloats = 224;
constexpr int64_t kOffsetAt = 768, kScaleAt = 832;  // bytes into a group of x

// Two bytes of data hold columns 2i, 2i + 1, … of a block; E2M1 code to 2 * value + 12.
ROCKET_INLINE Wn shifted_values(Wn packed, int high) {
#if defined(__AVX512F__)
  alignas(64) static constexpr uint8_t kTable[64] = {
      12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9,  8,  6,  4,  0,  12, 13, 14, 15, 16, 18,
      20, 24, 12, 11, 10, 9,  8,  6,  4,  0,  12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9,
      8,  6,  4,  0,  12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9,  8,  6,  4,  0};
  // The instruction looks at six bits of an index; the table repeats, so the two above the code do not
  // matter.
  const __m512i index = reinterpret_cast<__m512i>(packed);
  return reinterpret_cast<Wn>(_mm512_maskz_permutexvar_epi8(~0ull, high ? _mm512_srli_epi16(index, 4) : index,
                                                            _mm512_load_si512(kTable)));
#elif defined(__AVX2__)
  const __m256i table = _mm256_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0, 12, 13,
                                         14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  const __m256i index = reinterpret_cast<__m256i>(packed);
  return reinterpret_cast<Wn>(_mm256_shuffle_epi8(
      table, _mm256_and_si256(high ? _mm256_srli_epi16(index, 4) : index, _mm256_set1_epi8(15))));
#elif defined(__ARM_NEON) && defined(__aarch64__)
  static constexpr uint8_t kTable[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  const Wn index = (high ? packed >> 4 : packed) & 15;
  return reinterpret_cast<Wn>(vqtbl1q_u8(vld1q_u8(kTable), reinterpret_cast<uint8x16_t>(index)));
#else
  const Wn code = (high ? packed >> 4 : packed) & 15, m = code & 7;
  const Wn value = m + (m > 4 ? m - 4 : Wn{}) + (m > 6 ? Wn{} + 2 : Wn{});
  return code > 7 ? 12 - value : 12 + value;
#endif
}

// The four bytes vectors of part p of a group's lanes, 128 bytes of data.
ROCKET_INLINE void load_values(const uint8_t* data, int p, Wn* value) {
  const Un a = in_register(load_as<Un>(data + p * kNative * 8));
  const Un b = in_register(load_as<Un>(data + p * kNative * 8 + sizeof a));
#if defined(__AVX512F__)
  const Un first = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const Un second = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__AVX2__)
  const Un first = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14),
           second = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
  const Un first = __builtin_shufflevector(a, b, 0, 2, 4, 6),
           second = __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
  value[0] = shifted_values(reinterpret_cast<Wn>(first), 0);
  value[1] = shifted_values(reinterpret_cast<Wn>(first), 1);
  value[2] = shifted_values(reinterpret_cast<Wn>(second), 0);
  value[3] = shifted_values(reinterpret_cast<Wn>(second), 1);
}

ROCKET_INLINE Wn digits(const uint8_t* group, int digit, int q, int p) {
  return load_as<Wn>(group + (digit * 4 + q) * 64 + p * static_cast<int>(sizeof(Wn)));
}

#if defined(__AVX512F__)
ROCKET_INLINE In dot_bytes(In sum, Wn value, Wn digit) {
  return reinterpret_cast<In>(_mm512_dpbusd_epi32(
      reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(value), reinterpret_cast<__m512i>(digit)));
}
#else

// Sum of one digit's products over a block, lane by lane.
ROCKET_INLINE In digit_sum(const Wn* value, const uint8_t* group, int digit, int p) {
#if defined(__AVX2__)
  // Sixteen-bit sums of pairs are at most 2 * 24 * 128, and four of them still fit.
  __m256i sum = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(value[0]),
                                     reinterpret_cast<__m256i>(digits(group, digit, 0, p)));
#pragma GCC unroll 4
  for (int q = 1; q < 4; ++q) {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(reinterpret_cast<__m256i>(value[q]),
                                                     reinterpret_cast<__m256i>(digits(group, digit, q, p))));
  }
  return reinterpret_cast<In>(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
#elif defined(__ARM_FEATURE_DOTPROD)
  int32x4_t sum = vdupq_n_s32(0);
  for (int q = 0; q < 4; ++q) {
    sum = vdotq_s32(sum, reinterpret_cast<int8x16_t>(value[q]),
                    reinterpret_cast<int8x16_t>(digits(group, digit, q, p)));
  }
  return reinterpret_cast<In>(sum);
#else
  typedef int16_t S8v __attribute__((vector_size(16)));
  typedef uint16_t H8v __attribute__((vector_size(16)));
  S8v sum = {};
  for (int q = 0; q < 4; ++q) {
    const H8v v = reinterpret_cast<H8v>(value[q]), d = reinterpret_cast<H8v>(digits(group, digit, q, p));
    sum += reinterpret_cast<S8v>(v & 255) * (reinterpret_cast<S8v>(d << 8) >> 8) +
           reinterpret_cast<S8v>(v >> 8) * (reinterpret_cast<S8v>(d) >> 8);
  }
  const In pairs = reinterpret_cast<In>(sum);
  return (reinterpret_cast<In>(reinterpret_cast<Un>(pairs) << 16) >> 16) + (pairs >> 16);
#endif
}
#endif

// The block sums of part p of a group as floats, v * X for each lane, for O outputs.
template <int O>
ROCKET_INLINE void block_sums(const Wn (*value)[4], const uint8_t* group, int p, Fn* sums) {
  const Un offset = load_as<Un>(group + kOffsetAt + p * sizeof(Un));
#if defined(__AVX512F__)
  In high[O], middle[O], low[O];
#pragma GCC unroll 4
  for (int k = 0; k < O; ++k) {
    high[k] = middle[k] = In{};
    low[k] = reinterpret_cast<In>(offset);
  }
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    const Wn d0 = in_register(digits(group, 0, q, p)), d1 = in_register(digits(group, 1, q, p));
    const Wn d2 = in_register(digits(group, 2, q, p));
#pragma GCC unroll 4
    for (int k = 0; k < O; ++k) {
      high[k] = dot_bytes(high[k], value[k][q], d0);
      middle[k] = dot_bytes(middle[k], value[k][q], d1);
      low[k] = dot_bytes(low[k], value[k][q], d2);
    }
  }
#pragma GCC unroll 4
  for (int k = 0; k < O; ++k) {
    const Un upper = reinterpret_cast<Un>(middle[k]) + (reinterpret_cast<Un>(high[k]) << 8);
    sums[k] = __builtin_convertvector(reinterpret_cast<In>(reinterpret_cast<Un>(low[k]) + (upper << 8)), Fn);
  }
#else
  for (int k = 0; k < O; ++k) {
    const Un high = reinterpret_cast<Un>(digit_sum(value[k], group, 0, p));
    const Un middle = reinterpret_cast<Un>(digit_sum(value[k], group, 1, p));
    const Un low = reinterpret_cast<Un>(digit_sum(value[k], group, 2, p));
    sums[k] =
        __builtin_convertvector(reinterpret_cast<In>((low + offset) + ((middle + (high << 8)) << 8)), Fn);
  }
#endif
}

// E4M3 scales of part p of a group without their NaN.
ROCKET_INLINE Fn block_scales(const uint8_t* scale, int p) {
  return e4m3_small(load_as<Bn>(scale + p * kNative)) * 0x1p120f;
}

ROCKET_INLINE Fn group_scales(const uint8_t* group, int p) {
  return load_as<Fn>(group + kScaleAt + p * sizeof(Fn));
}

// Data and scales of a group of a row. Where a whole group would pass the end of the weight, they are copied
// to `spare`.
struct GroupBytes {
  const uint8_t* data;
  const uint8_t* scale;
};

// From byte 16 - n on: n bytes of ones, then zeros.
alignas(16) constexpr uint8_t kBlockMask[32] = {255, 255, 255, 255, 255, 255, 255, 255,
                                                255, 255, 255, 255, 255, 255, 255, 255};

constexpr int64_t kSpareBytes = kGroup / 2 + kGroup / 16;

ROCKET_INLINE GroupBytes group_bytes(const Weight& w, int64_t o, int64_t column, uint8_t* spare) {
  const uint8_t* data = static_cast<const uint8_t*>(w.data);
  const uint8_t* scale = static_cast<const uint8_t*>(w.block_scale);
  const int64_t at = (o * w.in + column) / 2, size = w.out * w.in / 2;
  if (at + kGroup / 2 <= size) return {data + at, scale + at / 8};
  std::memset(spare, 0, kSpareBytes);
  std::memcpy(spare, data + at, size - at);
  std::memcpy(spare + kGroup / 2, scale + at / 8, (size - at) / 8);
  return {spare, spare + kGroup / 2};
}

ROCKET_INLINE const uint8_t* group_of(const float* row, int64_t column) {
  return reinterpret_cast<const uint8_t*>(row + column / kGroup * kGroupFloats);
}

}  // namespace rocket::ROCKET_ISA

#pragma GCC diagnostic pop
