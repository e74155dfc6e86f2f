// The CPU as a backend: host memory, ops that run when they are called.
#include <vector>

#include "base/memory.h"
#include "runtime/backend.h"

namespace rocket {
namespace {

class CpuBackend : public Backend {
 public:
  explicit CpuBackend(int threads) : pool_(threads), ops_(cpu_ops()) {}

  const char* name() const override { return "cpu"; }
  std::string device() const override {
    return cpu_name() + ", " + std::to_string(pool_.threads()) +
           (pool_.threads() == 1 ? " thread, " : " threads, ") + cpu_ops_isa();
  }
  MemorySpace& memory() override { return host_memory(); }
  MemoryAvailable available() override { return memory_available(); }
  const OpTable& ops() const override { return ops_; }
  const OpTable& measuring_ops() const override { return no_ops(); }
  StageClock& clock() override { return clock_; }
  Exec exec() override {
    Exec exec;
    exec.pool = &pool_;
    return exec;
  }

  StepView stage(const StepPlan& plan) override {
    state_.clear();
    pages_.clear();
    for (const StreamState* stream : plan.stream) {
      state_.push_back(stream->recurrent());
      pages_.push_back(stream->page_table());
    }
    StepView view;
    view.rows = plan.rows();
    view.segments = plan.segments();
    view.logits_rows = static_cast<int32_t>(plan.logits_row.size());
    view.first_logit = plan.first_logit;
    view.token = plan.token.data();
    view.embedding = plan.any_embedding ? plan.embedding.data() : nullptr;
    view.segment = plan.segment.data();
    view.state = state_.data();
    view.checkpoint = plan.any_checkpoint ? plan.checkpoint.data() : nullptr;
    view.pages = pages_.data();
    view.logits_row = plan.logits_row.data();
    if (!plan.sampling.empty()) {
      view.sampling = plan.sampling.data();
      view.counter = plan.counter.data();
    }
    return view;
  }

  void run(const Key&, const std::function<void()>& forward) override { forward(); }
  void set_replay(bool) override {}
  void wait() override {}

 private:
  ThreadPool pool_;
  const OpTable& ops_;
  HostClock clock_;
  std::vector<float*> state_;
  std::vector<float* const*> pages_;
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(int threads) {
  return std::make_unique<CpuBackend>(threads);
}

}  // namespace rocket
