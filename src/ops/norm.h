// RMSNorm:    y = x * rsqrt(mean(x^2) + eps) * w            over the last axis
// LayerNorm:  y = (x - mean) * rsqrt(var + eps) * w + b     (bias not null), var is the biased variance
// In place (y == x) is allowed.
#pragma once

#include <cstdint>

namespace rocket {

// Several norms of the same rows go together.
struct NormPart {
  const float* x = nullptr;  // [rows, dim], rows ldx apart
  int64_t ldx = 0;
  int32_t dim = 0;
  const float* weight = nullptr;  // [dim]
  const float* bias = nullptr;    // [dim]; null = RMSNorm, else LayerNorm
  float eps = 1e-5f;
  float* y = nullptr;  // out [rows, dim], rows ldy apart
  int64_t ldy = 0;
};

struct NormParams {
  static constexpr int kMaxParts = 4;
  int32_t rows = 0;
  int32_t part_count = 1;  // 1 … kMaxParts
  NormPart part[kMaxParts];
};

}  // namespace rocket
