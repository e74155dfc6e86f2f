// Element types of tensors on disk and in memory, with safetensors' names.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>

namespace rocket {

enum class DType : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kF64,
  kI64,
  kU64
};

size_t dtype_size(DType dtype);       // bytes an element
const char* dtype_name(DType dtype);  // "BF16", "F8_E4M3", … as safetensors spells it
std::optional<DType> dtype_parse(std::string_view name);

// BF16 is the upper half of a float32.
inline float bf16_to_f32(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Rounds to nearest, ties to even; a NaN stays a NaN.
inline uint16_t f32_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>(bits >> 16);
}

float f16_to_f32(uint16_t bits);

}  // namespace rocket
