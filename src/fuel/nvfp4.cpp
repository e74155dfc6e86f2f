#include "fuel/nvfp4.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "base/dtype.h"
#include "base/error.h"

namespace rocket {

namespace {

constexpr int64_t kBlock = 16;
constexpr float kLargestE2m1 = 6.0f;
constexpr float kLargestE4m3 = 448.0f;

constexpr std::array<float, 8> kE2m1 = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

std::array<float, 256> make_e4m3() {
  std::array<float, 256> table{};
  for (int byte = 0; byte < 256; ++byte) {
    const int exponent = (byte >> 3) & 15, mantissa = byte & 7;
    const float sign = byte & 0x80 ? -1.0f : 1.0f;
    float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                    : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    if ((byte & 0x7F) == 0x7F) magnitude = std::numeric_limits<float>::quiet_NaN();
    table[static_cast<size_t>(byte)] = sign * magnitude;
  }
  return table;
}

// Weights used where they lie may be unaligned.
template <typename T>
T load(const void* base, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(base) + index * static_cast<int64_t>(sizeof(T)), sizeof value);
  return value;
}

float element(const Weight& w, int64_t row, int64_t column) {
  const int64_t at = row * w.in + column;
  switch (w.format) {
    case WeightFormat::kF32:
      return load<float>(w.data, at);
    case WeightFormat::kBF16:
      return bf16_to_f32(load<uint16_t>(w.data, at));
    case WeightFormat::kNVFP4: {
      const uint8_t byte = load<uint8_t>(w.data, row * (w.in / 2) + column / 2);
      const uint8_t scale = load<uint8_t>(w.block_scale, row * (w.in / kBlock) + column / kBlock);
      return e2m1_to_f32(column % 2 == 0 ? byte : byte >> 4) * e4m3_to_f32(scale) * w.global_scale;
    }
    case WeightFormat::kFP8Block: {
      const int64_t across = (w.in + 127) / 128;
      return e4m3_to_f32(load<uint8_t>(w.data, at)) *
             load<float>(w.block_scale, row / 128 * across + column / 128);
    }
    case WeightFormat::kMXFP8: {
      const uint8_t scale = load<uint8_t>(w.block_scale, row * (w.in / 32) + column / 32);
      return e4m3_to_f32(load<uint8_t>(w.data, at)) * e8m0_to_f32(scale);
    }
  }
  return 0;
}

}  // namespace

float e2m1_to_f32(uint8_t nibble) {
  const float magnitude = kE2m1[nibble & 7];
  return nibble & 8 ? -magnitude : magnitude;
}

float e4m3_to_f32(uint8_t byte) {
  static const std::array<float, 256> table = make_e4m3();
  return table[byte];
}

float e8m0_to_f32(uint8_t byte) {
  return byte == 0xFF ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, byte - 127);
}

uint8_t f32_to_e2m1(float value) {
  const uint8_t sign = std::signbit(value) ? 8 : 0;
  const float magnitude = std::fabs(value);
  // The borders lie midway between neighbours and go to the even code.
  uint8_t code = 0;
  for (uint8_t next = 1; next < 8; ++next) {
    const float border = (kE2m1[next - 1u] + kE2m1[next]) / 2;
    if (magnitude > border || (magnitude == border && next % 2 == 0)) code = next;
  }
  return sign | code;
}

uint8_t f32_to_e4m3(float value) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7F;
  if (magnitude >= kLargestE4m3) return sign | 0x7E;
  constexpr float kSmallestNormal = 0.015625f;  // below it the spacing stays
  const int exponent = magnitude < kSmallestNormal ? -6 : std::ilogb(magnitude);
  // 8 … 16 steps; 0 … 8 of a subnormal. The carry at 16 (or 8) is the next exponent.
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  return static_cast<uint8_t>(sign | std::min(((exponent + 6) << 3) + steps, 0x7E));
}

void dequantise_rows(const Weight& weight, int64_t first, int64_t rows, float* out) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < weight.in; ++column)
      out[row * weight.in + column] = element(weight, first + row, column);
  }
}

Weight Nvfp4Tensor::weight(int64_t out, int64_t in) const {
  Weight weight;
  weight.format = WeightFormat::kNVFP4;
  weight.out = out;
  weight.in = in;
  weight.data = packed.data();
  weight.block_scale = scale.data();
  weight.global_scale = global;
  return weight;
}

Nvfp4Tensor quantise_nvfp4(const float* w, int64_t out, int64_t in) {
  if (in % kBlock != 0) {
    throw InputError("quantise_nvfp4: expected columns in blocks of 16, found " + std::to_string(in));
  }
  float largest = 0;
  for (int64_t i = 0; i < out * in; ++i) {
    if (!std::isfinite(w[i]))
      throw InputError("quantise_nvfp4: element " + std::to_string(i) + " is not finite");
    largest = std::max(largest, std::fabs(w[i]));
  }
  Nvfp4Tensor tensor;
  tensor.packed.resize(static_cast<size_t>(out * in / 2));
  tensor.scale.resize(static_cast<size_t>(out * in / kBlock));
  tensor.global = largest / (kLargestE2m1 * kLargestE4m3);
  if (tensor.global == 0.0f) return tensor;
  for (size_t block = 0; block < tensor.scale.size(); ++block) {
    const float* const values = w + block * kBlock;
    float peak = 0;
    for (int64_t i = 0; i < kBlock; ++i) peak = std::max(peak, std::fabs(values[i]));
    tensor.scale[block] = f32_to_e4m3(peak / kLargestE2m1 / tensor.global);
    const float step = e4m3_to_f32(tensor.scale[block]) * tensor.global;
    if (step == 0.0f) continue;  // a block that is nothing beside the largest value
    for (int64_t i = 0; i < kBlock; ++i) {
      const uint8_t code = f32_to_e2m1(values[i] / step);
      tensor.packed[block * kBlock / 2 + static_cast<size_t>(i / 2)] |=
          static_cast<uint8_t>(i % 2 == 0 ? code : code << 4);
    }
  }
  return tensor;
}

}  // namespace rocket
