// The forward pass of glm5_next in data order: one line for each op. Shapes of the buffers are in forward.h,
// the ops' formulas in src/ops/*.h.
#include "glm5-moe-nvfp4-2b/forward.h"

namespace rocket::glm5 {

void Glm5::pass(const StepView& step) {
  ArenaScope scope(workspace_);
  Activations a = activations(step.rows);
  embed(step, a);
  for (size_t i = 0; i < weights_->layer.size(); ++i) layer(i, step, a);
  head(step, a);
}

void Glm5::layer(size_t index, const StepView& step, Activations& a) {
  const LayerWeights& w = weights_->layer[index];
  hyper_pre(w.attn_hc, a);
  if (config_.is_kda[index]) {
    kda(index, w.kda, step, a);
  } else {
    mla(index, w.mla, step, a);
  }
  hyper_post(a);
  hyper_pre(w.ffn_hc, a);
  if (config_.is_moe[index]) {
    moe(index, w.moe, a);
  } else {
    StageTimer::Scope time(timer_, stage_.mlp);
    ArenaScope scope(workspace_);
    mlp(w.mlp, mlp_buffers(a.rows, config_.intermediate_size), a, a.block);
    sum_parts(a.block, a.rows, "the dense MLP");
  }
  hyper_post(a);
  if (diagnose_ || recording_) {
    add_block(a);
    diagnose(index, step, a);
  }
}

void Glm5::kda(size_t index, const KdaWeights& w, const StepView& step, Activations& a) {
  StageTimer::Scope time(timer_, stage_.kda);
  ArenaScope scope(workspace_);
  const KdaBuffers b = kda_buffers(a.rows);
  const int64_t H = config_.hidden_size, D = config_.linear_head_dim, C = config_.kda_channels();
  linear(a.y, H, a.rows,
         {{w.q, b.raw, 3 * C},
          {w.k, b.raw + C, 3 * C},
          {w.v, b.raw + 2 * C, 3 * C},
          {w.f_a, b.f_low, D},
          {w.g_a, b.g_low, D},
          {w.b, b.beta, config_.linear_num_heads}});
  kda_head(index, w, step, b);
  linear(b.o, C, a.rows, {{w.o, a.block, H}});
  sum_parts(a.block, a.rows, "attention");
}

void Glm5::mla(size_t index, const MlaWeights& w, const StepView& step, Activations& a) {
  StageTimer::Scope time(timer_, stage_.mla);
  ArenaScope scope(workspace_);
  const MlaBuffers b = mla_buffers(a.rows);
  const int64_t H = config_.hidden_size, q_rank = config_.q_lora_rank, rank = config_.kv_lora_rank;
  const int64_t heads = config_.num_attention_heads;
  const int64_t index_heads = config_.index_n_heads, D = config_.index_head_dim;
  const float eps = config_.rms_norm_eps;
  const IndexerWeights& x = w.indexer;  // empty where the layer takes the choice of the one before
  linear(a.y, H, a.rows,
         {{w.q_a, b.q_low, q_rank, w.q_a_bias},
          {w.kv_a, b.latent, rank, w.kv_a_bias},
          {x.wk, b.index_k, D},
          {x.gate, b.index_gate, D},
          {x.weights_proj, b.head_weight, index_heads}});
  norm(a.rows, {{b.q_low, q_rank, w.q_a_norm, eps},
                {b.latent, rank, w.kv_a_norm, eps},
                {b.index_k, D, x.k_norm, 1e-6f, x.k_norm_bias}});
  latent_append(index, step, b);
  linear(b.q_low, q_rank, a.rows,
         {{w.q_b, b.q, heads * config_.qk_head_dim()}, {x.wq_b, b.index_q, index_heads * D}});
  if (config_.indexer_full[index]) select(index, x, step, a, b);
  fold_query(w, b);
  sparse_mla(index, step, a, b);
  expand_value(w, b);
  linear(b.o, heads * config_.v_head_dim, a.rows, {{w.o, a.block, H, w.o_bias}});
  sum_parts(a.block, a.rows, "attention");
  if (recording_) record_selected(step, a);
}

// The indexer: pools finished keys, scores the visible pools, leaves each row's token list in the
// activations, where layers with a shared indexer find it.
void Glm5::select(size_t index, const IndexerWeights& w, const StepView& step, Activations& a,
                  const MlaBuffers& b) {
  pool_update(index, w, step, b);
  index_select(index, step, a, b);
}

void Glm5::mlp(const MlpWeights& w, const MlpBuffers& b, const Activations& a, float* out) {
  linear(a.y, config_.hidden_size, a.rows, {{w.gate, b.gate, b.inner}, {w.up, b.up, b.inner}});
  swiglu(b.gate, b.up, b.inner, a.rows);
  linear(b.gate, b.inner, a.rows, {{w.down, out, config_.hidden_size}});
}

// The router and the shared expert's first products read the same rows: one call. Routed experts come in waves where
// a cache holds some of them; what is missing is on its way from the moment they are found. The shared expert's last
// product fills the wait for that, or, among several ranks, the wait for the rows that cross.
void Glm5::moe(size_t index, const MoeWeights& w, Activations& a) {
  StageTimer::Scope time(timer_, stage_.moe);
  ArenaScope scope(workspace_);
  MoeBuffers b = moe_buffers(a.rows);
  const MlpBuffers s = mlp_buffers(a.rows, config_.shared_inner());
  linear(a.y, config_.hidden_size, a.rows,
         {{w.router, b.logit, config_.n_routed_experts},
          {w.shared.gate, s.gate, s.inner},
          {w.shared.up, s.up, s.inner}});
  swiglu(s.gate, s.up, s.inner, a.rows);
  router(index, w, b);
  share_rows(index, b);
  find_experts(index, b);
  const auto shared_down = [&] {
    linear(s.gate, s.inner, a.rows, {{w.shared.down, a.block, config_.hidden_size}});
  };
  if (!exchange_) shared_down();
  for (int32_t wave = 0; wave < b.waves; ++wave) {
    fetch_experts(wave, b);
    expert_ffn(w, a, b);
  }
  send_rows(b);
  if (exchange_) shared_down();
  sum_parts(a.block, a.rows, "the shared expert");
  take_rows(b);
  expert_sum(a, b);
  record_router(index, b);
}

void Glm5::head(const StepView& step, Activations& a) {
  if (step.logits_rows == 0) return;
  add_block(a);
  ArenaScope scope(workspace_);
  const int64_t H = config_.hidden_size;
  float* hidden = workspace_.take<float>(step.logits_rows * H);
  hyper_head(step, a, hidden);
  StageTimer::Scope time(timer_, stage_.head);
  float* mine = own_logits(step);
  linear(hidden, H, step.logits_rows, {{weights_->lm_head, mine, config_.head_rows()}});
  join_logits(step, mine);
  find_bad(step.first_logit, step.logits_rows);
  if (step.sampling)
    draw(step.first_logit, step.logits_rows, step.sampling, step.counter, token_ + step.first_logit);
}

}  // namespace rocket::glm5
