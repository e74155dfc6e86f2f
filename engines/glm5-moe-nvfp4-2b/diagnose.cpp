// Counters, diagnostics and recording of a step's intermediate results.
#include <cmath>

#include "glm5-moe-nvfp4-2b/forward.h"

namespace rocket::glm5 {

void Glm5::diagnose(size_t index, const StepPlan& step, const Activations& a) {
  if (measuring_) return;
  const int64_t N = config_.hc_mult, H = config_.hidden_size;
  const float* last = a.x + (step.rows() - 1) * N * H;
  double sum = 0;
  for (int64_t i = 0; i < H; ++i) {
    double mean = 0;
    for (int64_t n = 0; n < N; ++n) mean += last[n * H + i];
    sum += mean / N * (mean / N);
  }
  diagnostics_[index].stream_mean_rms = std::sqrt(sum / H);
  if (!config_.is_moe[index]) diagnostics_[index].router_entropy = -1;
  if (!recording_) return;
  if (index == 0) record_.hidden.clear();
  record_.hidden.emplace_back(a.x, a.x + int64_t{a.rows} * N * H);
}

void Glm5::record_router(size_t index, const MoeBuffers& b) {
  if (measuring_) return;
  const int32_t topk = config_.num_experts_per_tok, rows = b.rows;
  usage_->count(moe_index_[index], b.id, int64_t{rows} * topk, stats_);
  if (!diagnose_ && !recording_) return;
  double entropy = 0;
  for (int32_t r = 0; r < rows; ++r) {
    double total = 0;
    for (int32_t j = 0; j < topk; ++j) total += b.weight[r * topk + j];
    for (int32_t j = 0; j < topk; ++j) {
      const double p = b.weight[r * topk + j] / total;
      if (p > 0) entropy -= p * std::log(p);
    }
  }
  diagnostics_[index].router_entropy = entropy / rows;
  if (!recording_) return;
  if (moe_index_[index] == 0) {
    record_.expert_id.clear();
    record_.expert_weight.clear();
  }
  record_.expert_id.emplace_back(b.id, b.id + rows * topk);
  record_.expert_weight.emplace_back(b.weight, b.weight + rows * topk);
}

void Glm5::record_selected(const StepPlan& step, const Activations& a) {
  if (measuring_) return;
  if (record_.selected.size() >= latent_layers_) record_.selected.clear();
  std::vector<int32_t> rows(a.count, a.count + step.rows());
  for (int32_t r = 0; r < step.rows(); ++r) {
    const int32_t* token = a.token + r * select_width();
    rows.insert(rows.end(), token, token + a.count[r]);
  }
  record_.selected.push_back(std::move(rows));
}

}  // namespace rocket::glm5
