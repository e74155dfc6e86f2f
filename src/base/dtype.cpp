#include "base/dtype.h"

#include <array>
#include <cmath>

namespace rocket {
namespace {

struct Entry {
  DType dtype;
  const char* name;
  size_t size;
};

constexpr std::array<Entry, 16> kEntries{{
    {DType::kBool, "BOOL", 1},
    {DType::kU8, "U8", 1},
    {DType::kI8, "I8", 1},
    {DType::kF8E4M3, "F8_E4M3", 1},
    {DType::kF8E5M2, "F8_E5M2", 1},
    {DType::kF8E8M0, "F8_E8M0", 1},
    {DType::kI16, "I16", 2},
    {DType::kU16, "U16", 2},
    {DType::kF16, "F16", 2},
    {DType::kBF16, "BF16", 2},
    {DType::kI32, "I32", 4},
    {DType::kU32, "U32", 4},
    {DType::kF32, "F32", 4},
    {DType::kF64, "F64", 8},
    {DType::kI64, "I64", 8},
    {DType::kU64, "U64", 8},
}};

}  // namespace

size_t dtype_size(DType dtype) {
  return kEntries[static_cast<size_t>(dtype)].size;
}

const char* dtype_name(DType dtype) {
  return kEntries[static_cast<size_t>(dtype)].name;
}

std::optional<DType> dtype_parse(std::string_view name) {
  for (const Entry& entry : kEntries) {
    if (name == entry.name) return entry.dtype;
  }
  return std::nullopt;
}

float f16_to_f32(uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1f;
  const int mantissa = bits & 0x3ff;
  const float sign = (bits & 0x8000) ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(mantissa | 0x400), exponent - 25);
}

}  // namespace rocket
