// The architecture of a glm5_next text model, read from config.json as transformers 5.24 reads it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"

namespace rocket::glm5 {

struct Config {
  std::string model_type;  // glm5_next or glm5_next_text
  int32_t vocab_size = 154880;
  int32_t hidden_size = 4096;            // H
  int32_t intermediate_size = 12288;     // dense MLP
  int32_t moe_intermediate_size = 2048;  // I
  int32_t num_hidden_layers = 45;
  int32_t num_nextn_predict_layers = 0;  // draft layers that the config announces
  int64_t max_position_embeddings = 1048576;
  float rms_norm_eps = 1e-5f;
  bool tie_word_embeddings = false;

  // sparse MLA
  int32_t num_attention_heads = 64;
  int32_t q_lora_rank = 1536;
  int32_t kv_lora_rank = 512;
  int32_t qk_nope_head_dim = 256;
  int32_t qk_rope_head_dim = 0;
  int32_t v_head_dim = 256;
  bool attention_bias = false;

  // indexer
  int32_t index_topk = 2048;
  int32_t index_head_dim = 128;
  int32_t index_n_heads = 32;
  int32_t index_kpool = 16;
  bool index_kpool_always_select_tail = true;

  // KDA
  int32_t linear_num_heads = 64;
  int32_t linear_head_dim = 128;
  int32_t linear_conv_kernel_dim = 4;
  bool linear_bounded = true;  // linear_lower_bound is not null
  float linear_lower_bound = -5.0f;

  // experts
  int32_t n_routed_experts = 288;
  int32_t n_shared_experts = 1;
  int32_t num_experts_per_tok = 8;
  int32_t n_group = 1;
  int32_t topk_group = 1;
  bool norm_topk_prob = true;
  float routed_scaling_factor = 2.5f;
  float swiglu_limit = 10.0f;

  // hyper-connections
  int32_t hc_mult = 4;  // N
  int32_t hc_sinkhorn_iters = 20;
  float hc_eps = 1e-6f;

  std::vector<bool> is_kda;           // [layers]; else sparse MLA
  std::vector<bool> is_moe;           // [layers]; else dense MLP
  std::vector<bool> indexer_full;     // [layers]; else shared (meaningful where !is_kda)
  std::vector<int64_t> eos_token_id;  // may be empty
  int64_t bos_token_id = -1;

  // Ranks that share the dense weights. Above 1 linear_num_heads, num_attention_heads and intermediate_size are those of
  // one rank (share.h).
  int32_t dense_ranks = 1;

  int32_t shared_inner() const { return moe_intermediate_size * n_shared_experts / dense_ranks; }
  int32_t head_rows() const { return vocab_size / dense_ranks; }  // of lm_head
  int32_t kda_channels() const { return linear_num_heads * linear_head_dim; }
  int32_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
};

// Throws FuelError: no file, broken JSON (with line and column), another model_type (names it and those
// supported), a field of wrong type or out of range, combinations that the architecture forbids. `dir` holds
// config.json.
Config read_config(const std::string& dir);
Config parse_config(const Json& json, const std::string& file);

}  // namespace rocket::glm5
