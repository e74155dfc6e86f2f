// Floats as integers in the order that every selection uses: NaN smallest, -0 equal to +0.
#pragma once

#include <cstdint>
#include <cstring>

#include "ops/host_device.h"

namespace rocket {

ROCKET_HOST_DEVICE uint32_t float_key(float value) {
  if (value != value) return 0;
  value += 0.0f;  // -0 becomes +0
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

}  // namespace rocket
