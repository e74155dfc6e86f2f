// Router of a mixture of experts, from float32 logits.
//
//   score = sigmoid(logit);  choice = score + bias
//   groups > 1: a group's score is the sum of its two best choices; only the best topk_group groups compete
//   ids = the topk best choices, ties to the lowest id, written in ascending id
//   weight = score[id] (without bias); normalised by (sum + 1e-20) if norm_topk_prob; times scaling
// With `slots`, the chosen experts of all rows are looked up in that cache in the same launch (slot_cache.h). With
// `owner`, `own` has the choices of one rank's experts, -1 in place of the others, and only these are looked up and counted.
#pragma once

#include <cstdint>

namespace rocket {

struct SlotCache;

struct RouterParams {
  const float* logit = nullptr;  // [rows, experts], rows ld apart
  int64_t ld = 0;
  const float* bias = nullptr;  // [experts], e_score_correction_bias
  int32_t rows = 0;
  int32_t experts = 0;  // at most 4096
  int32_t topk = 0;     // at most 64
  int32_t groups = 1;
  int32_t topk_group = 1;
  bool norm_topk_prob = true;
  float scaling = 1.0f;
  int32_t* id = nullptr;    // out [rows, topk] ascending
  float* weight = nullptr;  // out [rows, topk]
  int64_t* distinct =
      nullptr;  // in/out [1]: grows by the number of distinct (own) experts chosen; may be null
  const SlotCache* slots = nullptr;  // on the host, its arrays in the ops' memory; may be null; CUDA only
  int32_t layer = 0;                 // its layer there
  const int32_t* owner = nullptr;    // [experts] the rank that has each; may be null; CUDA only
  int32_t rank = 0;                  // this one
  int32_t* own = nullptr;            // out [rows, topk], with owner
};

}  // namespace rocket
