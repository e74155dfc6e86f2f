// An engine whose memory the host cannot follow: what moves there, what is copied and read back. The memory is the
// host's in truth, so that the CPU's ops can run on it.
#include <cstdlib>
#include <memory>

#include "check.h"
#include "glm5-moe-nvfp4-2b/forward.h"
#include "runtime/session.h"

namespace {

using namespace rocket;

class OtherMemory : public MemorySpace {
 public:
  void* allocate(size_t bytes, const char* what) override {
    ++blocks;
    return host_memory().allocate(bytes, what);
  }
  void release(void* memory) override {
    --blocks;
    host_memory().release(memory);
  }
  void copy(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void read(void* host, const void* from, size_t bytes) override { std::memcpy(host, from, bytes); }
  void write(void* to, const void* host, size_t bytes) override { std::memcpy(to, host, bytes); }
  bool host() const override { return false; }

  int blocks = 0;
};

class OtherBackend : public Backend {
 public:
  explicit OtherBackend(OtherMemory& memory) : memory_(memory), cpu_(make_cpu_backend(2)) {}
  const char* name() const override { return "other"; }
  std::string device() const override { return cpu_->device(); }
  MemorySpace& memory() override { return memory_; }
  MemoryAvailable available() override { return cpu_->available(); }
  bool rounds() const override { return true; }
  const OpTable& ops() const override { return cpu_->ops(); }
  const OpTable& measuring_ops() const override { return cpu_->measuring_ops(); }
  StageClock& clock() override { return cpu_->clock(); }
  Exec exec() override { return cpu_->exec(); }
  StepView stage(const StepPlan& plan) override { return cpu_->stage(plan); }
  void run(const Key&, const std::function<void()>& forward) override { forward(); }
  void set_replay(bool) override {}
  void wait() override {}

 private:
  OtherMemory& memory_;
  std::unique_ptr<Backend> cpu_;
};

struct Loaded {
  std::unique_ptr<Session> session;
  Loaded(std::unique_ptr<Backend> backend, const std::string& fuel, bool rounds) {
    const glm5::Config config = glm5::read_config(fuel);
    glm5::Loader loader(config, fuel);
    auto weights = loader.load(backend->memory(), {});
    auto model = std::make_unique<glm5::Glm5>(config, glm5::Precision{rounds, false}, std::move(weights),
                                              std::move(backend), 64, 256);
    session = std::make_unique<Session>(std::move(model), SessionLimits{256, 64, 4, 256 << 20});
  }
};

Row row(int32_t token, StreamId stream, RowKind kind = RowKind::kDecode) {
  Row row;
  row.token = token;
  row.stream = stream;
  row.kind = kind;
  row.wants_logits = true;
  return row;
}

void same(Session& found, Session& expected, const char* what) {
  const int64_t vocab = found.info().vocab;
  check::same_bits(what, found.logits(), expected.logits(), vocab);
}

void all(const std::string& fuel) {
  OtherMemory memory;
  {
    Loaded other(std::make_unique<OtherBackend>(memory), fuel, true), cpu(make_cpu_backend(2), fuel, false);
    Session &a = *other.session, &b = *cpu.session;
    for (Session* s : {&a, &b}) {
      s->open();
      s->open();
    }
    // A prompt between decode rows: the other backend runs two passes, and puts the logits in order.
    Step mixed{{row(5, 0, RowKind::kPrefill), row(6, 0, RowKind::kPrefill), row(9, 1)}};
    a.step(mixed);
    b.step(mixed);
    check::same_bits("a mixed step's logits", a.logits(), b.logits(), 3 * a.info().vocab);
    check::expect(a.sample(2, {}, 1) == b.sample(2, {}, 1), "a token drawn from the decode row");
    check::expect(a.sample(0, {}, 1) == b.sample(0, {}, 1), "a token drawn from the prompt's first row");
    const Step next{{row(7, 0), row(8, 1)}};
    check::expect(a.step_and_sample(next, {{}, {}}) == b.step_and_sample(next, {{}, {}}),
                  "tokens drawn in a step");
    for (const char* part : {"kda/0", "conv/1", "latent/3", "pooled/3"}) {
      check::expect(a.state(0, part) == b.state(0, part), std::string("state ") + part);
    }
    a.snapshot(0, "s");
    check::expect(a.restore("s") == 2 && b.fork(0) == 2, "a stream from a snapshot");
    a.step({{row(1, 2)}});
    b.step({{row(1, 2)}});
    same(a, b, "after a snapshot");
    check::expect(a.stats().expert_hits > 0, "distinct experts are counted");
  }
  check::expect(memory.blocks == 0, "all of the other memory is given back");
}

}  // namespace

int main() {
  try {
    all(ROCKET_SPARKLER);
  } catch (const std::exception& e) {
    check::expect(false, std::string("unexpected exception: ") + e.what());
  }
  return check::finish("other_memory");
}
