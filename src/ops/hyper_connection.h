// Manifold-constrained hyper-connections (mHC): N residual streams of width H around each block.
//
// hyper_pre, before a block (float32 throughout):
//   f    = flatten(x[r]) * rsqrt(mean(flatten(x[r])^2) + rms_eps)              [N*H], no weight
//   w    = fn f                                                               [N + N + N*N]
//   pre  = sigmoid(scale[0] * w[0:N] + base[0:N]) + hc_eps                      [N]
//   post = 2 * sigmoid(scale[1] * w[N:2N] + base[N:2N])                         [N]
//   comb = softmax over the last axis(scale[2] * w[2N:] + base[2N:]) + hc_eps    [N, N]
//   comb = comb / (column sums + hc_eps); then (sinkhorn_iters - 1) times: / (row sums + hc_eps), / (column sums + hc_eps)
//   c    = sum_n pre[n] * x[r][n]                                              [H]
//   y[r] = c * rsqrt(mean(c^2) + rms_eps) * norm_weight                          the block's RMSNorm, fused
// hyper_post, after the block:
//   x'[r][n] = post[n] * block[r] + sum_m comb[m][n] * x[r][m]
// hyper_pre may do both: the hyper_post of the block before, then its own part from x' on.
// A row sum is over the last axis, a column sum over the first.
#pragma once

#include "ops/weight.h"

namespace rocket {

struct HyperPreParams {
  const float* x = nullptr;  // [rows, N, H]
  int32_t rows = 0;
  int32_t streams = 4;                 // N, at most 8
  int32_t hidden = 0;                  // H
  Weight fn;                           // [2N + N*N, N*H], kF32 or kBF16
  const float* base = nullptr;         // [2N + N*N]
  const float* scale = nullptr;        // [3]
  const float* norm_weight = nullptr;  // [H]
  float rms_eps = 1e-5f;
  float hc_eps = 1e-6f;
  int32_t sinkhorn_iters = 20;
  float* y = nullptr;     // out [rows, H], normed block input
  float* post = nullptr;  // out [rows, N]; with `block` read before, as the post of that block
  float* comb = nullptr;  // out [rows, N, N]; likewise
  float* mix = nullptr;   // out [rows, 2N + N*N], the raw w; may be null
  const float* block =
      nullptr;  // [rows, H], output of the block before, whose hyper_post is still to be done; or null
  float* next = nullptr;  // out [rows, N, H] with `block`: x'; not x
};

struct HyperPostParams {
  const float* x = nullptr;      // [rows, N, H]
  const float* block = nullptr;  // [rows, H], the block's output
  const float* post = nullptr;   // [rows, N]
  const float* comb = nullptr;   // [rows, N, N]
  int32_t rows = 0;
  int32_t streams = 4;
  int32_t hidden = 0;
  float* y = nullptr;  // out [rows, N, H], x'; may be x
};

inline HyperPostParams post_before(const HyperPreParams& p) {
  HyperPostParams post;
  post.x = p.x;
  post.block = p.block;
  post.post = p.post;
  post.comb = p.comb;
  post.rows = p.rows;
  post.streams = p.streams;
  post.hidden = p.hidden;
  post.y = p.next;
  return post;
}

// Head: mean over the streams, then RMSNorm, for chosen rows.
//   m = mean_n x[row_index[r]][n];  y[r] = m * rsqrt(mean(m^2) + rms_eps) * norm_weight
struct HyperHeadParams {
  const float* x = nullptr;            // [*, N, H]
  const int32_t* row_index = nullptr;  // [rows]
  int32_t rows = 0;
  int32_t streams = 4;
  int32_t hidden = 0;
  const float* norm_weight = nullptr;  // [H]
  float rms_eps = 1e-5f;
  float* y = nullptr;  // out [rows, H]
};

}  // namespace rocket
