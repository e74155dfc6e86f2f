// The small float formats, every byte of them, and the NVFP4 codec against arithmetic done another way.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/dtype.h"
#include "base/error.h"
#include "check.h"
#include "fuel/nvfp4.h"

using namespace rocket;

namespace {

void e2m1() {
  const float expected[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                              -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  float found[16];
  for (uint8_t code = 0; code < 16; ++code) {
    found[code] = e2m1_to_f32(code);
    check::expect(f32_to_e2m1(found[code]) == code, "E2M1 code " + std::to_string(code) + " comes back");
  }
  check::same_bits("E2M1 values", found, expected, 16);
  check::expect(e2m1_to_f32(0xF3) == 1.5f, "only the low four bits count");
  // Midway goes to the even code, a hair to either side to the neighbour.
  for (uint8_t code = 0; code < 7; ++code) {
    const float middle = (expected[code] + expected[code + 1]) / 2;
    const uint8_t even = code % 2 == 0 ? code : code + 1;
    for (const float sign : {1.0f, -1.0f}) {
      const uint8_t bit = sign < 0 ? 8 : 0;
      check::expect(f32_to_e2m1(sign * middle) == (bit | even),
                    "E2M1 tie at " + std::to_string(sign * middle));
      check::expect(f32_to_e2m1(sign * std::nextafter(middle, 0.0f)) == (bit | code),
                    "E2M1 below " + std::to_string(middle));
      check::expect(f32_to_e2m1(sign * std::nextafter(middle, 9.0f)) == (bit | (code + 1)),
                    "E2M1 above " + std::to_string(middle));
    }
  }
  check::expect(f32_to_e2m1(1e30f) == 7 && f32_to_e2m1(-INFINITY) == 15, "E2M1 saturates");
  check::expect(f32_to_e2m1(NAN) % 8 == 0, "E2M1 has no NaN");
}

void e4m3() {
  // The definition, written with doubles: (-1)^s * 2^(e-7) * (1 + m/8), subnormal 2^-6 * m/8.
  float found[256], expected[256];
  for (int byte = 0; byte < 256; ++byte) {
    const int e = (byte / 8) % 16, m = byte % 8;
    double value = e == 0 ? std::pow(2.0, -6) * m / 8 : std::pow(2.0, e - 7) * (1 + m / 8.0);
    if (byte >= 128) value = -value;
    expected[byte] = static_cast<float>(value);
    found[byte] = e4m3_to_f32(static_cast<uint8_t>(byte));
  }
  check::expect(std::isnan(found[0x7F]) && std::isnan(found[0xFF]), "E4M3: 0x7F and 0xFF are NaN");
  check::same_bits("E4M3 values 00 … 7E", found, expected, 127);
  check::same_bits("E4M3 values 80 … FE", found + 128, expected + 128, 127);
  check::expect(
      found[0x7E] == 448.0f && found[0x01] == 0.001953125f && found[0x08] == 0.015625f && found[0x38] == 1.0f,
      "E4M3 landmarks");
  for (int byte = 0; byte < 0x7F; ++byte) {
    const uint8_t code = static_cast<uint8_t>(byte);
    check::expect(f32_to_e4m3(found[byte]) == code && f32_to_e4m3(-found[byte]) == (code | 0x80),
                  "E4M3 code " + std::to_string(byte) + " comes back");
    if (byte == 0x7E) break;
    const float middle = (found[byte] + found[byte + 1]) / 2;  // exact in float32
    const uint8_t even = code % 2 == 0 ? code : code + 1, next = code + 1;
    check::expect(f32_to_e4m3(middle) == even && f32_to_e4m3(-middle) == (even | 0x80),
                  "E4M3 tie above code " + std::to_string(byte));
    check::expect(f32_to_e4m3(std::nextafter(middle, 0.0f)) == code,
                  "E4M3 below the tie above code " + std::to_string(byte));
    check::expect(f32_to_e4m3(std::nextafter(middle, 999.0f)) == next,
                  "E4M3 above the tie above code " + std::to_string(byte));
  }
  check::expect(f32_to_e4m3(449.0f) == 0x7E && f32_to_e4m3(1e30f) == 0x7E && f32_to_e4m3(-INFINITY) == 0xFE,
                "E4M3 saturates");
  check::expect(std::isnan(e4m3_to_f32(f32_to_e4m3(NAN))), "E4M3 keeps a NaN");
  check::expect(f32_to_e4m3(1e-30f) == 0 && f32_to_e4m3(1e-45f) == 0, "E4M3 underflows to 0");
}

void e8m0() {
  for (int byte = 0; byte < 255; ++byte) {
    check::expect(e8m0_to_f32(static_cast<uint8_t>(byte)) == static_cast<float>(std::pow(2.0, byte - 127)),
                  "E8M0 " + std::to_string(byte));
  }
  check::expect(std::isnan(e8m0_to_f32(255)), "E8M0 255 is NaN");
}

void layout() {
  // Two rows of 32: every nibble, both positions in a byte, scales and global each their own.
  std::vector<uint8_t> packed(32), scale = {0x38, 0x40, 0x30, 0x01};  // 1, 2, 0.5, 2^-9
  for (size_t i = 0; i < packed.size(); ++i) packed[i] = static_cast<uint8_t>((i % 16) << 4 | (15 - i % 16));
  Weight weight;
  weight.format = WeightFormat::kNVFP4;
  weight.out = 2;
  weight.in = 32;
  weight.data = packed.data();
  weight.block_scale = scale.data();
  weight.global_scale = 0.25f;
  std::vector<float> expected(64);
  const float scales[4] = {1.0f, 2.0f, 0.5f, 0.001953125f};
  for (int64_t i = 0; i < 64; ++i) {
    const int nibble = i % 2 == 0 ? 15 - (i / 2) % 16 : (i / 2) % 16;
    expected[static_cast<size_t>(i)] = e2m1_to_f32(static_cast<uint8_t>(nibble)) * scales[i / 16] * 0.25f;
  }
  check::Guarded<float> out(64);
  dequantise_rows(weight, 0, 2, out.data());
  out.check("dequantise_rows");
  check::same_bits("low nibble is the even column", out.data(), expected.data(), 64);
  check::Guarded<float> one(32);
  dequantise_rows(weight, 1, 1, one.data());
  one.check("dequantise_rows, one row");
  check::same_bits("second row alone", one.data(), expected.data() + 32, 32);
}

void other_formats() {
  constexpr int64_t kOut = 130, kIn = 160;
  std::vector<uint8_t> codes(kOut * kIn), exponents(kOut * kIn / 32);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 7 % 0x7F);
  for (size_t i = 0; i < exponents.size(); ++i) exponents[i] = static_cast<uint8_t>(120 + i % 11);
  const std::vector<float> blocks = {0.5f, 3.0f, 0.125f, 7.0f};
  std::vector<float> expected_fp8(kOut * kIn), expected_mx(kOut * kIn);
  for (int64_t r = 0; r < kOut; ++r) {
    for (int64_t c = 0; c < kIn; ++c) {
      const size_t at = static_cast<size_t>(r * kIn + c);
      expected_fp8[at] =
          e4m3_to_f32(codes[at]) * blocks[static_cast<size_t>((r >= 128 ? 2 : 0) + (c >= 128 ? 1 : 0))];
      expected_mx[at] = e4m3_to_f32(codes[at]) * std::ldexp(1.0f, exponents[at / 32] - 127);
    }
  }
  check::Guarded<float> out(kOut * kIn);
  dequantise_rows({WeightFormat::kFP8Block, kOut, kIn, codes.data(), blocks.data(), 1.0f}, 0, kOut,
                  out.data());
  check::same_bits("FP8 in blocks", out.data(), expected_fp8.data(), kOut * kIn);
  dequantise_rows({WeightFormat::kMXFP8, kOut, kIn, codes.data(), exponents.data(), 1.0f}, 0, kOut,
                  out.data());
  check::same_bits("MXFP8", out.data(), expected_mx.data(), kOut * kIn);
  out.check("dequantise_rows, FP8");
  // At an odd address, as in a file.
  const std::vector<float> plain = check::normal(12);
  std::vector<uint8_t> bytes(12 * 4 + 1);
  std::memcpy(bytes.data() + 1, plain.data(), 48);
  check::Guarded<float> copy(12);
  dequantise_rows({WeightFormat::kF32, 3, 4, bytes.data() + 1, nullptr, 1.0f}, 0, 3, copy.data());
  check::same_bits("F32 at an odd address", copy.data(), plain.data(), 12);
  const std::vector<uint16_t> bf16 = check::normal_bf16(12);
  std::memcpy(bytes.data() + 1, bf16.data(), 24);
  dequantise_rows({WeightFormat::kBF16, 3, 4, bytes.data() + 1, nullptr, 1.0f}, 0, 3, copy.data());
  std::vector<float> wide;
  for (const uint16_t bits : bf16) wide.push_back(bf16_to_f32(bits));
  check::same_bits("BF16 at an odd address", copy.data(), wide.data(), 12);
}

void round_trip() {
  constexpr int64_t kOut = 33, kIn = 128;
  std::vector<float> w = check::normal(kOut * kIn, 0.02);
  for (int64_t i = 0; i < 16; ++i) w[static_cast<size_t>(i)] = 0.0f;     // a block of zeros
  for (int64_t i = 16; i < 32; ++i) w[static_cast<size_t>(i)] *= 1e-6f;  // a block of nothing
  const Nvfp4Tensor q = quantise_nvfp4(w.data(), kOut, kIn);
  check::expect(q.packed.size() == kOut * kIn / 2 && q.scale.size() == kOut * kIn / 16, "sizes");
  float largest = 0;
  for (const float value : w) largest = std::max(largest, std::fabs(value));
  check::expect(q.global == largest / 2688.0f, "global scale");
  check::Guarded<float> back(kOut * kIn);
  dequantise_rows(q.weight(kOut, kIn), 0, kOut, back.data());
  back.check("round trip");
  // Each value is the nearest of the 16 that its block's scale allows, and the scale is the nearest of all
  // E4M3.
  bool nearest = true, scale_nearest = true;
  double worst = 0;
  for (int64_t block = 0; block < kOut * kIn / 16; ++block) {
    const float* const values = w.data() + block * 16;
    float peak = 0;
    for (int i = 0; i < 16; ++i) peak = std::max(peak, std::fabs(values[i]));
    const double wanted = static_cast<double>(peak) / 6 / q.global;
    const double scale = e4m3_to_f32(q.scale[static_cast<size_t>(block)]);
    for (int code = 0; code < 0x7F; ++code) {
      const double other = e4m3_to_f32(static_cast<uint8_t>(code));
      scale_nearest = scale_nearest && std::fabs(scale - wanted) <= std::fabs(other - wanted) * (1 + 1e-6);
    }
    for (int i = 0; i < 16; ++i) {
      const double error = std::fabs(static_cast<double>(back[block * 16 + i]) - values[i]);
      for (uint8_t code = 0; code < 16; ++code) {
        const double other = std::fabs(static_cast<double>(e2m1_to_f32(code)) * scale * q.global - values[i]);
        // `back` is a product rounded to float32 (2^-24 of it), and so is the quotient that chose the code.
        nearest = nearest && error <= other + std::ldexp(static_cast<double>(peak), -22);
      }
      // Half a step at the coarse end (4 to 6) is a sixth of the peak; the scale's rounding adds up to a
      // sixteenth.
      if (peak > largest / 448) worst = std::max(worst, error / peak);
    }
  }
  check::expect(nearest && scale_nearest, "each scale and each value is the nearest there is");
  std::printf("      largest error of a value: %.4f of its block's peak\n", worst);
  check::expect(worst > 0 && worst <= 1.0 / 6 + 1.0 / 16, "error of a value beside its block's peak");
  // What was quantised once is a fixed point.
  const Nvfp4Tensor again = quantise_nvfp4(back.data(), kOut, kIn);
  check::Guarded<float> twice(kOut * kIn);
  dequantise_rows(again.weight(kOut, kIn), 0, kOut, twice.data());
  check::close("quantised twice", twice.data(), back.data(), kOut * kIn, 1e-6);
}

void edges() {
  const std::vector<float> zeros(32, 0.0f);
  const Nvfp4Tensor nothing = quantise_nvfp4(zeros.data(), 2, 16);
  float out[32];
  dequantise_rows(nothing.weight(2, 16), 0, 2, out);
  check::expect(nothing.global == 0.0f && std::all_of(out, out + 32, [](float v) { return v == 0.0f; }),
                "a weight of zeros");
  const auto refused = [](const std::vector<float>& w, int64_t in) {
    try {
      quantise_nvfp4(w.data(), 1, in);
    } catch (const InputError&) {
      return true;
    }
    return false;
  };
  check::expect(refused(std::vector<float>(24, 1.0f), 24), "columns that are no multiple of 16");
  std::vector<float> bad(16, 1.0f);
  bad[3] = NAN;
  check::expect(refused(bad, 16), "a NaN");
  bad[3] = -INFINITY;
  check::expect(refused(bad, 16), "an infinity");
}

}  // namespace

int main() {
  e2m1();
  e4m3();
  e8m0();
  layout();
  other_formats();
  round_trip();
  edges();
  return check::finish("nvfp4 codec");
}
