// An engine whose memory the host cannot follow: what moves there, what is copied and read back. The memory is the
// host's in truth, so that the CPU's ops can run on it.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fabric/wire_fabric.h"
#include "glm5-moe-nvfp4-2b/forward.h"
#include "runtime/session.h"
#include "thread_wire.h"

namespace {

using namespace rocket;

class OtherMemory : public MemorySpace {
 public:
  void* allocate(size_t bytes, const char* what) override {
    ++blocks;
    if (std::string(what) == "expert slots") slots_bytes += bytes;
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
  size_t slots_bytes = 0;
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

// Two ranks, each with its own experts in such a memory.
void ranks(const std::string& fuel) {
  const glm5::Config config = glm5::read_config(fuel);
  const auto layers = std::count(config.is_moe.begin(), config.is_moe.end(), true);
  ExpertSplit split{2, config.n_routed_experts, {}};
  for (int64_t i = 0; i < layers * config.n_routed_experts; ++i)
    split.owner.push_back(static_cast<int32_t>(i % 3 == 0));
  check::Post post;
  post.dead.resize(2);
  OtherMemory memory[2], whole;
  std::vector<std::vector<float>> logits(3);
  std::string error[2];
  const Step step{{row(5, 0), row(6, 0), row(9, 1), row(11, 1)}};
  const auto run = [&](Session& session, std::vector<float>& to) {
    session.open();
    session.open();
    session.step(step);
    to.assign(session.logits(), session.logits() + 4 * session.info().vocab);
  };
  {
    Loaded alone(std::make_unique<OtherBackend>(whole), fuel, false);
    run(*alone.session, logits[2]);
  }
  std::vector<std::thread> threads;
  check::ThreadWire wires[] = {{post, 0, 2}, {post, 1, 2}};
  WireFabric fabrics[] = {WireFabric(wires[0]), WireFabric(wires[1])};
  for (size_t r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      try {
        auto backend = std::make_unique<OtherBackend>(memory[r]);
        glm5::Loader loader(config, fuel, false, split, static_cast<int32_t>(r));
        auto weights = loader.load(backend->memory(), {});
        auto model = std::make_unique<glm5::Glm5>(config, glm5::Precision{}, std::move(weights),
                                                  std::move(backend), 64, 256);
        model->join(fabrics[r], split);
        Session session(std::move(model), SessionLimits{256, 64, 4, 256 << 20});
        run(session, logits[r]);
        fabrics[r].leave();
      } catch (const Error& e) {
        error[r] = e.what();
        fabrics[r].fail(e.what(), "");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t r = 0; r < 2; ++r) {
    check::expect(error[r].empty() && logits[r] == logits[2], "the logits of one rank: " + error[r]);
    check::expect(memory[r].blocks == 0, "a rank gives its memory back");
  }
  check::expect(memory[0].slots_bytes + memory[1].slots_bytes == whole.slots_bytes &&
                    memory[1].slots_bytes * 3 == whole.slots_bytes,
                "each rank has its own experts only");
}

}  // namespace

int main() {
  try {
    all(ROCKET_SPARKLER);
    ranks(ROCKET_SPARKLER);
  } catch (const std::exception& e) {
    check::expect(false, std::string("unexpected exception: ") + e.what());
  }
  return check::finish("other_memory");
}
