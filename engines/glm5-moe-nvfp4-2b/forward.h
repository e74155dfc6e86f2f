// The forward pass of glm5_next.
#pragma once

#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "base/arena.h"
#include "experts/trace.h"
#include "experts/usage.h"
#include "fabric/device_exchange.h"
#include "glm5-moe-nvfp4-2b/config.h"
#include "glm5-moe-nvfp4-2b/loader.h"
#include "glm5-moe-nvfp4-2b/weights.h"
#include "ops/table.h"
#include "runtime/backend.h"
#include "runtime/model.h"

namespace rocket::glm5 {

// What a run may round.
struct Precision {
  bool bf16_prefill = false;  // prompts on tensor cores
  bool bf16_latents = false;  // latent KV
};

class Glm5 : public Model {
 public:
  Glm5(const Config& config, const Precision& precision, std::unique_ptr<LoadedWeights> weights,
       std::unique_ptr<Backend> backend, int32_t max_rows, int64_t max_context);

  // Bytes of workspace that a model with weights of these shapes needs for steps of max_rows rows, logits included.
  static int64_t workspace_bytes(const Config& config, const Weights& shapes, Backend& backend,
                                 int32_t max_rows, int64_t max_context);
  static StateLayout state_layout(const Config& config, const Precision& precision);
  static int32_t logits_rows(const Config& config, int32_t max_rows);

  const StateLayout& layout() const override { return layout_; }
  const EngineInfo& info() const override { return info_; }
  EngineInfo& info() { return info_; }
  // Before the first step, where several ranks share the experts, and with a share's config the dense weights.
  // Gives back how rows cross, for people.
  std::string join(Fabric& fabric, const ExpertSplit& split);
  uint64_t fingerprint() const override { return loaded_->weights.fingerprint; }
  int32_t max_logits_rows() const override { return logits_rows(config_, max_rows_); }
  MemorySpace& memory() override { return backend_->memory(); }
  bool rounds_prefill() const override { return precision_.bf16_prefill; }
  void forward(const StepPlan& plan) override;
  const float* logits(int32_t rows) override;
  int32_t first_bad_logits(int32_t rows) override;
  void sample(const Draw* draws, int32_t count, int32_t* token) override;
  void drawn(int32_t rows, int32_t* token) override;
  EngineStats stats() override;
  bool hint(int32_t layer, std::span<const int32_t> experts) override;
  StageTimer& timer() override { return timer_; }
  void set_profile(bool on) override;
  void set_diagnostics(bool on) override;
  std::vector<LayerDiagnostics> diagnostics() const override { return diagnostics_; }
  void start_trace(const std::string& file) override;
  int64_t stop_trace() override;
  void set_record(bool on) override;
  const StepRecord& record() const override { return record_; }

 private:
  // What lives as long as a step: residual streams, the block's input and output, mixing weights, the
  // selected tokens.
  struct Activations {
    int32_t rows = 0;
    float* x = nullptr;        // [rows, N, H] residual streams
    float* next = nullptr;     // [rows, N, H] where hyper_pre leaves them after a block that is to be added
    bool added = true;         // the last block's output; else the next hyper_pre adds it
    float* y = nullptr;        // [rows, H] normed input of the block
    float* block = nullptr;    // [rows, H] output of the block
    float* post = nullptr;     // [rows, N]
    float* comb = nullptr;     // [rows, N, N]
    int32_t* token = nullptr;  // [rows, select_width] selected positions, from the last layer with an indexer
    int32_t* count = nullptr;  // [rows]
  };
  struct Shape {};  // tag: shapes of weights only, to measure
  Glm5(Shape, const Config& config, const Weights& shapes, Backend& backend, int32_t max_rows,
       int64_t max_context);

