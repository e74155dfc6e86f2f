// What crosses between ranks in the midst of a step: rows of experts, parts of sums, columns of logits. Where there is
// one rank nothing does.
#include <algorithm>
#include <string>
#include <utility>

#include "glm5-moe-nvfp4-2b/forward.h"

namespace rocket::glm5 {

std::string Glm5::join(Fabric& fabric, const ExpertSplit& split) {
  std::vector<int32_t> numbers;
  for (size_t i = 0; i < config_.is_moe.size(); ++i) {
    if (config_.is_moe[i]) numbers.push_back(static_cast<int32_t>(i));
  }
  ExchangeConfig shape;
  shape.split = split;
  shape.topk = config_.num_experts_per_tok;
  shape.hidden = config_.hidden_size;
  shape.numbers = std::move(numbers);
  shape.max_rows = max_rows_;
  shape.split_dense = config_.dense_ranks > 1;
  shape.part_floats = std::max(int64_t{max_rows_} * config_.hidden_size,
                               logits_rows(config_, max_rows_) * int64_t{config_.head_rows()});
  Exchange exchange = make_exchange(fabric, shape, exec_, memory());
  exchange_ = std::move(exchange.rows);
  parts_ = std::move(exchange.parts);
  info_.rank = fabric.rank();
  return exchange.about;
}

void Glm5::share_rows(size_t index, MoeBuffers& b) {
  const size_t choices = static_cast<size_t>(b.rows) * static_cast<size_t>(config_.num_experts_per_tok);
  if (exchange_) exchange_->begin(moe_index_[index], {b.id, choices}, b.own, b.wire);
}

void Glm5::send_rows(const MoeBuffers& b) {
  if (exchange_) exchange_->send(b.routed);
}

void Glm5::take_rows(const MoeBuffers& b) {
  if (exchange_) exchange_->finish(b.routed);
}

// Each rank's product with its columns of a weight is a summand.
void Glm5::sum_parts(float* x, int32_t rows, const char* what) {
  if (config_.dense_ranks == 1) return;
  ArenaScope scope(workspace_);
  const int64_t H = config_.hidden_size;
  float* const buffer = workspace_.take<float>(PartExchange::buffer_floats(config_.dense_ranks, rows, H));
  if (parts_) parts_->sum(x, rows, H, buffer, what);
}

// Where this rank puts its columns of a step's logits.
float* Glm5::own_logits(const StepView& step) {
  if (config_.dense_ranks == 1) return logits_ + step.first_logit * int64_t{config_.vocab_size};
  return workspace_.take<float>(step.logits_rows * int64_t{config_.head_rows()});
}

void Glm5::join_logits(const StepView& step, const float* mine) {
  if (config_.dense_ranks == 1) return;
  const int64_t rows = step.logits_rows, columns = config_.head_rows();
  float* const buffer =
      workspace_.take<float>(PartExchange::buffer_floats(config_.dense_ranks, rows, columns));
  float* const all = logits_ + step.first_logit * int64_t{config_.vocab_size};
  if (parts_) parts_->join(mine, rows, columns, all, buffer, "logits");
}

}  // namespace rocket::glm5
