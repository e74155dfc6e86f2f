// What a glm5_next model needs besides its weights: state of streams, workspace, stages of the timer.
#include <algorithm>
#include <cmath>
#include <string>

#include "glm5-moe-nvfp4-2b/forward.h"

namespace rocket::glm5 {
namespace {

constexpr int64_t kLogitsBytes = 32 << 20;  // bounds the logits of one step, however large the vocabulary

std::string layers(const char* name, int64_t count) {
  return std::string(name) + ", " + std::to_string(count) + (count == 1 ? " layer" : " layers");
}

}  // namespace

// Parts come in the order of the layers: "kda/i" and "conv/i", or "pool/i"; paged: "latent/i", then
// "pooled/i".
StateLayout Glm5::state_layout(const Config& c, const Precision& precision) {
  StateLayout layout;
  for (int32_t i = 0; i < c.num_hidden_layers; ++i) {
    const std::string n = std::to_string(i);
    if (c.is_kda[static_cast<size_t>(i)]) {
      layout.add_recurrent("kda/" + n, {c.linear_num_heads, c.linear_head_dim, c.linear_head_dim});
      layout.add_recurrent("conv/" + n, {c.linear_conv_kernel_dim - 1, 3 * int64_t{c.kda_channels()}});
      continue;
    }
    layout.add_paged("latent/" + n, 1, c.kv_lora_rank, precision.bf16_latents);
    if (!c.indexer_full[static_cast<size_t>(i)]) continue;
    layout.add_recurrent("pool/" + n, {2, c.index_kpool, c.index_head_dim});
    layout.add_paged("pooled/" + n, c.index_kpool, c.index_head_dim);
  }
  layout.finish();
  return layout;
}

int32_t Glm5::logits_rows(const Config& c, int32_t max_rows) {
  const int64_t fit = kLogitsBytes / (int64_t{c.vocab_size} * 4);
  return static_cast<int32_t>(std::min<int64_t>(max_rows, std::max<int64_t>(16, fit)));
}

// Where each layer keeps its state: the index of its first recurrent and paged part.
void Glm5::find_parts() {
  int recurrent = 0, paged = 0, moe = 0;
  for (size_t i = 0; i < config_.is_kda.size(); ++i) {
    state_part_.push_back(recurrent);
    latent_part_.push_back(paged);
    moe_index_.push_back(moe);
    moe += config_.is_moe[i];
    if (config_.is_kda[i]) {
      recurrent += 2;
    } else {
      ++latent_layers_;
      paged += config_.indexer_full[i] ? 2 : 1;
      recurrent += config_.indexer_full[i];
    }
  }
}

void Glm5::add_stages() {
  const int64_t all = config_.num_hidden_layers;
  const int64_t kda = std::count(config_.is_kda.begin(), config_.is_kda.end(), true);
  const int64_t moe = std::count(config_.is_moe.begin(), config_.is_moe.end(), true);
  stage_.embed = timer_.add("embed");
  stage_.hyper = timer_.add("hyper-connections with block norms, " + std::to_string(2 * all) + " sites");
  stage_.norms = timer_.add("norms (final)");
  stage_.kda = timer_.add(layers("KDA", kda));
  stage_.mla = timer_.add(layers("sparse MLA + DSA indexer", all - kda));
  stage_.mlp = timer_.add(layers("dense MLP", all - moe));
  stage_.moe = timer_.add(layers("MoE", moe));
  stage_.head = timer_.add("lm_head + sampling");
}

// The largest scratch that one op takes on top of the forward pass's own buffers.
int64_t Glm5::op_scratch_bytes(int threads) const {
  const Config& c = config_;
  const int64_t R = max_rows_;
  const int64_t pools = max_context_ / c.index_kpool + 1;
  int64_t bytes = kda_recurrence_scratch_floats(R, c.linear_num_heads, c.linear_head_dim) * 4;
  bytes = std::max(bytes, index_select_scratch_bytes(R, pools));
  bytes = std::max(bytes, sparse_mla_scratch_floats(c.num_attention_heads, select_width(), threads) * 4);
  const int64_t widest =
      std::max({c.hidden_size, c.intermediate_size, c.moe_intermediate_size * c.n_shared_experts,
                c.q_lora_rank, c.kda_channels(), c.num_attention_heads * c.v_head_dim});
  bytes = std::max(bytes, linear_scratch_bytes(R, widest));
  bytes = std::max(bytes, expert_ffn_scratch_bytes(R, c.num_experts_per_tok, c.n_routed_experts,
                                                   c.hidden_size, c.moe_intermediate_size));
  return bytes + (1 << 20);  // ops round their pieces up
}

Glm5::Glm5(Shape, const Config& config, const Weights& shapes, Backend& backend, int32_t max_rows,
           int64_t max_context)
    : config_(config),
      layout_(state_layout(config, {})),
      weights_(&shapes),
      ops_(backend.measuring_ops()),
      workspace_(Arena::measuring()),
      exec_(backend.exec()),
      max_rows_(max_rows),
      max_context_(max_context),
      measuring_(true) {
  find_parts();
  add_stages();
  exec_.scratch = &workspace_;
  exec_.measure = true;
}

// What lives as long as the model: logits and what is read back of a step.
void Glm5::take_results() {
  const int64_t rows = logits_rows(config_, max_rows_);
  logits_ = workspace_.take<float>(rows * config_.vocab_size);
  bad_ = workspace_.take<int32_t>(2 * rows);
  token_ = bad_ + rows;
  distinct_ = workspace_.take<int64_t>(1);
  sampling_ = workspace_.take<SamplingParams>(rows);
  counter_ = workspace_.take<uint64_t>(rows);
}

int64_t Glm5::workspace_bytes(const Config& config, const Weights& shapes, Backend& backend, int32_t max_rows,
                              int64_t max_context) {
  Glm5 model(Shape{}, config, shapes, backend, max_rows, max_context);
  model.take_results();
  // The forward pass itself, with ops that compute nothing, tells what it takes.
  for (const bool tensor_cores : {false, true}) {
    model.exec_.tensor_cores = tensor_cores;
    StepView step;
    step.rows = max_rows;
    step.segments = max_rows;
    step.logits_rows = logits_rows(config, max_rows);
    step.sampling = model.sampling_;
    step.counter = model.counter_;
    model.pass(step);
  }
  // The CPU's ops say in formulas what they take.
  const auto peak = static_cast<int64_t>(model.workspace_.peak());
  return backend.memory().host() ? peak + model.op_scratch_bytes(model.exec_.pool->threads()) : peak;
}

Glm5::Glm5(const Config& config, const Precision& precision, std::unique_ptr<LoadedWeights> weights,
           std::unique_ptr<Backend> backend, int32_t max_rows, int64_t max_context)
    : config_(config),
      layout_(state_layout(config, precision)),
      precision_(precision),
      backend_(std::move(backend)),
      loaded_(std::move(weights)),
      weights_(&loaded_->weights),
      ops_(backend_->ops()),
      exec_(backend_->exec()),
      max_rows_(max_rows),
      max_context_(max_context),
      timer_(&backend_->clock()) {
  find_parts();
  add_stages();
  workspace_ =
      Arena(static_cast<size_t>(workspace_bytes(config, loaded_->weights, *backend_, max_rows, max_context)),
            "workspace", memory());
  exec_.scratch = &workspace_;
  take_results();
  const int32_t moe_layers =
      static_cast<int32_t>(std::count(config.is_moe.begin(), config.is_moe.end(), true));
  const Weights& w = loaded_->weights;
  stream_ = loaded_->stream.get();
  if (w.experts_in_place) usage_ = std::make_unique<ExpertUsage>(moe_layers, config.n_routed_experts);
  diagnostics_.resize(config.is_kda.size());

  info_.chemistry = config.model_type;
  info_.backend = backend_->name();
  info_.device = backend_->device();
  info_.prefill_precision = precision.bf16_prefill ? "bf16" : "f32";
  info_.kv_dtype = precision.bf16_latents ? "bf16" : "f32";
  info_.vocab = config.vocab_size;
  info_.hidden = config.hidden_size;
  info_.layers = config.num_hidden_layers;
  info_.moe_layers = moe_layers;
  info_.experts = config.n_routed_experts;
  info_.topk = config.num_experts_per_tok;
  info_.threads = exec_.pool->threads();
  info_.dense_bytes = w.dense_bytes;
  info_.expert_bytes = w.expert_bytes;
  info_.boosters = w.ranks;
  info_.split_dense = config.dense_ranks > 1;
  info_.experts_owned = w.experts_owned;
  info_.owned_bytes = w.owned_bytes;
  info_.slot_bytes = w.slot_bytes;
  info_.slots = w.experts_owned;
  info_.token_bytes = w.token_bytes;
  info_.workspace_bytes = static_cast<int64_t>(workspace_.capacity());
  info_.draft_tensors = w.draft_tensors;
  info_.draft_bytes = w.draft_bytes;
  info_.vision_tensors = w.vision_tensors;
  info_.vision_bytes = w.vision_bytes;
}

}  // namespace rocket::glm5
