// Weights in every stored format for tests, with their exact values in double precision beside them. The
// tables here are written from the formats' definitions, not from the code under test.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "check.h"
#include "ops/weight.h"

namespace check {

inline constexpr rocket::WeightFormat kFormats[] = {
    rocket::WeightFormat::kF32, rocket::WeightFormat::kBF16, rocket::WeightFormat::kNVFP4,
    rocket::WeightFormat::kFP8Block, rocket::WeightFormat::kMXFP8};

inline const char* format_name(rocket::WeightFormat format) {
  switch (format) {
    case rocket::WeightFormat::kF32:
      return "F32";
    case rocket::WeightFormat::kBF16:
      return "BF16";
    case rocket::WeightFormat::kNVFP4:
      return "NVFP4";
    case rocket::WeightFormat::kFP8Block:
      return "FP8 block";
    case rocket::WeightFormat::kMXFP8:
      return "MXFP8";
  }
  return "?";
}

// Columns come in whole blocks of this many.
inline int64_t block_columns(rocket::WeightFormat format) {
  if (format == rocket::WeightFormat::kNVFP4) return 16;
  return format == rocket::WeightFormat::kMXFP8 ? 32 : 1;
}

inline double e2m1_value(int code) {
  static constexpr double kValues[16] = {0.0,  0.5,  1.0,  1.5,  2.0,  3.0,  4.0,  6.0,
                                         -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0};
  return kValues[code];
}

// The "fn" variant of E4M3: no infinities, NaN only where all exponent and mantissa bits are set.
inline double e4m3_value(int code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  const double sign = code & 0x80 ? -1.0 : 1.0;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(mantissa / 8.0, -6);
  return sign * std::ldexp(1.0 + mantissa / 8.0, exponent - 7);
}

inline double e8m0_value(int code) {
  return code == 255 ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, code - 127);
}

// Owns a weight's bytes. They start one byte past an aligned address, as tensors in a mapped file may.
struct StoredWeight {
  rocket::Weight w;
  std::vector<uint8_t> data, scale;
  std::vector<double> value;  // [out, in], without NVFP4's global scale rounded in: exact

  StoredWeight() = default;
  StoredWeight(StoredWeight&&) = default;
  StoredWeight& operator=(StoredWeight&&) = default;

  uint8_t* bytes() { return data.data() + 1; }
  uint8_t* scales() { return scale.data() + 1; }

  // Room for a weight; everything zero.
  StoredWeight(rocket::WeightFormat format, int64_t out, int64_t in) {
    using rocket::WeightFormat;
    w.format = format;
    w.out = out;
    w.in = in;
    int64_t bytes = out * in, scales = 0;
    if (format == WeightFormat::kF32) bytes = out * in * 4;
    if (format == WeightFormat::kBF16) bytes = out * in * 2;
    if (format == WeightFormat::kNVFP4) bytes = out * in / 2, scales = out * in / 16;
    if (format == WeightFormat::kFP8Block) scales = (out + 127) / 128 * ((in + 127) / 128) * 4;
    if (format == WeightFormat::kMXFP8) scales = out * in / 32;
    data.assign(bytes + 1, 0);
    scale.assign(scales + 1, 0);
    w.data = this->bytes();
    w.block_scale = scales ? this->scales() : nullptr;
  }

  // Computes `value` from the bytes.
  void decode() {
    using rocket::WeightFormat;
    value.resize(w.out * w.in);
    for (int64_t o = 0; o < w.out; ++o) {
      for (int64_t i = 0; i < w.in; ++i) value[o * w.in + i] = element(o, i);
    }
  }

