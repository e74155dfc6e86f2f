// Small float formats and NVFP4, for tests and tools: plain, exact, one value at a time.
//
//   E2M1  sign, 2 exponent bits (bias 1), 1 mantissa bit: ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}
//   E4M3  sign, 4 exponent bits (bias 7), 3 mantissa bits, largest 448, no infinity, 0x7F and 0xFF are NaN
//   E8M0  2^(byte - 127), 0xFF is NaN
//   NVFP4 w = e2m1 * e4m3 block scale * float32 global; two nibbles a byte, the low one is the even column
#pragma once

#include <cstdint>
#include <vector>

#include "ops/weight.h"

namespace rocket {

float e2m1_to_f32(uint8_t nibble);  // of the low four bits
float e4m3_to_f32(uint8_t byte);
float e8m0_to_f32(uint8_t byte);

// Round to nearest, ties to even; above the largest value: the largest value. A NaN becomes 0 in E2M1 (which
// has none) and NaN in E4M3. The sign of 0 is kept.
uint8_t f32_to_e2m1(float value);
uint8_t f32_to_e4m3(float value);

// Rows [first, first + rows) of a weight of any format into out [rows, in].
void dequantise_rows(const Weight& weight, int64_t first, int64_t rows, float* out);

struct Nvfp4Tensor {
  std::vector<uint8_t> packed;  // [out, in/2]
  std::vector<uint8_t> scale;   // E4M3 [out, in/16]
  float global = 0;             // a multiplier; 0 for a weight of zeros

  Weight weight(int64_t out, int64_t in) const;  // points into this
};

// global = max|w| / (6 * 448); block scale = E4M3(max|block| / 6 / global); values by round to nearest even.
// Throws InputError if `in` is not a multiple of 16 or a value is not finite.
Nvfp4Tensor quantise_nvfp4(const float* w, int64_t out, int64_t in);

}  // namespace rocket
