// Products of rows with stored weights:  y[r][o] = sum_i x[r][i] * w[o][i]  (+ bias[o]).
//
// Several weights that share an input go in one call, so that they cost one launch. Float32 activations and
// accumulators. The order of the sum over i depends on the weight's shape only: a row's result has the same
// bits whatever other rows are in the call, however many there are.
#pragma once

#include "ops/weight.h"

namespace rocket {

struct LinearPart {
  Weight w;                     // [out, in]
  float* y = nullptr;           // out [rows, out], rows ldy apart
  int64_t ldy = 0;              // floats between rows of y; at least w.out
  const float* bias = nullptr;  // [out], may be null
};

struct LinearParams {
  static constexpr int kMaxParts = 10;
  const float* x = nullptr;  // [rows, in], rows ldx apart
  int64_t ldx = 0;
  int32_t rows = 0;
  int32_t part_count = 0;  // 1 … kMaxParts, all with the same `in`
  LinearPart part[kMaxParts];
};

// Scratch of linear: rows of x as NVFP4 weights want them.
inline int64_t linear_scratch_bytes(int64_t rows, int64_t in) {
  return rows * ((in + 255) / 256 * 896) + 64;
}

// The same for each of several heads, with one matrix a head inside a common weight (multi-head latent
// attention's kv_b, absorbed form). W is [heads * stride_out, in]; head h uses rows h*stride_out + offset … +
// rows_per_head.
//   transposed (fold k_b into q):  y[r][h][j] = sum_i x[r][h][i] * W[h*stride + offset + i][j]    x [..,
//   rows_per_head], y [.., in] otherwise (apply v_b):         y[r][h][i] = sum_j x[r][h][j] * W[h*stride +
//   offset + i][j]    x [.., in], y [.., rows_per_head]
// The order of each sum is fixed as above.
struct HeadLinearParams {
  Weight w;  // kF32 or kBF16 [heads * stride_out, in]
  int32_t heads = 0;
  int32_t stride_out = 0;
  int32_t offset = 0;
  int32_t rows_per_head = 0;
  bool transposed = false;
  const float* x = nullptr;  // [rows, heads, *]: row stride ldx, head stride hx
  int64_t ldx = 0, hx = 0;
  float* y = nullptr;  // [rows, heads, *]: row stride ldy, head stride hy
  int64_t ldy = 0, hy = 0;
  int32_t rows = 0;
};

}  // namespace rocket
