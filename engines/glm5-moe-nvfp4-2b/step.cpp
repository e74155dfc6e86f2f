// A step from the session's side: issuing it, and what is read back of it.
#include <algorithm>
#include <string>

#include "base/error.h"
#include "glm5-moe-nvfp4-2b/forward.h"

namespace rocket::glm5 {

void Glm5::forward(const StepPlan& plan) {
  const StepView step = backend_->stage(plan);
  exec_.tensor_cores = plan.tensor_cores;
  const Backend::Key key{step.rows,         step.logits_rows,
                         step.first_logit,  step.embedding != nullptr,
                         plan.tensor_cores, step.sampling != nullptr};
  known_bad_.clear();
  if (stream_ && !plan.continues) stream_->begin_step();
  if (stream_) stream_->begin_pass();
  if (exchange_) exchange_->begin_step();
  if (parts_) parts_->begin_step();
  if (trace_) trace_rows(plan);
  backend_->run(key, [&] { pass(step); });
  // Between ranks each wait has a limit; that for experts, which may come behind the rows of others, has none.
  if (exchange_) exchange_->end_step();
  if (stream_) stream_->end_pass();
  if (weights_->experts_in_place)
    loaded_->checkpoint->check_unchanged();  // before anybody sees what came of it
  if (trace_) {
    trace_->end_step();
    trace_->flush();
  }
  collect_times();
}

const float* Glm5::logits(int32_t rows) {
  if (memory().host()) return logits_;
  host_logits_.resize(static_cast<size_t>(rows) * static_cast<size_t>(config_.vocab_size));
  memory().read(host_logits_.data(), logits_, host_logits_.size() * sizeof(float));
  return host_logits_.data();
}

int32_t Glm5::first_bad_logits(int32_t rows) {
  std::vector<int32_t> bad(static_cast<size_t>(rows));
  if (known_bad_.size() == bad.size()) {
    bad = known_bad_;
  } else {
    bad = read(bad_, rows);
  }
  for (int32_t row = 0; row < rows; ++row) {
    if (bad[static_cast<size_t>(row)]) return row;
  }
  return -1;
}

// The tokens lie behind the flags of bad logits, so that one copy brings both.
void Glm5::drawn(int32_t rows, int32_t* token) {
  const int64_t between = token_ - bad_;
  const std::vector<int32_t> all = read(bad_, between + rows);
  known_bad_.assign(all.begin(), all.begin() + rows);
  std::copy(all.begin() + between, all.end(), token);
}

// Rows that lie one after the other are drawn together.
void Glm5::sample(const Draw* draws, int32_t count, int32_t* token) {
  std::vector<SamplingParams> sampling;
  std::vector<uint64_t> counter;
  for (int32_t i = 0; i < count; ++i) {
    sampling.push_back(draws[i].sampling);
    counter.push_back(draws[i].counter);
  }
  for (int32_t first = 0, end = 0; first < count; first = end) {
    end = first + 1;
    while (end < count && end - first < logits_rows(config_, max_rows_) &&
           draws[end].row == draws[end - 1].row + 1)
      ++end;
    const int32_t rows = end - first;
    memory().write(sampling_, sampling.data() + first, static_cast<size_t>(rows) * sizeof(SamplingParams));
    memory().write(counter_, counter.data() + first, static_cast<size_t>(rows) * sizeof(uint64_t));
    draw(draws[first].row, rows, sampling_, counter_, token_);
    memory().read(token + first, token_, static_cast<size_t>(rows) * sizeof(int32_t));
  }
  collect_times();
}

void Glm5::collect_times() {
  if (!timer_.on()) return;
  backend_->wait();
  timer_.collect();
}

EngineStats Glm5::stats() {
  EngineStats all;
  const Backend::ReplayCounts replays = backend_->replays();
  all.steps_recorded = replays.recorded;
  all.steps_replayed = replays.replayed;
  if (!usage_ && !stream_) {
    all.expert_hits = read(distinct_, 1)[0];  // every expert is resident
    return all;
  }
  const StreamStats stats = stream_ ? stream_->stats() : StreamStats{usage_->layer_counters()};
  for (size_t i = 0; i < config_.is_moe.size(); ++i) {
    if (!config_.is_moe[i]) continue;
    const CacheCounters& c = stats.layers[static_cast<size_t>(moe_index_[i])];
    all.expert_layers.push_back({static_cast<int32_t>(i), c.hits, c.misses, c.evictions});
    all.expert_hits += c.hits;
    all.expert_misses += c.misses;
    all.expert_evictions += c.evictions;
    all.expert_hints.taken += c.hints_taken;
    all.expert_hints.useful += c.hints_useful;
    all.expert_hints.late += c.hints_late;
    all.expert_hints.wasted += c.hints_wasted;
  }
  all.expert_hints.on_their_way = stats.hints_on_their_way;
  all.expert_hints.there = stats.hints_there;
  all.expert_hints.useful_bytes = stats.hint_bytes.useful;
  all.expert_hints.late_bytes = stats.hint_bytes.late;
  all.expert_hints.wasted_bytes = stats.hint_bytes.wasted;
  all.fetch_seconds = stats.fetch_seconds;
  all.streamed_bytes = stream_ ? stats.streamed_bytes : all.expert_misses * info_.slot_bytes;
  return all;
}

// Of several ranks each takes the hints of its own experts.
bool Glm5::hint(int32_t layer, std::span<const int32_t> experts) {
  if (layer < 0 || layer >= info_.layers || !config_.is_moe[static_cast<size_t>(layer)])
    throw InputError("hint: expected the number of an MoE layer, found " + std::to_string(layer));
  for (const int32_t expert : experts) {
    if (expert >= 0 && expert < config_.n_routed_experts) continue;
    throw InputError("hint: expected an expert from 0 to " + std::to_string(config_.n_routed_experts - 1) +
                     ", found " + std::to_string(expert));
  }
  if (!stream_) return false;
  const int32_t index = moe_index_[static_cast<size_t>(layer)];
  std::vector<int32_t> own(experts.begin(), experts.end());
  if (exchange_) std::erase_if(own, [&](int32_t expert) { return !exchange_->owns(index, expert); });
  return stream_->hint(index, own);
}

void Glm5::set_profile(bool on) {
  backend_->wait();
  timer_.set(on);
  update_replay();
}

void Glm5::set_diagnostics(bool on) {
  diagnose_ = on;
  update_replay();
}

void Glm5::start_trace(const std::string& file) {
  TraceHeader header;
  header.experts = config_.n_routed_experts;
  header.topk = config_.num_experts_per_tok;
  header.fingerprint = fingerprint();
  for (size_t i = 0; i < config_.is_moe.size(); ++i) {
    if (config_.is_moe[i]) header.layers.push_back(static_cast<int32_t>(i));
  }
  trace_.reset();
  trace_ = std::make_unique<TraceWriter>(file, std::move(header));
  update_replay();
}

int64_t Glm5::stop_trace() {
  const std::unique_ptr<TraceWriter> trace = std::move(trace_);
  update_replay();
  if (!trace) return 0;
  trace->close();
  return trace->rows();
}

void Glm5::set_record(bool on) {
  recording_ = on;
  update_replay();
}

}  // namespace rocket::glm5
