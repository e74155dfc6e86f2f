// The weight table of a glm5_next fuel. H hidden, N streams, C = KDA heads * head dim, E experts, I expert
// width.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/arena.h"
#include "fuel/checkpoint.h"
#include "glm5-moe-nvfp4-2b/config.h"
#include "ops/experts.h"
#include "ops/weight.h"

namespace rocket::glm5 {

struct HyperWeights {
  Weight fn;                     // [2N + N*N, N*H]
  const float* base = nullptr;   // [2N + N*N]
  const float* scale = nullptr;  // [3]
  const float* norm = nullptr;   // [H], the block's RMSNorm
};

struct KdaWeights {
  Weight q, k, v;                  // [C, H] each
  Weight f_a, g_a;                 // [D, H]
  Weight f_b, g_b;                 // [C, D]
  Weight b;                        // [heads, H]
  Weight o;                        // [H, C]
  const float* conv = nullptr;     // [taps, 3C], q then k then v
  const float* dt_bias = nullptr;  // [C]
  const float* a_log = nullptr;    // [heads]
  const float* o_norm = nullptr;   // [D]
};

struct IndexerWeights {
  Weight wq_b;                         // [heads * D, q_lora]
  Weight wk;                           // [D, H]
  Weight gate;                         // [D, H]
  Weight weights_proj;                 // [heads, H]
  const float* k_norm = nullptr;       // [D]
  const float* k_norm_bias = nullptr;  // [D]
  const float* ape = nullptr;          // [pool, D]
};

struct MlaWeights {
  Weight q_a;                        // [q_lora, H]
  Weight q_b;                        // [heads * qk_dim, q_lora]
  Weight kv_a;                       // [kv_lora, H]
  Weight kv_b;                       // [heads * (qk_nope + v), kv_lora]
  Weight o;                          // [H, heads * v]
  const float* q_a_norm = nullptr;   // [q_lora]
  const float* kv_a_norm = nullptr;  // [kv_lora]
  const float* q_a_bias = nullptr;   // with attention_bias, else null
  const float* kv_a_bias = nullptr;
  const float* o_bias = nullptr;
  IndexerWeights indexer;  // of layers that run their own
};

struct MlpWeights {
  Weight gate, up;  // [inner, H]
  Weight down;      // [H, inner]
};

struct MoeWeights {
  Weight router;                            // [E, H]
  const float* bias = nullptr;              // [E], e_score_correction_bias
  MlpWeights shared;                        // inner = I * n_shared_experts
  std::vector<ExpertWeights> experts;       // [E], where they lie in the mapped checkpoint, or in slots
  const ExpertWeights* resident = nullptr;  // [E], in the ops' memory
};

struct LayerWeights {
  HyperWeights attn_hc, ffn_hc;
  KdaWeights kda;
  MlaWeights mla;
  MlpWeights mlp;
  MoeWeights moe;
};

struct Weights {
  Weight embed;                 // [vocab, H]
  Weight lm_head;               // [vocab, H]
  const float* norm = nullptr;  // [H]
  std::vector<LayerWeights> layer;

  int64_t dense_bytes = 0;                     // as resident
  int64_t expert_bytes = 0;                    // all routed experts on disk
  int32_t ranks = 1;                           // that share them
  int64_t experts_owned = 0, owned_bytes = 0;  // of them, those of this rank
  int64_t slot_bytes = 0;                      // the largest expert
  bool experts_in_place = true;                // in the mapped checkpoint, else in the ops' memory
  int64_t token_bytes = 0;                     // read by one decoded token, one embedding row counted
  int64_t draft_tensors = 0, draft_bytes = 0, vision_tensors = 0, vision_bytes = 0;
  uint64_t fingerprint = 0;
};

}  // namespace rocket::glm5
