// Sparse multi-head latent attention, absorbed form: every head reads the shared latents of the listed tokens.
//
//   logit[h][t] = scale * dot(q[h], latent[token t])                q already folded through k_b; `width` wide
//   p = softmax over the listed tokens;  o[h] = sum_t p[h][t] * latent[token t][0 … value_dim)
// Tokens are visited in list order, in the same order for any number of rows. An empty list gives zeros.
#pragma once

#include "ops/pages.h"
#include "ops/rows.h"

namespace rocket {

// Appends the step's latents to their streams' pages.
struct LatentAppendParams {
  const float* latent = nullptr;  // [rows, width], rows ld apart
  int64_t ld = 0;
  const Segment* segment = nullptr;
  int32_t segments = 0;
  PagedParts cache;  // [segments], row index = position; float32 or bfloat16
  int32_t rows = 0;
};

struct SparseMlaParams {
  const float* q = nullptr;  // [rows, heads, width], rows ldq apart
  int64_t ldq = 0;
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t width = 0;      // kv_lora_rank + rotary dims
  int32_t value_dim = 0;  // kv_lora_rank
  float scale = 1.0f;
  const int32_t* token = nullptr;  // [rows, ldtoken]
  int64_t ldtoken = 0;
  const int32_t* count = nullptr;  // [rows]
  const Segment* segment = nullptr;
  int32_t segments = 0;
  PagedParts cache;    // [segments], `width` wide
  float* o = nullptr;  // out [rows, heads, value_dim], rows ldo apart
  int64_t ldo = 0;
};
// Scratch of sparse_mla: logits of one row for each thread.
inline int64_t sparse_mla_scratch_floats(int64_t heads, int64_t max_tokens, int64_t threads) {
  return threads * (heads * (max_tokens + 16) + 64);
}

}  // namespace rocket
