// Streams, steps, checkpoints and snapshots over a Model: the Engine that programs see.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/model.h"

namespace rocket {

struct SessionLimits {
  int64_t max_context = 0;
  int32_t max_rows = 0;
  int32_t max_streams = 0;
  int64_t state_budget_bytes = 0;  // streams, checkpoints and snapshots together
};

class Session : public Engine {
 public:
  Session(std::unique_ptr<Model> model, const SessionLimits& limits);

  const EngineInfo& info() const override { return info_; }
  EngineInfo& info() { return info_; }
  // Its steps compute no logits from here on: another rank draws.
  void set_silent() { silent_ = true; }
  StreamId open() override;
  void close(StreamId stream) override;
  int64_t position(StreamId stream) const override;
  StreamId fork(StreamId stream) override;
  StepResult step(const Step& step) override { return run(step, nullptr); }
  std::vector<int32_t> step_and_sample(const Step& step,
                                       const std::vector<SamplingParams>& sampling) override;
  const float* logits() override;
  void commit(StreamId stream, int32_t rows) override;
  void snapshot(StreamId stream, const std::string& name) override;
  StreamId restore(const std::string& name) override;
  void drop_snapshot(const std::string& name) override;
  std::vector<std::string> snapshots() const override;
  void save_snapshot(const std::string& name, const std::string& file) override;
  void load_snapshot(const std::string& name, const std::string& file) override;
  void truncate(StreamId stream, int64_t position) override;
  int32_t sample(int32_t logits_row, const SamplingParams& sampling, uint64_t counter) override {
    return sample({{logits_row, sampling, counter}})[0];
  }
  std::vector<int32_t> sample(const std::vector<Draw>& draws) override;
  std::vector<float> state(StreamId stream, const std::string& name) const override;
  bool hint(int32_t layer, std::span<const int32_t> experts) override { return model_->hint(layer, experts); }
  EngineStats stats() override;
  void set_profile(bool on) override { model_->set_profile(on); }
  std::vector<StageTime> profile() override;
  void set_diagnostics(bool on) override { model_->set_diagnostics(on); }
  std::vector<LayerDiagnostics> diagnostics() const override { return model_->diagnostics(); }
  void start_trace(const std::string& file) override { model_->start_trace(file); }
  int64_t stop_trace() override { return model_->stop_trace(); }
  void set_record(bool on) override { model_->set_record(on); }
  const StepRecord& record() const override { return model_->record(); }

 private:
  struct Stream {
    std::unique_ptr<StreamState> state;
    bool broken = false;  // a step failed half-way: its recurrent state is neither before nor after
    // Checkpoints of the last step: blocks by number of rows kept (0 = before the step).
    int64_t step_start = 0;
    std::map<int32_t, StatePool::Block> checkpoints;
  };

  Stream& stream(StreamId id);
  const Stream& stream(StreamId id) const;
  Stream& usable(StreamId id);
  StreamId place(std::unique_ptr<StreamState> state);
  const StreamState& named(const std::string& name) const;
  StepPlan check(const Step& step) const;
  void check_row(const Row& row, size_t index, int64_t expected) const;
  void prepare(const Step& step, StepPlan& plan);
  StepResult run(const Step& step, const std::vector<SamplingParams>* sampling);
  std::vector<StepPlan> passes(const Step& step, const StepPlan& plan);
  void settle();
  void replay(StreamId id, const StreamState& past, int64_t position);

  std::unique_ptr<Model> model_;
  SessionLimits limits_;
  EngineInfo info_;
  StatePool pool_;
  std::vector<std::optional<Stream>> streams_;
  std::map<std::string, std::unique_ptr<StreamState>> snapshots_;

  // The last step's logits: where each row that wanted them lies in the model's, of which stream and after which
  // token; whether they were looked at; a copy in row order where the model's order differs.
  struct Wanted {
    int32_t at;
    StreamId stream;
    int64_t position;
  };
  std::vector<Wanted> wanted_;
  bool settled_ = true;
  std::vector<float> ordered_;
  bool silent_ = false;
  int64_t steps_ = 0, rows_ = 0;
};

}  // namespace rocket
