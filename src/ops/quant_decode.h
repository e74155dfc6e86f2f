// Stored weights to float, sixteen at a time.
#pragma once

#include "ops/vec.h"
#include "ops/weight.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

namespace rocket::ROCKET_ISA {

ROCKET_INLINE F16v as_float(U16v bits) {
  F16v v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

ROCKET_INLINE float as_float(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

// E4M3: sign, four exponent bits (bias 7), three mantissa bits, no infinity; 0x7F and 0xFF are NaN. Shifted into a
// float32's fields the value is 2^-120 times what it should be, subnormals included.
ROCKET_INLINE float e4m3(uint8_t code) {
  if ((code & 0x7f) == 0x7f) return NAN;
  const uint32_t bits = (static_cast<uint32_t>(code & 0x80) << 24) | (static_cast<uint32_t>(code & 0x7f) << 20);
  return as_float(bits) * 0x1p120f;
}

typedef uint8_t B16v __attribute__((vector_size(16)));

ROCKET_INLINE F16v e4m3(B16v code) {
  const U16v wide = __builtin_convertvector(code, U16v);
  const U16v magnitude = wide & 0x7f;
  const F16v value = as_float(((wide & 0x80) << 24) | (magnitude << 20)) * 0x1p120f;
  return magnitude == 0x7f ? splat(NAN) : value;
}

// E8M0: 2^(code - 127); 255 is NaN.
ROCKET_INLINE float e8m0(uint8_t code) {
  if (code == 255) return NAN;
  return code == 0 ? 0x1p-127f : as_float(static_cast<uint32_t>(code) << 23);
}

// E2M1: sign, two exponent bits (bias 1), one mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6. Only the low four bits of a
// lane count.
ROCKET_INLINE F16v e2m1(U16v code) {
  return as_float(((code & 8) << 28) | ((code & 7) << 22)) * 0x1p126f;
}

}  // namespace rocket::ROCKET_ISA

#pragma GCC diagnostic pop
