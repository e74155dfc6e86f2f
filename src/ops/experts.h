// Routed experts and gated MLPs with clamped SwiGLU.
//
//   swiglu:     act = silu(min(gate, limit)) * clamp(up, -limit, limit)        limit = +inf: no clamp
//   expert_ffn: out[r][j] = weight[r][j] * down_e( swiglu(gate_e x[r], up_e x[r]) ),  e = id[r][j] unsummed
//   rows expert_sum: y[r] = ((out[r][0] + out[r][1]) + …) + shared[r]               ids ascend, so experts
//   add in ascending id
// Every distinct expert's weights are read once a call, whatever the number of rows. Sums over the inner axis
// have an order that depends on the shape only, as in linear.h.
#pragma once

#include "ops/weight.h"

namespace rocket {

struct ExpertWeights {
  Weight gate;  // [I, H]
  Weight up;    // [I, H], with its own global scale
  Weight down;  // [H, I]
};

struct SwigluParams {
  const float* gate = nullptr;  // [rows, dim], rows ld apart
  const float* up = nullptr;
  int64_t ld = 0;
  int32_t rows = 0;
  int32_t dim = 0;
  float limit = 0;
  float* y = nullptr;  // out [rows, dim], rows ldy apart; may be gate itself
  int64_t ldy = 0;
};

struct ExpertFfnParams {
  const float* x = nullptr;  // [rows, H], rows ldx apart
  int64_t ldx = 0;
  int32_t rows = 0;
  int32_t topk = 0;
  const int32_t* id = nullptr;            // [rows, topk] ascending; -1 = not here (its row is set to 0)
  const float* weight = nullptr;          // [rows, topk]
  const ExpertWeights* expert = nullptr;  // [experts]
  int32_t experts = 0;
  int32_t hidden = 0;  // H
  int32_t inner = 0;   // I
  float limit = 0;
  float* out = nullptr;  // out [rows, topk, H]
  // Rows of -1 are left as they are: other calls write them.
  bool keep_absent = false;
};
// Scratch of expert_ffn: activations of all (row, expert) pairs and rows of x, both padded to 256, and the
// sorted pair list.
inline int64_t expert_ffn_scratch_bytes(int64_t rows, int64_t topk, int64_t experts, int64_t hidden,
                                        int64_t inner) {
  return rows * topk * ((inner + 255) / 256 * 1024 + 40) + rows * ((hidden + 255) / 256 * 1024) +
         (experts + 1) * 4 + 512;
}

struct ExpertSumParams {
  const float* out = nullptr;     // [rows, topk, H]
  const float* shared = nullptr;  // [rows, H]; may be null
  int32_t rows = 0;
  int32_t topk = 0;
  int32_t hidden = 0;
  float* y = nullptr;  // out [rows, H]; may be shared itself
};

}  // namespace rocket
