// Experts that a thread of the host brings while a recorded step waits on the device: against ExpertCache and what the
// store has; stores that are slow, that fail and that hang; and an end while a step waits.
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "base/error.h"
#include "gpu_slots.h"

namespace {

using namespace rocket;
using namespace check;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// Calls a hook before each read.
class HookedStore : public PatternStore {
 public:
  using Hook = std::function<void(int32_t layer, int32_t expert)>;
  explicit HookedStore(Hook hook) : hook_(std::move(hook)) {}
  void fetch(int32_t layer, int32_t expert, int32_t piece, const SlotLayout& layout,
             void* slot) const override {
    if (piece == 0) hook_(layer, expert);
    PatternStore::fetch(layer, expert, piece, layout, slot);
  }

 private:
  Hook hook_;
};

// Steps of so many rows over all layers, which look up, wait for the misses and compute a little between the waves.
class Steps {
 public:
  Steps(Gpu& gpu, const Case& c, int32_t key, HookedStore::Hook hook, std::chrono::nanoseconds limit = 30s)
      : gpu_(gpu),
        case_(c),
        bench_(gpu, c.config, c.hidden, c.inner, true, int64_t{c.most_rows} * c.config.topk,
               disk(c, std::move(hook), limit)),
        cache_(c.config),
        routing_(gpu, c),
        n_(int64_t{c.most_rows} * c.config.topk),
        ids_(gpu, n_ * c.config.layers),
        x_(gpu, std::vector<float>(64, 1.0f)),
        y_(gpu, 64) {
    key_.rows = c.most_rows;
    key_.first_logit = key;
    for (int32_t layer = 0; layer < c.config.layers; ++layer)
      logits_.push_back(std::make_unique<DeviceArray<float>>(gpu, int64_t{c.most_rows} * c.config.experts));
  }

  // Issues the step and leaves it.
  void issue() {
    for (const auto& logit : logits_) logit->set(Routing::draw(case_));
    bench_.stream->begin_step();
    bench_.stream->begin_pass();
    gpu_.backend->run(key_, [this] { pass(); });
  }
  void step() {
    issue();
    bench_.stream->end_pass();
    cache_.begin_step();
    const std::vector<int32_t> all = ids_.get();
    for (int32_t layer = 0; layer < case_.config.layers; ++layer) {
      const std::vector<int32_t> mine(all.begin() + layer * n_, all.begin() + (layer + 1) * n_);
      cache_.resolve_rows(layer, mine);
    }
  }
  void check(const std::string& what) {
    check_state(gpu_, bench_, cache_, case_.config, what);
    for (int32_t slot = 0; slot < cache_.slots(); slot += 3) {
      const ExpertKey at = cache_.at(slot);
      if (at.layer >= 0) expect(is_there(gpu_, bench_, at.layer, at.expert), what + ": bytes in a slot");
    }
  }
  ExpertStream& stream() { return *bench_.stream; }

 private:
  static DiskExperts disk(const Case& c, HookedStore::Hook hook, std::chrono::nanoseconds limit) {
    DiskExperts disk;
    disk.store = std::make_unique<HookedStore>(std::move(hook));
    for (int32_t layer = 0; layer < c.config.layers; ++layer) disk.numbers.push_back(10 + layer);
    disk.limit = limit;
    return disk;
  }
  void pass() {
    for (int32_t layer = 0; layer < case_.config.layers; ++layer) {
      RouterParams p = routing_.params(case_, case_.most_rows);
      p.logit = logits_[static_cast<size_t>(layer)]->data();
      p.id = ids_.data() + layer * n_;
      p.slots = bench_.stream->look_up();
      p.layer = layer;
      gpu_.ops.router(p, gpu_.exec);
      const int32_t waves = bench_.stream->find(layer, {p.id, static_cast<size_t>(n_)}, gpu_.exec);
      for (int32_t wave = 0; wave < waves; ++wave) {
        bench_.stream->fetch(wave, gpu_.exec);
        SwigluParams between{x_.data(), x_.data(), 64, 1, 64, 10.0f, y_.data(), 64};
        gpu_.ops.swiglu(between, gpu_.exec);
      }
    }
  }