  struct KdaBuffers {
    int32_t rows;
    float* raw;    // [rows, 3C] q, k, v before the convolution
    float* qkv;    // [rows, 3C] after it
    float* f_low;  // [rows, D]
    float* g_low;  // [rows, D]
    float* beta;   // [rows, heads]
    float* decay;  // [rows, C] log-decay of each key channel
    float* gate;   // [rows, C]
    float* o;      // [rows, C]
  };
  struct MlaBuffers {
    int32_t rows;
    float* q_low;        // [rows, q_lora]
    float* latent;       // [rows, kv_lora]
    float* q;            // [rows, heads, qk]
    float* q_latent;     // [rows, heads, kv_lora] q folded through k_b
    float* o_latent;     // [rows, heads, kv_lora]
    float* o;            // [rows, heads, v]
    float* index_q;      // [rows, index heads, D]
    float* index_k;      // [rows, D]
    float* index_gate;   // [rows, D]
    float* head_weight;  // [rows, index heads]
  };
  struct MlpBuffers {
    int64_t inner;
    float* gate;  // [rows, inner]
    float* up;    // [rows, inner]
  };
  struct MoeBuffers {
    int32_t rows;
    float* logit;   // [rows, E]
    int32_t* id;    // [rows, topk]
    int32_t* own;   // [rows, topk] those of this rank's experts, -1 = another's; id itself where it has all
    float* wire;    // rows from and for other ranks; null where there are none
    float* weight;  // [rows, topk]
    float* routed;  // [rows, topk, H] unsummed
    // Experts that are not resident come in waves; each computes its own of these.
    int32_t waves, wave;     // how many there may be, and the one in hand
    const int32_t* wave_id;  // [rows, topk] of the wave in hand, -1 = another's
  };

  // forward.cpp: what happens, in data order.
  void pass(const StepView& step);
  void layer(size_t index, const StepView& step, Activations& a);
  void kda(size_t index, const KdaWeights& w, const StepView& step, Activations& a);
  void mla(size_t index, const MlaWeights& w, const StepView& step, Activations& a);
  void select(size_t index, const IndexerWeights& w, const StepView& step, Activations& a,
              const MlaBuffers& b);
  void mlp(const MlpWeights& w, const MlpBuffers& b, const Activations& a, float* out);
  void moe(size_t index, const MoeWeights& w, Activations& a);
  void head(const StepView& step, Activations& a);

  // calls.cpp: buffers, and the params of each op.
  Activations activations(int32_t rows);
  KdaBuffers kda_buffers(int32_t rows);
  MlaBuffers mla_buffers(int32_t rows);
  MlpBuffers mlp_buffers(int32_t rows, int64_t inner);
  MoeBuffers moe_buffers(int32_t rows);
  void embed(const StepView& step, Activations& a);
  void hyper_pre(const HyperWeights& w, Activations& a);
  void hyper_post(Activations& a);
  void add_block(Activations& a);
  void linear(const float* x, int64_t ldx, int32_t rows, std::initializer_list<LinearPart> parts);
  struct Norm {
    float* x;  // [rows, dim], in place
    int64_t dim;
    const float* weight;  // null: this one is left out
    float eps;
    const float* bias = nullptr;
  };
  void norm(int32_t rows, std::initializer_list<Norm> norms);
  KdaConvParams kda_conv(size_t index, const KdaWeights& w, const StepView& step, const KdaBuffers& b) const;
  KdaGatesParams kda_gates(const KdaWeights& w, const KdaBuffers& b) const;
  KdaRecurrenceParams kda_recurrence(size_t index, const StepView& step, const KdaBuffers& b) const;
  GatedNormParams gated_norm(const KdaWeights& w, const KdaBuffers& b) const;
  void kda_head(size_t index, const KdaWeights& w, const StepView& step, const KdaBuffers& b);
  void latent_append(size_t index, const StepView& step, const MlaBuffers& b);
  void pool_update(size_t index, const IndexerWeights& w, const StepView& step, const MlaBuffers& b);
  void index_select(size_t index, const StepView& step, Activations& a, const MlaBuffers& b);
  void fold_query(const MlaWeights& w, const MlaBuffers& b);
  void sparse_mla(size_t index, const StepView& step, const Activations& a, const MlaBuffers& b);
  void expand_value(const MlaWeights& w, const MlaBuffers& b);
  void swiglu(float* gate, const float* up, int64_t inner, int32_t rows);
  void router(size_t index, const MoeWeights& w, const MoeBuffers& b);
  void find_experts(size_t index, MoeBuffers& b);
  void fetch_experts(int32_t wave, MoeBuffers& b);
  void expert_ffn(const MoeWeights& w, const Activations& a, const MoeBuffers& b);
  void expert_sum(Activations& a, const MoeBuffers& b);
  void find_bad(int32_t first, int32_t rows);
  void draw(int32_t first, int32_t rows, const SamplingParams* sampling, const uint64_t* counter,
            int32_t* token);
  void hyper_head(const StepView& step, const Activations& a, float* hidden);

