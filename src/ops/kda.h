// KDA (Kimi delta attention): a linear attention with a matrix state for each head and a decay for each key channel.
//
// kda_conv: depthwise causal convolution over `taps` rows, then SiLU, for q, k, v side by side (channel c of C).
//   u = [tail rows of the stream; rows of this step]                  raw inputs, before the convolution
//   y[t][c] = silu(sum_j weight[j][c] * u[t - (taps-1) + j][c])         j = taps-1 is the row itself
//   the tail keeps the last taps-1 raw rows, oldest first.
// kda_gates: log-decay of each key channel, write strength of each head, with a = exp(A_log[h]):
//   bounded:   g = lower_bound * sigmoid(a * (f + dt_bias))             a factor, not a clamp
//   unbounded: g = -a * softplus(f + dt_bias)                           softplus(x) = x above 20
//   beta = sigmoid(b)
// kda_recurrence, for each head, rows of a stream in order (state S is [Dk, Dv]):
//   q = l2norm(q) * Dk^-1/2, k = l2norm(k)                              l2norm(x) = x / sqrt(sum x^2 + 1e-6)
//   S *= exp(g) along Dk;  d = beta * (v - S^T k);  S += k d^T;  o = S^T q
// gated_norm: y = o * rsqrt(mean(o^2) + eps) * w * sigmoid(gate)         over each head's Dv
// kda_head: all that lies between the projections of a layer and its output product: linear (f_b), linear (g_b),
// kda_conv, kda_gates, kda_recurrence, gated_norm, with the bits that these give one after the other.
#pragma once

#include "ops/linear.h"
#include "ops/rows.h"

namespace rocket {

// State of one stream for one layer, and where to leave copies of it after certain rows.
// `checkpoint` is indexed by row of the step; null entries (or no blocks) mean none.
struct KdaConvParams {
  const float* x = nullptr;  // [rows, C] raw projections, rows ldx apart
  int64_t ldx = 0;
  const float* weight = nullptr;     // [taps, C]
  int32_t channels = 0;              // C
  int32_t taps = 4;                  // 2 … 8
  int32_t rows = 0;                  // of the step
  const Segment* segment = nullptr;  // [segments], covers every row once
  int32_t segments = 0;
  BlockParts tail;        // [segments] -> [taps-1, C], in/out
  BlockParts checkpoint;  // [rows] -> [taps-1, C] out; may be null
  float* y = nullptr;     // out [rows, C], rows ldy apart
  int64_t ldy = 0;
};

struct KdaGatesParams {
  const float* f = nullptr;        // [rows, heads*Dk], output of f_b
  const float* b = nullptr;        // [rows, heads], output of b_proj
  const float* dt_bias = nullptr;  // [heads*Dk]
  const float* a_log = nullptr;    // [heads]
  bool bounded = true;
  float lower_bound = -5.0f;
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t head_dim = 0;   // Dk
  float* g = nullptr;     // out [rows, heads*Dk], may be f itself
  float* beta = nullptr;  // out [rows, heads], may be b itself
};

struct KdaRecurrenceParams {
  const float* q = nullptr;  // [rows, heads*D], rows ldqkv apart; raw, the op normalises
  const float* k = nullptr;
  const float* v = nullptr;
  int64_t ldqkv = 0;
  const float* g = nullptr;     // [rows, heads*D]
  const float* beta = nullptr;  // [rows, heads]
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t head_dim = 0;              // D = Dk = Dv, a multiple of 8, at most 256
  const Segment* segment = nullptr;  // [segments]
  int32_t segments = 0;
  BlockParts state;       // [segments] -> [heads, Dk, Dv], in/out
  BlockParts checkpoint;  // [rows] -> [heads, Dk, Dv] out; may be null
  float* o = nullptr;     // out [rows, heads*D]
};
// Scratch of kda_recurrence: the normalised q, k and exp(g), and the product of q and k.
inline int64_t kda_recurrence_scratch_floats(int64_t rows, int64_t heads, int64_t head_dim) {
  return 3 * (rows * heads * head_dim + 64) + rows * heads;
}

struct GatedNormParams {
  const float* o = nullptr;       // [rows, heads*D]
  const float* gate = nullptr;    // [rows, heads*D], output of g_b
  const float* weight = nullptr;  // [D]
  float eps = 1e-5f;
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t head_dim = 0;
  float* y = nullptr;  // out [rows, heads*D], may be o itself
};

// The params of the ops in order, each of which reads what those before it write. Of the rows, only norm.y, and states,
// tails and checkpoints are sure to be written: the rest is room for an implementation that does op after op.
struct KdaHeadParams {
  LinearParams f_b;  // one part, to gates.f
  LinearParams g_b;  // one part, to norm.gate
  KdaConvParams conv;
  KdaGatesParams gates;
  KdaRecurrenceParams recurrence;
  GatedNormParams norm;
};

}  // namespace rocket