  Gpu& gpu_;
  Case case_;
  StreamBench bench_;
  ExpertCache cache_;
  Routing routing_;
  int64_t n_;
  std::vector<std::unique_ptr<DeviceArray<float>>> logits_;
  DeviceArray<int32_t> ids_;
  DeviceArray<float> x_, y_;
  Backend::Key key_;
};

int32_t next_key = 5000;  // a recorded step belongs to one stream

void brings_what_is_missing(Gpu& gpu, Case c, int32_t rows, bool slow) {
  if (!gpu.takes_case()) return;
  c.most_rows = rows;
  const std::string what = "from a disk, " + describe(c) + (slow ? ", slow" : "");
  Steps steps(gpu, c, next_key++, [slow](int32_t, int32_t) {
    if (slow) std::this_thread::sleep_for(1ms);
  });
  expect(std::string(steps.stream().store()) == "pattern, no bank", what + ": the store's name");
  for (int i = 0; i < (slow ? 4 : 12); ++i) {  // the first call by call
    steps.step();
    steps.check(what);
  }
  const StreamStats stats = steps.stream().stats();
  expect(stats.fetch_seconds > 0 && stats.fetch_seconds < 60, what + ": seconds of waits");
}

// The error of steps until one has one.
template <typename E>
std::string failure(Steps& steps, int most) {
  try {
    for (int i = 0; i < most; ++i) steps.step();
  } catch (const E& error) {
    return error.what();
  }
  return "none";
}

void fails(Gpu& gpu, const Case& c, int good_steps) {
  std::atomic<bool> broken = false;
  Steps steps(gpu, c, next_key++, [&](int32_t layer, int32_t expert) {
    if (broken) throw FuelError(expert_name(expert, 10 + layer) + ": pattern: unreadable", "a hint");
  });
  for (int i = 0; i < good_steps; ++i) steps.step();
  broken = true;
  const auto begin = Clock::now();
  const std::string what = "a store that fails after " + std::to_string(good_steps) + " steps";
  const std::string found = failure<FuelError>(steps, 20);
  expect(found.ends_with(": pattern: unreadable"), what + ": its error, found " + found);
  expect(Clock::now() - begin < 10s, what + ": without a wait");
  expect(failure<FuelError>(steps, 1) == found, what + ": for good");
}

void hangs(Gpu& gpu, const Case& c) {
  std::atomic<bool> stuck = false;
  auto begin = Clock::now();
  {
    Steps steps(
        gpu, c, next_key++,
        [&](int32_t, int32_t) {
          for (int i = 0; stuck && i < 3000; ++i) std::this_thread::sleep_for(1ms);
        },
        200ms);
    for (int i = 0; i < 4; ++i) steps.step();
    begin = Clock::now();
    stuck = true;
    const std::string found = failure<DeviceError>(steps, 20);
    expect(found.starts_with("expert ") && found.ends_with(": pattern: the disk gave nothing for 0.4 s"),
           "a store that hangs: an error that names the expert, found " + found);
    expect(Clock::now() - begin < 3s, "a store that hangs: within the limit");
    stuck = false;
  }
  expect(Clock::now() - begin < 10s, "a store that hangs: an end");
}

void ends_while_a_step_waits(Gpu& gpu, const Case& c) {
  std::atomic<bool> slow = false;
  const auto begin = Clock::now();
  {
    Steps steps(gpu, c, next_key++, [&](int32_t, int32_t) {
      if (slow) std::this_thread::sleep_for(300ms);
    });
    for (int i = 0; i < 4; ++i) steps.step();
    slow = true;
    steps.issue();
    std::this_thread::sleep_for(50ms);
  }
  gpu.backend->wait();
  expect(Clock::now() - begin < 10s, "an end while a step waits: the step ends, too");
}

void all(Gpu& gpu) {
  for (const bool slow : {false, true}) {
    for (const int32_t rows : {1, 2, 8, 16, 17, 48})
      brings_what_is_missing(gpu, case_of(3, 40, 4, 30, 48), rows, slow);
    for (const int64_t slots : {4, 5, 60, 119})
      brings_what_is_missing(gpu, case_of(3, 40, 4, slots, 8), 8, slow);
    Case budgets = case_of(4, 40, 4, 0, 20);
    budgets.config.layer_slots = {4, 7, 40, 11};
    brings_what_is_missing(gpu, budgets, 20, slow);
  }
  Case large = case_of(2, 64, 4, 30, 16);
  large.hidden = 512, large.inner = 704;
  brings_what_is_missing(gpu, large, 4, false);
  const Case smallest = case_of(3, 40, 4, 4, 2);
  for (const int good_steps : {0, 1, 5}) fails(gpu, smallest, good_steps);
  hangs(gpu, smallest);
  ends_while_a_step_waits(gpu, smallest);
}

}  // namespace

int main() {
  return check::run_on_gpu("gpu_slot_disk", all);
}