 private:
  double element(int64_t o, int64_t i) {
    using rocket::WeightFormat;
    const int64_t at = o * w.in + i;
    switch (w.format) {
      case WeightFormat::kF32: {
        float v;
        std::memcpy(&v, bytes() + at * 4, 4);
        return v;
      }
      case WeightFormat::kBF16: {
        uint16_t v;
        std::memcpy(&v, bytes() + at * 2, 2);
        return rocket::bf16_to_f32(v);
      }
      case WeightFormat::kNVFP4: {
        const int byte = bytes()[at / 2];
        return e2m1_value(i % 2 ? byte >> 4 : byte & 15) * e4m3_value(scales()[at / 16]) * w.global_scale;
      }
      case WeightFormat::kFP8Block: {
        float s;
        std::memcpy(&s, scales() + (o / 128 * ((w.in + 127) / 128) + i / 128) * 4, 4);
        return e4m3_value(bytes()[at]) * s;
      }
      case WeightFormat::kMXFP8:
        return e4m3_value(bytes()[at]) * e8m0_value(scales()[at / 32]);
    }
    return 0;
  }
};

// Random finite values of magnitude about `size`.
inline StoredWeight random_weight(rocket::WeightFormat format, int64_t out, int64_t in, double size = 1.0) {
  using rocket::WeightFormat;
  StoredWeight s(format, out, in);
  const int64_t n = out * in;
  if (format == WeightFormat::kF32) {
    const std::vector<float> v = normal(n, size);
    std::memcpy(s.bytes(), v.data(), n * 4);
  } else if (format == WeightFormat::kBF16) {
    const std::vector<uint16_t> v = normal_bf16(n, size);
    std::memcpy(s.bytes(), v.data(), n * 2);
  } else {
    std::uniform_int_distribution<int> any(0, 255);
    const bool fp8 = format != WeightFormat::kNVFP4;
    for (size_t i = 1; i < s.data.size(); ++i) {
      // E4M3 values up to 3.75: the few huge ones would hide errors in all the others.
      int code = any(rng());
      if (fp8) code = (code & 0x80) | ((code & 0x7f) % 0x47);
      s.data[i] = static_cast<uint8_t>(code);
    }
    const int64_t scales = static_cast<int64_t>(s.scale.size()) - 1;
    if (format == WeightFormat::kFP8Block) {
      const std::vector<float> v = normal(scales / 4, size);
      std::memcpy(s.scales(), v.data(), scales);
    } else if (format == WeightFormat::kMXFP8) {
      for (int64_t i = 0; i < scales; ++i) s.scales()[i] = static_cast<uint8_t>(uniform_int(124, 129));
    } else {
      for (int64_t i = 0; i < scales; ++i)
        s.scales()[i] = static_cast<uint8_t>(uniform_int(0, 0x48) | uniform_int(0, 1) << 7);
      s.w.global_scale = static_cast<float>(0.37 * size);
    }
  }
  s.decode();
  return s;
}

// y[r][o] = sum_i x[r][i] * value[o][i], in double precision.
inline std::vector<double> product(const StoredWeight& s, const float* x, int64_t ldx, int64_t rows) {
  std::vector<double> y(rows * s.w.out);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < s.w.out; ++o) {
      double sum = 0;
      for (int64_t i = 0; i < s.w.in; ++i)
        sum += static_cast<double>(x[r * ldx + i]) * s.value[o * s.w.in + i];
      y[r * s.w.out + o] = sum;
    }
  }
  return y;
}

// max|error| / max|result| of a float32 sum of n products of random sign in some lanes. Each addition rounds
// by up to 2^-24 of the partial sum, evenly spread: a variance of 2^-48 / 3 * k after k products of size 1.
// Over n / lanes additions in each lane that makes 2^-48 * n^2 / (6 * lanes), against a result of size
// sqrt(n). Five standard deviations cover the worst of some ten thousand results; three units go to rounding
// the weight, the product and the result.
inline double sum_limit(int64_t n, int lanes = 16) {
  return std::ldexp(1.0, -24) * (3.0 + 5.0 * std::sqrt(static_cast<double>(n) / (6.0 * lanes)));
}

}  // namespace check