  // exchange.cpp: what crosses between ranks.
  void share_rows(size_t index, MoeBuffers& b);
  void send_rows(const MoeBuffers& b);
  void take_rows(const MoeBuffers& b);
  void sum_parts(float* x, int32_t rows, const char* what);
  float* own_logits(const StepView& step);
  void join_logits(const StepView& step, const float* mine);

  void find_parts();
  void add_stages();
  void take_results();
  void collect_times();
  int64_t op_scratch_bytes(int threads) const;
  void diagnose(size_t index, const StepView& step, const Activations& a);
  template <typename T>
  std::vector<T> read(const T* from, int64_t count);
  void update_replay() { backend_->set_replay(!timer_.on() && !diagnose_ && !recording_ && !trace_); }
  void trace_rows(const StepPlan& plan);
  void record_router(size_t index, const MoeBuffers& b);
  void record_selected(const StepView& step, const Activations& a);

  int64_t select_width() const { return config_.index_topk + config_.index_kpool; }

  Config config_;  // of this rank: heads and columns are those that it has
  StateLayout layout_;
  Precision precision_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<LoadedWeights> loaded_;
  const Weights* weights_ = nullptr;
  OpTable ops_;
  Arena workspace_;
  Exec exec_;
  int32_t max_rows_;
  int64_t max_context_;
  bool measuring_ = false;

  EngineInfo info_;
  StageTimer timer_;
  std::unique_ptr<ExpertUsage> usage_;     // of experts that are used in place
  ExpertStream* stream_ = nullptr;         // null: every expert is resident or in place
  std::unique_ptr<RowExchange> exchange_;  // null: this rank has every expert
  std::unique_ptr<PartExchange> parts_;    // null: it has the dense weights whole
  std::unique_ptr<TraceWriter> trace_;
  bool diagnose_ = false, recording_ = false;
  std::vector<LayerDiagnostics> diagnostics_;
  StepRecord record_;

  // Stages of the timer, and where each layer keeps its state (parts of layout_).
  struct {
    int embed, hyper, norms, kda, mla, mlp, moe, head;
  } stage_{};
  std::vector<int> state_part_;   // [layers] first recurrent part
  std::vector<int> latent_part_;  // [layers] first paged part
  std::vector<int> moe_index_;    // [layers] number among the MoE layers
  size_t latent_layers_ = 0;      // sparse-MLA layers

  // In the backend's memory, for as long as the model lives.
  float* logits_ = nullptr;             // [max_logits_rows, vocab]
  int32_t* bad_ = nullptr;              // [max_logits_rows], 1 where logits are not finite
  int32_t* token_ = nullptr;            // [max_logits_rows] that were drawn last, right behind bad_
  int64_t* distinct_ = nullptr;         // [1] distinct experts of all steps and layers so far
  SamplingParams* sampling_ = nullptr;  // [max_logits_rows] of the draws in hand
  uint64_t* counter_ = nullptr;         // [max_logits_rows]
  std::vector<float> host_logits_;
  std::vector<int32_t> known_bad_;  // of the last step's rows, where they came with its tokens
};

template <typename T>
std::vector<T> Glm5::read(const T* from, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  backend_->memory().read(values.data(), from, values.size() * sizeof(T));
  return values;
}

}  // namespace rocket::glm5
