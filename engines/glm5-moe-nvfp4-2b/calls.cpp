// The buffers of the forward pass and the params of its ops.
#include <cmath>

#include "glm5-moe-nvfp4-2b/forward.h"

namespace rocket::glm5 {
namespace {

// Parts without a weight are left out.
LinearParams linear_params(const float* x, int64_t ldx, int32_t rows,
                           std::initializer_list<LinearPart> parts) {
  LinearParams p;
  p.x = x;
  p.ldx = ldx;
  p.rows = rows;
  for (const LinearPart& part : parts) {
    if (part.w.out > 0) p.part[p.part_count++] = part;
  }
  return p;
}

}  // namespace

Glm5::Activations Glm5::activations(int32_t rows) {
  const int64_t R = rows, N = config_.hc_mult, H = config_.hidden_size;
  Activations a;
  a.rows = rows;
  a.x = workspace_.take<float>(R * N * H);
  a.next = workspace_.take<float>(R * N * H);
  a.y = workspace_.take<float>(R * H);
  a.block = workspace_.take<float>(R * H);
  a.post = workspace_.take<float>(R * N);
  a.comb = workspace_.take<float>(R * N * N);
  a.token = workspace_.take<int32_t>(R * select_width());
  a.count = workspace_.take<int32_t>(R);
  return a;
}

Glm5::KdaBuffers Glm5::kda_buffers(int32_t rows) {
  const int64_t R = rows, D = config_.linear_head_dim, C = config_.kda_channels();
  KdaBuffers b{};
  b.rows = rows;
  b.raw = workspace_.take<float>(R * 3 * C);
  b.qkv = workspace_.take<float>(R * 3 * C);
  b.f_low = workspace_.take<float>(R * D);
  b.g_low = workspace_.take<float>(R * D);
  b.beta = workspace_.take<float>(R * config_.linear_num_heads);
  b.decay = workspace_.take<float>(R * C);
  b.gate = workspace_.take<float>(R * C);
  b.o = workspace_.take<float>(R * C);
  return b;
}

Glm5::MlaBuffers Glm5::mla_buffers(int32_t rows) {
  const int64_t R = rows, heads = config_.num_attention_heads, rank = config_.kv_lora_rank;
  const int64_t D = config_.index_head_dim, index_heads = config_.index_n_heads;
  MlaBuffers b{};
  b.rows = rows;
  b.q_low = workspace_.take<float>(R * config_.q_lora_rank);
  b.latent = workspace_.take<float>(R * rank);
  b.q = workspace_.take<float>(R * heads * config_.qk_head_dim());
  b.q_latent = workspace_.take<float>(R * heads * rank);
  b.o_latent = workspace_.take<float>(R * heads * rank);
  b.o = workspace_.take<float>(R * heads * config_.v_head_dim);
  b.index_q = workspace_.take<float>(R * index_heads * D);
  b.index_k = workspace_.take<float>(R * D);
  b.index_gate = workspace_.take<float>(R * D);
  b.head_weight = workspace_.take<float>(R * index_heads);
  return b;
}

Glm5::MlpBuffers Glm5::mlp_buffers(int32_t rows, int64_t inner) {
  return {inner, workspace_.take<float>(rows * inner), workspace_.take<float>(rows * inner)};
}

Glm5::MoeBuffers Glm5::moe_buffers(int32_t rows) {
  const int64_t R = rows, topk = config_.num_experts_per_tok;
  MoeBuffers b{};
  b.rows = rows;
  b.logit = workspace_.take<float>(R * config_.n_routed_experts);
  b.id = workspace_.take<int32_t>(R * topk);
  b.weight = workspace_.take<float>(R * topk);
  b.routed = workspace_.take<float>(R * topk * config_.hidden_size);
  b.own = b.id;
  if (weights_->ranks > 1) {
    b.own = workspace_.take<int32_t>(R * topk);
    b.wire =
        workspace_.take<float>(RowExchange::buffer_floats(weights_->ranks, R, topk, config_.hidden_size));
  }
  b.waves = 1;
  b.wave = 0;
  b.wave_id = b.own;
  return b;
}

void Glm5::embed(const StepView& step, Activations& a) {
  StageTimer::Scope time(timer_, stage_.embed);
  EmbedParams p;
  p.table = weights_->embed;
  p.token = step.token;
  p.embedding = step.embedding;
  p.rows = a.rows;
  p.streams = config_.hc_mult;
  p.x = a.x;
  ops_.embed(p, exec_);
}

void Glm5::hyper_pre(const HyperWeights& w, Activations& a) {
  StageTimer::Scope time(timer_, stage_.hyper);
  HyperPreParams p;
  p.x = a.x;
  p.rows = a.rows;
  p.streams = config_.hc_mult;
  p.hidden = config_.hidden_size;
  p.fn = w.fn;
  p.base = w.base;
  p.scale = w.scale;
  p.norm_weight = w.norm;
  p.rms_eps = config_.rms_norm_eps;
  p.hc_eps = config_.hc_eps;
  p.sinkhorn_iters = config_.hc_sinkhorn_iters;
  p.y = a.y;
  p.post = a.post;
  p.comb = a.comb;
  p.block = a.added ? nullptr : a.block;
  p.next = a.next;
  ops_.hyper_pre(p, exec_);
  if (!a.added) std::swap(a.x, a.next);
  a.added = true;
}

// The next hyper_pre does it along with its own work; add_block() at once.
void Glm5::hyper_post(Activations& a) {
  a.added = false;
}

void Glm5::add_block(Activations& a) {
  if (a.added) return;
  StageTimer::Scope time(timer_, stage_.hyper);
  HyperPostParams p;
  p.x = p.y = a.x;
  p.block = a.block;
  p.post = a.post;
  p.comb = a.comb;
  p.rows = a.rows;
  p.streams = config_.hc_mult;
  p.hidden = config_.hidden_size;
  ops_.hyper_post(p, exec_);
  a.added = true;
}

void Glm5::linear(const float* x, int64_t ldx, int32_t rows, std::initializer_list<LinearPart> parts) {
  ops_.linear(linear_params(x, ldx, rows, parts), exec_);
}

void Glm5::norm(int32_t rows, std::initializer_list<Norm> norms) {
  NormParams p;
  p.rows = rows;
  p.part_count = 0;
  for (const Norm& n : norms) {
    if (!n.weight) continue;
    NormPart& part = p.part[p.part_count++];
    part.x = part.y = n.x;
    part.ldx = part.ldy = n.dim;
    part.dim = static_cast<int32_t>(n.dim);
    part.weight = n.weight;
    part.bias = n.bias;
    part.eps = n.eps;
  }
  if (p.part_count > 0) ops_.norm(p, exec_);
}

KdaConvParams Glm5::kda_conv(size_t index, const KdaWeights& w, const StepView& step,
                             const KdaBuffers& b) const {
  const RecurrentPart& tail = layout_.recurrent()[static_cast<size_t>(state_part_[index]) + 1];
  KdaConvParams p;
  p.x = b.raw;
  p.weight = w.conv;
  p.channels = 3 * config_.kda_channels();
  p.ldx = p.ldy = p.channels;
  p.taps = config_.linear_conv_kernel_dim;
  p.rows = b.rows;
  p.segment = step.segment;
  p.segments = step.segments;
  p.tail = step.state_part(tail);
  p.checkpoint = step.checkpoint_part(tail);
  p.y = b.qkv;
  return p;
}

KdaGatesParams Glm5::kda_gates(const KdaWeights& w, const KdaBuffers& b) const {
  KdaGatesParams p;
  p.f = p.g = b.decay;
  p.b = p.beta = b.beta;
  p.dt_bias = w.dt_bias;
  p.a_log = w.a_log;
  p.bounded = config_.linear_bounded;
  p.lower_bound = config_.linear_lower_bound;
  p.rows = b.rows;
  p.heads = config_.linear_num_heads;
  p.head_dim = config_.linear_head_dim;
  return p;
}

KdaRecurrenceParams Glm5::kda_recurrence(size_t index, const StepView& step, const KdaBuffers& b) const {
  const RecurrentPart& state = layout_.recurrent()[static_cast<size_t>(state_part_[index])];
  const int64_t C = config_.kda_channels();
  KdaRecurrenceParams p;
  p.q = b.qkv;
  p.k = b.qkv + C;
  p.v = b.qkv + 2 * C;
  p.ldqkv = 3 * C;
  p.g = b.decay;
  p.beta = b.beta;
  p.rows = b.rows;
  p.heads = config_.linear_num_heads;
  p.head_dim = config_.linear_head_dim;
  p.segment = step.segment;
  p.segments = step.segments;
  p.state = step.state_part(state);
  p.checkpoint = step.checkpoint_part(state);
  p.o = b.o;
  return p;
}

GatedNormParams Glm5::gated_norm(const KdaWeights& w, const KdaBuffers& b) const {
  GatedNormParams p;
  p.o = p.y = b.o;
  p.gate = b.gate;
  p.weight = w.o_norm;
  p.eps = config_.rms_norm_eps;
  p.rows = b.rows;
  p.heads = config_.linear_num_heads;
  p.head_dim = config_.linear_head_dim;
  return p;
}

void Glm5::kda_head(size_t index, const KdaWeights& w, const StepView& step, const KdaBuffers& b) {
  const int64_t C = config_.kda_channels(), D = config_.linear_head_dim;
  KdaHeadParams p;
  p.f_b = linear_params(b.f_low, D, b.rows, {{w.f_b, b.decay, C}});
  p.g_b = linear_params(b.g_low, D, b.rows, {{w.g_b, b.gate, C}});
  p.conv = kda_conv(index, w, step, b);
  p.gates = kda_gates(w, b);
  p.recurrence = kda_recurrence(index, step, b);
  p.norm = gated_norm(w, b);
  ops_.kda_head(p, exec_);
}

void Glm5::latent_append(size_t index, const StepView& step, const MlaBuffers& b) {
  LatentAppendParams p;
  p.latent = b.latent;
  p.ld = config_.kv_lora_rank;
  p.segment = step.segment;
  p.segments = step.segments;
  p.cache = step.paged_part(layout_.paged()[static_cast<size_t>(latent_part_[index])]);
  p.rows = b.rows;
  ops_.latent_append(p, exec_);
}

void Glm5::pool_update(size_t index, const IndexerWeights& w, const StepView& step, const MlaBuffers& b) {
  const RecurrentPart& tail = layout_.recurrent()[static_cast<size_t>(state_part_[index])];
  PoolUpdateParams p;
  p.k = b.index_k;
  p.gate = b.index_gate;
  p.ldk = p.ldgate = p.dim = config_.index_head_dim;
  p.ape = w.ape;
  p.pool = config_.index_kpool;
  p.segment = step.segment;
  p.segments = step.segments;
  p.tail = step.state_part(tail);
  p.checkpoint = step.checkpoint_part(tail);
  p.pooled = step.paged_part(layout_.paged()[static_cast<size_t>(latent_part_[index]) + 1]);
  p.rows = b.rows;
  ops_.pool_update(p, exec_);
}

void Glm5::index_select(size_t index, const StepView& step, Activations& a, const MlaBuffers& b) {
  IndexSelectParams p;
  p.q = b.index_q;
  p.head_weight = b.head_weight;
  p.rows = b.rows;
  p.heads = config_.index_n_heads;
  p.dim = config_.index_head_dim;
  p.ldq = int64_t{p.heads} * p.dim;
  p.ldw = p.heads;
  p.head_weight_scale = 1.0f / std::sqrt(static_cast<float>(p.heads));
  p.scale = 1.0f / std::sqrt(static_cast<float>(p.dim));
  p.pool = config_.index_kpool;
  p.topk = config_.index_topk / config_.index_kpool;
  p.select_tail = config_.index_kpool_always_select_tail;
  p.max_pools = static_cast<int32_t>(max_context_ / p.pool);
  p.segment = step.segment;
  p.segments = step.segments;
  p.pooled = step.paged_part(layout_.paged()[static_cast<size_t>(latent_part_[index]) + 1]);
  p.token = a.token;
  p.ldtoken = select_width();
  p.count = a.count;
  ops_.index_select(p, exec_);
}

// q_latent[h] = k_b[h]^T q[h]
void Glm5::fold_query(const MlaWeights& w, const MlaBuffers& b) {
  HeadLinearParams p;
  p.w = w.kv_b;
  p.heads = config_.num_attention_heads;
  p.stride_out = config_.qk_nope_head_dim + config_.v_head_dim;
  p.offset = 0;
  p.rows_per_head = config_.qk_nope_head_dim;
  p.transposed = true;
  p.x = b.q;
  p.hx = config_.qk_head_dim();
  p.ldx = p.heads * p.hx;
  p.y = b.q_latent;
  p.hy = config_.kv_lora_rank;
  p.ldy = p.heads * p.hy;
  p.rows = b.rows;
  ops_.head_linear(p, exec_);
}

void Glm5::sparse_mla(size_t index, const StepView& step, const Activations& a, const MlaBuffers& b) {
  SparseMlaParams p;
  p.q = b.q_latent;
  p.rows = b.rows;
  p.heads = config_.num_attention_heads;
  p.width = p.value_dim = config_.kv_lora_rank;
  p.ldq = p.ldo = int64_t{p.heads} * p.width;
  p.scale = 1.0f / std::sqrt(static_cast<float>(config_.qk_head_dim()));
  p.token = a.token;
  p.ldtoken = select_width();
  p.count = a.count;
  p.segment = step.segment;
  p.segments = step.segments;
  p.cache = step.paged_part(layout_.paged()[static_cast<size_t>(latent_part_[index])]);
  p.o = b.o_latent;
  ops_.sparse_mla(p, exec_);
}

// o[h] = v_b[h] o_latent[h]
void Glm5::expand_value(const MlaWeights& w, const MlaBuffers& b) {
  HeadLinearParams p;
  p.w = w.kv_b;
  p.heads = config_.num_attention_heads;
  p.stride_out = config_.qk_nope_head_dim + config_.v_head_dim;
  p.offset = config_.qk_nope_head_dim;
  p.rows_per_head = config_.v_head_dim;
  p.x = b.o_latent;
  p.hx = config_.kv_lora_rank;
  p.ldx = p.heads * p.hx;
  p.y = b.o;
  p.hy = config_.v_head_dim;
  p.ldy = p.heads * p.hy;
  p.rows = b.rows;
  ops_.head_linear(p, exec_);
}

void Glm5::swiglu(float* gate, const float* up, int64_t inner, int32_t rows) {
  SwigluParams p;
  p.gate = p.y = gate;
  p.up = up;
  p.ld = p.ldy = inner;
  p.rows = rows;
  p.dim = static_cast<int32_t>(inner);
  p.limit = config_.swiglu_limit;
  ops_.swiglu(p, exec_);
}

void Glm5::router(size_t index, const MoeWeights& w, const MoeBuffers& b) {
  RouterParams p;
  p.logit = b.logit;
  p.ld = p.experts = config_.n_routed_experts;
  p.bias = w.bias;
  p.rows = b.rows;
  p.topk = config_.num_experts_per_tok;
  p.groups = config_.n_group;
  p.topk_group = config_.topk_group;
  p.norm_topk_prob = config_.norm_topk_prob;
  p.scaling = config_.routed_scaling_factor;
  p.id = b.id;
  p.weight = b.weight;
  if (stream_) {
    p.slots = stream_->look_up();
    p.layer = moe_index_[index];
  } else {
    p.distinct = distinct_;
  }
  if (exchange_) {
    p.owner = exchange_->owners(moe_index_[index]);
    p.rank = info_.rank;
    p.own = b.own;
  }
  ops_.router(p, exec_);
}

void Glm5::find_experts(size_t index, MoeBuffers& b) {
  if (!stream_) return;
  const size_t choices = static_cast<size_t>(b.rows) * static_cast<size_t>(config_.num_experts_per_tok);
  b.waves = stream_->find(moe_index_[index], {b.own, choices}, exec_);
}

void Glm5::fetch_experts(int32_t wave, MoeBuffers& b) {
  b.wave = wave;
  if (stream_) b.wave_id = stream_->fetch(wave, exec_);
}

void Glm5::expert_ffn(const MoeWeights& w, const Activations& a, const MoeBuffers& b) {
  ExpertFfnParams p;
  p.x = a.y;
  p.ldx = p.hidden = config_.hidden_size;
  p.rows = b.rows;
  p.topk = config_.num_experts_per_tok;
  p.id = b.wave_id;
  p.keep_absent = b.wave > 0;
  p.weight = b.weight;
  p.expert = w.resident;
  p.experts = config_.n_routed_experts;
  p.inner = config_.moe_intermediate_size;
  p.limit = config_.swiglu_limit;
  p.out = b.routed;
  ops_.expert_ffn(p, exec_);
}

// The shared expert's output waits in a.block.
void Glm5::expert_sum(Activations& a, const MoeBuffers& b) {
  ExpertSumParams p;
  p.out = b.routed;
  p.shared = p.y = a.block;
  p.rows = b.rows;
  p.topk = config_.num_experts_per_tok;
  p.hidden = config_.hidden_size;
  ops_.expert_sum(p, exec_);
}

void Glm5::hyper_head(const StepView& step, const Activations& a, float* hidden) {
  StageTimer::Scope time(timer_, stage_.norms);
  HyperHeadParams p;
  p.x = a.x;
  p.row_index = step.logits_row;
  p.rows = step.logits_rows;
  p.streams = config_.hc_mult;
  p.hidden = config_.hidden_size;
  p.norm_weight = weights_->norm;
  p.rms_eps = config_.rms_norm_eps;
  p.y = hidden;
  ops_.hyper_head(p, exec_);
}

void Glm5::find_bad(int32_t first, int32_t rows) {
  FiniteParams p;
  p.ld = p.dim = config_.vocab_size;
  p.x = logits_ + first * p.ld;
  p.rows = rows;
  p.bad = bad_ + first;
  ops_.find_bad(p, exec_);
}

void Glm5::draw(int32_t first, int32_t rows, const SamplingParams* sampling, const uint64_t* counter,
                int32_t* token) {
  SampleParams p;
  p.ld = p.vocab = config_.vocab_size;
  p.logits = logits_ + first * p.ld;
  p.rows = rows;
  p.sampling = sampling;
  p.counter = counter;
  p.token = token;
  ops_.sample(p, exec_);
}

}  // namespace rocket::glm5
