// A linear weight as stored on disk: [out, in], row major, in one of the formats below.
#pragma once

#include <cstdint>

namespace rocket {

enum class WeightFormat : uint8_t {
  kF32,       // float32
  kBF16,      // bfloat16
  kNVFP4,     // E2M1 nibbles, low nibble = even column; E4M3 scale for 16 columns; float32 global
  kFP8Block,  // E4M3 with a float32 multiplier for each block of 128 x 128
  kMXFP8,     // E4M3 with an E8M0 scale for 32 columns
};

// w[o][i] = e2m1(nibble) * e4m3(block_scale[o][i/16]) * global_scale          (kNVFP4)
// w[o][i] = e4m3(data[o][i]) * block_scale_f32[o/128][i/128]                  (kFP8Block)
// w[o][i] = e4m3(data[o][i]) * 2^(block_scale[o][i/32] - 127)                 (kMXFP8)
// Pointers may be unaligned: experts are used where they lie in the mapped checkpoint.
struct Weight {
  WeightFormat format = WeightFormat::kBF16;
  int64_t out = 0;
  int64_t in = 0;
  const void* data = nullptr;  // F32/BF16/E4M3 [out, in]; NVFP4 U8 [out, in/2]
  const void* block_scale =
      nullptr;  // NVFP4 U8 [out, in/16]; MXFP8 U8 [out, in/32]; FP8Block F32 [ceil(out/128), ceil(in/128)]
  float global_scale = 1.0f;  // NVFP4: a multiplier, whatever the spelling on disk
};

inline int64_t weight_bytes(const Weight& w) {
  switch (w.format) {
    case WeightFormat::kF32:
      return w.out * w.in * 4;
    case WeightFormat::kBF16:
      return w.out * w.in * 2;
    case WeightFormat::kNVFP4:
      return w.out * (w.in / 2 + w.in / 16) + 4;
    case WeightFormat::kFP8Block:
      return w.out * w.in + ((w.out + 127) / 128) * ((w.in + 127) / 128) * 4;
    case WeightFormat::kMXFP8:
      return w.out * (w.in + w.in / 32);
  }
  return 0;
}

// Some rows of a weight, where they lie. Of kFP8Block they begin with a block, or all blocks have one scale.
inline Weight rows_of(const Weight& w, int64_t first, int64_t count) {
  const auto behind = [](const void* from, int64_t bytes) {
    return from ? static_cast<const void*>(static_cast<const char*>(from) + bytes) : nullptr;
  };
  Weight part = w;
  part.out = count;
  switch (w.format) {
    case WeightFormat::kF32:
      part.data = behind(w.data, first * w.in * 4);
      break;
    case WeightFormat::kBF16:
      part.data = behind(w.data, first * w.in * 2);
      break;
    case WeightFormat::kNVFP4:
      part.data = behind(w.data, first * (w.in / 2));
      part.block_scale = behind(w.block_scale, first * (w.in / 16));
      break;
    case WeightFormat::kFP8Block:
      part.data = behind(w.data, first * w.in);
      part.block_scale = behind(w.block_scale, first / 128 * ((w.in + 127) / 128) * 4);
      break;
    case WeightFormat::kMXFP8:
      part.data = behind(w.data, first * w.in);
      part.block_scale = behind(w.block_scale, first * (w.in / 32));
      break;
  }
  return part;
}

}  // namespace rocket
