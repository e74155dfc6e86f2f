// One engine over several ranks. Rank 0's program calls Lead; each call that changes streams is told to the other ranks
// first, who make the same call on their own sessions in follow(). So all ranks hold the same streams, take part in the
// same steps, and only rank 0 computes logits and draws from them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fabric/fabric.h"
#include "runtime/session.h"

namespace rocket {

class Lead : public Engine {
 public:
  Lead(std::unique_ptr<Session> session, std::shared_ptr<Fabric> fabric);
  ~Lead() override;  // ends follow() on the other ranks

  const EngineInfo& info() const override { return session_->info(); }
  StreamId open() override;
  void close(StreamId stream) override;
  int64_t position(StreamId stream) const override { return session_->position(stream); }
  StreamId fork(StreamId stream) override;
  StepResult step(const Step& step) override;
  std::vector<int32_t> step_and_sample(const Step& step,
                                       const std::vector<SamplingParams>& sampling) override;
  const float* logits() override { return session_->logits(); }
  void commit(StreamId stream, int32_t rows) override;
  void snapshot(StreamId stream, const std::string& name) override;
  StreamId restore(const std::string& name) override;
  void drop_snapshot(const std::string& name) override;
  std::vector<std::string> snapshots() const override { return session_->snapshots(); }
  void save_snapshot(const std::string& name, const std::string& file) override;
  void load_snapshot(const std::string& name, const std::string& file) override;
  void truncate(StreamId stream, int64_t position) override;
  int32_t sample(int32_t logits_row, const SamplingParams& sampling, uint64_t counter) override {
    return session_->sample(logits_row, sampling, counter);
  }
  std::vector<int32_t> sample(const std::vector<Draw>& draws) override { return session_->sample(draws); }
  std::vector<float> state(StreamId stream, const std::string& name) const override {
    return session_->state(stream, name);
  }
  bool hint(int32_t layer, std::span<const int32_t> experts) override;
  EngineStats stats() override;  // of all ranks together, and of each
  void set_profile(bool on) override { session_->set_profile(on); }
  std::vector<StageTime> profile() override { return session_->profile(); }
  void set_diagnostics(bool on) override { session_->set_diagnostics(on); }
  std::vector<LayerDiagnostics> diagnostics() const override { return session_->diagnostics(); }
  void start_trace(const std::string& file) override { session_->start_trace(file); }
  int64_t stop_trace() override { return session_->stop_trace(); }
  void set_record(bool on) override { session_->set_record(on); }
  const StepRecord& record() const override { return session_->record(); }

 private:
  void refuse_shares() const;
  template <typename Write, typename Call>
  auto lead(int32_t order, Write&& write, Call&& call);

  std::unique_ptr<Session> session_;
  std::shared_ptr<Fabric> fabric_;
  int64_t serial_ = 0;
  bool refused_ = false;  // the last call threw before it changed anything
};

// On any other rank: makes rank 0's calls until its engine is gone. Throws DeviceError or FuelError for what ends the
// run, after the other ranks have been told.
void follow(Session& session, Fabric& fabric);

}  // namespace rocket
