// Counters, diagnostics and recording of a step's intermediate results.
#include <cmath>

#include "glm5-moe-nvfp4-2b/forward.h"

namespace rocket::glm5 {

void Glm5::diagnose(size_t index, const StepView& step, const Activations& a) {
  if (measuring_) return;
  const int64_t N = config_.hc_mult, H = config_.hidden_size;
  const std::vector<float> last = read(a.x + (step.rows - 1) * N * H, N * H);
  double sum = 0;
  for (int64_t i = 0; i < H; ++i) {
    double mean = 0;
    for (int64_t n = 0; n < N; ++n) mean += last[static_cast<size_t>(n * H + i)];
    sum += mean / N * (mean / N);
  }
  diagnostics_[index].stream_mean_rms = std::sqrt(sum / H);
  if (!config_.is_moe[index]) diagnostics_[index].router_entropy = -1;
  if (!recording_) return;
  if (index == 0) record_.hidden.clear();
  record_.hidden.push_back(read(a.x, int64_t{a.rows} * N * H));
}

void Glm5::trace_rows(const StepPlan& plan) {
  std::vector<TraceRow> rows;
  for (size_t s = 0; s < plan.segment.size(); ++s) {
    const Segment& segment = plan.segment[s];
    for (int32_t i = 0; i < segment.rows; ++i) {
      const RowKind kind = plan.kind[static_cast<size_t>(segment.first_row + i)];
      rows.push_back({0, static_cast<uint32_t>(plan.stream_id[s]),
                      static_cast<uint32_t>(segment.position + i), kind == RowKind::kPrefill});
    }
  }
  trace_->begin_step(rows);
}

void Glm5::record_router(size_t index, const MoeBuffers& b) {
  if (measuring_) return;
  const int32_t topk = config_.num_experts_per_tok, rows = b.rows;
  if (usage_) usage_->count(moe_index_[index], b.own, int64_t{rows} * topk);
  if (trace_) trace_->layer(moe_index_[index], read(b.id, int64_t{rows} * topk));
  if (!diagnose_ && !recording_) return;
  const std::vector<float> weights = read(b.weight, int64_t{rows} * topk);
  double entropy = 0;
  for (int32_t r = 0; r < rows; ++r) {
    double total = 0;
    const float* row = weights.data() + r * topk;
    for (int32_t j = 0; j < topk; ++j) total += row[j];
    for (int32_t j = 0; j < topk; ++j) {
      const double p = row[j] / total;
      if (p > 0) entropy -= p * std::log(p);
    }
  }
  diagnostics_[index].router_entropy = entropy / rows;
  if (!recording_) return;
  if (moe_index_[index] == 0) {
    record_.expert_id.clear();
    record_.expert_weight.clear();
  }
  record_.expert_id.push_back(read(b.id, int64_t{rows} * topk));
  record_.expert_weight.push_back(weights);
}

void Glm5::record_selected(const StepView& step, const Activations& a) {
  if (measuring_) return;
  if (record_.selected.size() >= latent_layers_) record_.selected.clear();
  const std::vector<int32_t> count = read(a.count, step.rows);
  const std::vector<int32_t> token = read(a.token, step.rows * select_width());
  std::vector<int32_t> rows = count;
  for (int32_t r = 0; r < step.rows; ++r) {
    const auto first = token.begin() + r * select_width();
    rows.insert(rows.end(), first, first + count[static_cast<size_t>(r)]);
  }
  record_.selected.push_back(std::move(rows));
}

}  // namespace rocket::glm5
