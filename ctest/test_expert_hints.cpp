// Hints of the host's stream. Beside a naive model, with reads that finish when the test says so; and left to run, with
// reads that take their time and fail, look-ups that are given up, and hints at any moment.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "experts/stream.h"
#include "fake_experts.h"
#include "naive_expert_cache.h"

using namespace rocket;
using namespace check::fake;
using check::expect;

namespace {

constexpr auto kPatience = std::chrono::seconds(20);

// What a test and its store share. Demand is what the test's own thread reads.
struct Orders {
  std::mutex mutex;
  std::condition_variable changed;
  bool closed = false;            // hinted reads stop in front of their end
  bool blocked = false;           // one does
  int under_way = 0;              // hinted reads, also those that nobody wants any more
  int fail_one_in = 0;            // reads, at random
  int slow_us = 0;                // a read takes up to that
  std::vector<ExpertKey> broken;  // reads of these fail
  std::vector<ExpertKey> begun;   // reads, in order
  std::mt19937 rng{7};
  const std::thread::id demand = std::this_thread::get_id();

  void close() {
    const std::lock_guard lock(mutex);
    closed = true;
  }
  void open() {
    const std::lock_guard lock(mutex);
    closed = false;
    changed.notify_all();
  }
  bool until_blocked() {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, kPatience, [&] { return blocked; });
  }
  bool until_idle() {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, kPatience, [&] { return under_way == 0; });
  }
};

// Counts a read of another thread than the test's while it lives.
class UnderWay {
 public:
  explicit UnderWay(Orders& orders) : orders_(orders), hinted_(std::this_thread::get_id() != orders.demand) {
    add(1);
  }
  ~UnderWay() { add(-1); }
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;

 private:
  void add(int n) {
    if (!hinted_) return;
    const std::lock_guard lock(orders_.mutex);
    orders_.under_way += n;
    orders_.changed.notify_all();
  }
  Orders& orders_;
  bool hinted_;
};

class TimedStore : public ExpertStore {
 public:
  explicit TimedStore(std::shared_ptr<Orders> orders) : orders_(std::move(orders)) {}
  const char* name() const override { return "timed"; }
  int32_t pieces() const override { return 3; }
  void fetch(int32_t layer, int32_t expert, int32_t piece, const SlotLayout& layout,
             void* slot) const override {
    fill(layer, expert, piece, layout, slot);
  }
  void fetch_all(int32_t layer, std::span<const ExpertRead> reads) const override {
    for (const ExpertRead& read : reads) {
      const UnderWay counted(*orders_);
      const int sleep_us = begin({layer, read.expert});
      // Half of the bytes, so that a slot that is somebody else's by now would show it.
      fetch(layer, read.expert, 0, *read.layout, read.slot);
      if (sleep_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(sleep_us));
      end({layer, read.expert});
      for (int32_t piece = 0; piece < pieces(); ++piece)
        fetch(layer, read.expert, piece, *read.layout, read.slot);
    }
  }

 private:
  int begin(const ExpertKey& key) const {
    const std::lock_guard lock(orders_->mutex);
    orders_->begun.push_back(key);
    return orders_->slow_us > 0 ? static_cast<int>(orders_->rng() % static_cast<unsigned>(orders_->slow_us))
                                : 0;
  }
  void end(const ExpertKey& key) const {
    Orders& o = *orders_;
    std::unique_lock lock(o.mutex);
    if (std::this_thread::get_id() != o.demand) {
      o.blocked = o.closed;
      o.changed.notify_all();
      o.changed.wait(lock, [&] { return !o.closed; });
      o.blocked = false;
    }
    if (std::find(o.broken.begin(), o.broken.end(), key) != o.broken.end() ||
        (o.fail_one_in > 0 && o.rng() % static_cast<unsigned>(o.fail_one_in) == 0))
      throw FuelError("expert " + std::to_string(key.expert) + " of layer " + std::to_string(key.layer));
  }

  std::shared_ptr<Orders> orders_;
};

struct Bench {
  explicit Bench(const CacheConfig& config) : orders(std::make_shared<Orders>()) {
    std::vector<std::span<ExpertWeights>> spans;
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      for (int32_t e = 0; e < kExperts; ++e) tables[layer].push_back(make_expert(layer, e));
      spans.emplace_back(tables[layer]);
    }
    stream = std::make_unique<HostStream>(config, std::make_unique<TimedStore>(orders), spans);
    exec.pool = &pool;
  }
  ~Bench() { orders->open(); }

  void look_up(int32_t layer, const std::vector<int32_t>& ids) {
    const int32_t waves = stream->find(layer, ids, exec);
    for (int32_t wave = 0; wave < waves; ++wave) stream->fetch(wave, exec);
  }
  bool placed(const ExpertKey& key) const {
    return tables[key.layer][static_cast<size_t>(key.expert)].gate.data != nullptr;
  }
  // Lets hinted reads go on until every expert in a slot is there.
  bool land() {
    orders->open();
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (std::chrono::steady_clock::now() < until) {
      stream->stats();
      bool all = true;
      for (int32_t slot = 0; slot < stream->cache().slots(); ++slot) {
        const ExpertKey key = stream->cache().at(slot);
        all = all && (key.layer < 0 || placed(key));
      }
      if (all) return orders->until_idle();
      std::this_thread::yield();
    }
    return false;
  }

  std::shared_ptr<Orders> orders;
  std::vector<ExpertWeights> tables[kLayers];
  ThreadPool pool{3};
  Exec exec;
  std::unique_ptr<HostStream> stream;
};

bool balanced(const StreamStats& stats) {
  CacheCounters c;
  for (const CacheCounters& layer : stats.layers) c += layer;
  return c.hints_taken ==
         c.hints_useful + c.hints_late + c.hints_wasted + stats.hints_on_their_way + stats.hints_there;
}

CacheCounters total(Bench& bench) {
  CacheCounters sum;
  for (const CacheCounters& layer : bench.stream->stats().layers) sum += layer;
  return sum;
}

int64_t bytes_of(int32_t layer, std::initializer_list<int32_t> experts) {
  int64_t bytes = 0;
  for (const int32_t e : experts) bytes += slot_layout(make_expert(layer, e)).stored_bytes();
  return bytes;
}

// --- beside a naive model ---------------------------------------------------------------------------------------

// What stream.h says of wishes, over the naive cache.
class Model {
 public:
  explicit Model(const CacheConfig& config) : naive(config, {}) {}

  void begin_step() {
    for (auto it = missing_.rbegin(); it != missing_.rend(); ++it) naive.forget(it->layer, it->expert);
    missing_.clear();
    naive.step();
    for (const ExpertKey& wish : wishes_) {
      if (const int32_t slot = naive.find(wish.layer, wish.expert); slot >= 0) naive.keep(slot);
    }
    give();
  }
  void hint(int32_t layer, const std::vector<int32_t>& experts) {
    for (const int32_t e : experts) {
      const ExpertKey wish{layer, e};
      if (std::find(wishes_.begin(), wishes_.end(), wish) != wishes_.end()) continue;
      wishes_.push_back(wish);
      if (const int32_t slot = naive.find(layer, e); slot >= 0) naive.keep(slot);
    }
    give();
  }
  // Whether anything has to be fetched.
  bool find(int32_t layer, const std::vector<int32_t>& ids) {
    for (const auto& wave : naive.resolve_rows(layer, ids)) {
      for (const ExpertLookup& lookup : wave.lookups) {
        if (lookup.late) missing_.push_back({layer, lookup.expert});
      }
      for (const ExpertFetch& fetch : wave.fetches) missing_.push_back({layer, fetch.expert});
    }
    std::erase_if(wishes_, [&](const ExpertKey& wish) { return wish.layer == layer; });
    return !missing_.empty();
  }
  void fetched() {
    missing_.clear();
    give();
  }
  // The hint whose read is under way.
  ExpertKey front() {
    std::erase_if(order_, [&](const ExpertKey& key) { return !flies(key); });
    return order_.empty() ? ExpertKey{} : order_.front();
  }
  bool flies(const ExpertKey& key) const {
    const int32_t slot = key.layer < 0 ? -1 : naive.find(key.layer, key.expert);
    return slot >= 0 && naive.slots[static_cast<size_t>(slot)].hint == 1;
  }
  void arrive(const ExpertKey& key) {
    if (key.layer >= 0) naive.arrived(key.layer, key.expert);
  }
  void arrive_all() {
    while (front().layer >= 0) arrive(front());
  }

  check::Naive naive;

 private:
  void give() {
    int32_t full = -1;
    for (const ExpertKey& wish : wishes_) {
      const auto flying =
          std::count_if(naive.slots.begin(), naive.slots.end(), [](const auto& s) { return s.hint == 1; });
      if (flying == HostStream::kMostHints) return;
      if (wish.layer == full || naive.find(wish.layer, wish.expert) >= 0) continue;
      ExpertKey evicted;
      if (naive.hint(wish.layer, wish.expert, &evicted)) {
        std::erase(order_, wish);
        order_.push_back(wish);
      } else {
        full = wish.layer;
      }
    }
  }

  std::vector<ExpertKey> wishes_, missing_, order_;
};

void agree(const Bench& bench, const Model& model, const std::string& what) {
  const ExpertCache& cache = bench.stream->cache();
  bool same = true;
  for (int32_t slot = 0; slot < cache.slots(); ++slot) {
    const auto& theirs = model.naive.slots[static_cast<size_t>(slot)];
    same = same && cache.at(slot) == ExpertKey{theirs.layer, theirs.expert};
  }
  expect(same, what + ": the slots are the model's");
  expect(cache.layer_counters() == model.naive.counters, what + ": the counters are the model's");
}

void some_hints(Bench& bench, Model& model) {
  for (int32_t n = draw(0, 3); n > 0; --n) {
    std::vector<int32_t> experts;
    for (int32_t i = draw(0, 6); i > 0; --i) experts.push_back(draw(0, kExperts - 1));
    const int32_t layer = draw(0, kLayers - 1);
    bench.stream->hint(layer, experts);
    model.hint(layer, experts);
  }
}

// Returns whether the step goes on. The gate is closed before and after.
bool modelled_look_up(Bench& bench, Model& model, int32_t layer, const std::string& what) {
  some_hints(bench, model);
  agree(bench, model, what + ", hinted");
  if (draw(0, 2) == 0) {
    expect(bench.land(), what + ": all hints land");
    model.arrive_all();
    bench.orders->close();
  }
  const ExpertKey front = model.front();
  if (front.layer >= 0) expect(bench.orders->until_blocked(), what + ": a hinted read is under way");
  const std::vector<int32_t> ids = choices();
  const int32_t waves = bench.stream->find(layer, ids, bench.exec);
  const bool brings = model.find(layer, ids);
  agree(bench, model, what + ", found");
  const bool given_up = brings && draw(0, 5) == 0;
  if (brings) bench.orders->open();
  for (int32_t wave = 0; wave < waves && !given_up; ++wave) {
    const int32_t* const now = bench.stream->fetch(wave, bench.exec);
    bool there = true;
    for (size_t i = 0; i < ids.size(); ++i)
      there = there && (now[i] < 0 || is_there(bench.tables, layer, now[i]));
    expect(there, what + ": a wave's experts are there");
  }
  if (given_up) {  // the read under way comes to its end, also where its slot was taken
    expect(bench.orders->until_idle(), what + ": the read under way ends");
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (model.flies(front) && !bench.placed(front) && std::chrono::steady_clock::now() < until)
      bench.stream->stats();
  }
  if (brings && model.flies(front)) model.arrive(front);
  if (!given_up) {
    model.fetched();
    expect(bench.land(), what + ": what was hinted lands");
    model.arrive_all();
    agree(bench, model, what + ", fetched");
  }
  bench.orders->close();
  expect(balanced(bench.stream->stats()), what + ": each hint is accounted for");
  return !given_up;
}

void modelled(const CacheConfig& config, const std::string& what) {
  Bench bench(config);
  Model model(config);
  bench.orders->close();
  for (int step = 0; step < 60; ++step) {
    bench.stream->begin_step();
    model.begin_step();
    agree(bench, model, what + ", step");
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      if (!modelled_look_up(bench, model, layer, what)) break;
    }
  }
  expect(total(bench).hints_taken > 0, what + ": hints were taken");
}

// --- left to run ------------------------------------------------------------------------------------------------

bool free_look_up(Bench& bench, int32_t layer, const std::string& what) {
  const std::vector<int32_t> ids = choices();
  const auto maybe_hint = [&] {
    if (draw(0, 1)) return;
    std::vector<int32_t> experts(static_cast<size_t>(draw(1, 5)));
    for (int32_t& e : experts) e = draw(0, kExperts - 1);
    expect(bench.stream->hint(draw(0, kLayers - 1), experts), what + ": hints are taken");
  };
  maybe_hint();
  const int32_t waves = bench.stream->find(layer, ids, bench.exec);
  const int32_t stop = draw(0, 9) ? waves : draw(0, waves - 1);  // a step that is given up
  for (int32_t wave = 0; wave < stop; ++wave) {
    maybe_hint();
    const int32_t* now = nullptr;
    try {
      now = bench.stream->fetch(wave, bench.exec);
    } catch (const FuelError&) {
      return false;
    }
    for (int pass = 0; pass < 2; ++pass) {  // also after hints have taken slots
      bool there = true;
      for (size_t i = 0; i < ids.size(); ++i)
        there = there && (now[i] < 0 || is_there(bench.tables, layer, now[i]));
      expect(there, what + ": a wave's experts are there");
      if (pass == 0) maybe_hint();
    }
    expect(balanced(bench.stream->stats()), what + ": each hint is accounted for");
  }
  return stop == waves;
}

void runs_free(const CacheConfig& config, const std::string& what, bool failures) {
  Bench bench(config);
  bench.orders->slow_us = 60;
  if (failures) bench.orders->fail_one_in = 12;
  for (int step = 0; step < 60; ++step) {
    bench.stream->begin_step();
    for (int32_t layer = 0; layer < kLayers && free_look_up(bench, layer, what); ++layer) {
    }
    expect(balanced(bench.stream->stats()), what + ": each hint is accounted for");
  }
  bench.stream->begin_step();
  expect(bench.land(), what + ": all hints land");
  bool truth = true;
  for (int32_t slot = 0; slot < bench.stream->cache().slots(); ++slot) {
    const ExpertKey key = bench.stream->cache().at(slot);
    truth = truth && (key.layer < 0 || is_there(bench.tables, key.layer, key.expert));
  }
  expect(truth, what + ": the cache tells the truth");
  const CacheCounters c = total(bench);
  expect(c.hints_taken > 0 && c.hints_useful + c.hints_late > 0, what + ": hints were of use");
}

// --- one by one -------------------------------------------------------------------------------------------------

// Demand goes first: only the hint whose read was begun comes before it.
void demand_first() {
  Bench bench(config_of(16, "lru"));
  bench.orders->close();
  bench.stream->begin_step();
  bench.stream->hint(1, std::vector{0, 1, 2, 3});
  expect(bench.orders->until_blocked(), "the first hint is being read");
  const std::vector<int32_t> ids = {2, 7, 9};
  bench.stream->find(0, ids, bench.exec);
  bench.orders->open();
  bench.stream->fetch(0, bench.exec);
  expect(bench.land(), "the other hints follow");
  const std::vector<ExpertKey> order = {{1, 0}, {0, 2}, {0, 7}, {0, 9}, {1, 1}, {1, 2}, {1, 3}};
  expect(bench.orders->begun == order, "a hint that was not begun waits for demand");
}

// Bytes by kind, and none of them counted as streamed.
void counts() {
  Bench bench(config_of(6, "lru"));
  bench.orders->close();
  bench.stream->begin_step();
  bench.stream->hint(0, std::vector{0, 1});
  expect(bench.orders->until_blocked(), "a hint is being read");
  bench.stream->find(0, std::vector{0, 1, 2}, bench.exec);
  bench.orders->open();
  bench.stream->fetch(0, bench.exec);
  StreamStats stats = bench.stream->stats();
  expect(stats.hint_bytes.late == bytes_of(0, {0, 1}) && stats.streamed_bytes == bytes_of(0, {2}), "late");
  expect(is_there(bench.tables, 0, 0) && is_there(bench.tables, 0, 1), "late hints are waited for");

  bench.stream->hint(1, std::vector{4, 5, 6});
  expect(bench.land(), "hints land");
  bench.look_up(1, {4, 5, 5});
  stats = bench.stream->stats();
  expect(stats.hint_bytes.useful == bytes_of(1, {4, 5}) && stats.hints_there == 1, "useful");
  expect(stats.streamed_bytes == bytes_of(0, {2}), "a useful hint streams nothing more");
  bench.stream->begin_step();
  bench.look_up(2, {0, 1, 2});
  bench.look_up(2, {3, 4, 5});
  stats = bench.stream->stats();
  expect(stats.hint_bytes.wasted == bytes_of(1, {6}) && stats.hints_there == 0, "wasted");
  const CacheCounters c = total(bench);
  expect(c.hints_taken == 5 && c.hints_late == 2 && c.hints_useful == 2 && c.hints_wasted == 1,
         "hints by kind");
  expect(c.misses == 7 && c.hits == 4, "hints are apart from demand");
}

// A wish waits for a slot, and ends with its layer's look-up.
void wishes_end() {
  Bench bench(config_of(3, "lru"));
  bench.stream->begin_step();
  bench.look_up(0, {0, 1, 2});
  bench.stream->hint(1, std::vector{5, 6, 7, 8});
  expect(total(bench).hints_taken == 0, "what a step used keeps its slots until the next");
  bench.stream->begin_step();
  expect(total(bench).hints_taken == 3, "then wishes get them");
  expect(bench.land(), "hints land");
  bench.look_up(1, {9});
  bench.stream->begin_step();
  expect(total(bench).hints_taken == 3 && bench.stream->cache().slot_of(1, 8) < 0, "a wish has an end");
}

// A failed hint is not heard of, unless it is wanted and fails again.
void fails() {
  Bench bench(config_of(8, "lru"));
  bench.orders->broken = {{0, 3}};
  bench.stream->begin_step();
  bench.stream->hint(0, std::vector{3, 4});
  expect(bench.land() && bench.stream->cache().slot_of(0, 3) < 0, "a failed hint has no slot");
  bench.stream->begin_step();
  expect(bench.stream->cache().slot_of(0, 3) < 0, "and is not tried again");
  for (const bool late : {false, true}) {
    if (late) {
      bench.orders->close();
      bench.stream->hint(0, std::vector{3});
      expect(bench.orders->until_blocked(), "the hint is being read");
    }
    std::string error;
    bench.stream->find(0, std::vector{3}, bench.exec);
    bench.orders->open();
    try {
      bench.stream->fetch(0, bench.exec);
    } catch (const FuelError& e) {
      error = e.what();
    }
    expect(error == "expert 3 of layer 0", "the demand's own error is reported");
    bench.stream->begin_step();
  }
  bench.orders->broken.clear();
  bench.look_up(0, {3});
  expect(is_there(bench.tables, 0, 3) && balanced(bench.stream->stats()), "and the next try succeeds");
}

void refuses() {
  Bench bench(config_of(8, "lru"));
  for (const auto& [layer, expert] : {std::pair{-1, 0}, {kLayers, 0}, {0, -1}, {0, kExperts}}) {
    try {
      bench.stream->hint(layer, std::vector{expert});
      expect(false, "a hint of nothing that there is");
    } catch (const InputError&) {
    }
  }
}

// Reads that hang: an error after the limit, and a stream that can be destroyed. What they write into stays.
void hangs() {
  ::setenv("ROCKET_EXPERT_READ_SECONDS", "0.02", 1);
  std::shared_ptr<Orders> orders;
  for (const bool demands : {false, true}) {
    Bench bench(config_of(8, "lru"));
    orders = bench.orders;
    orders->close();
    bench.stream->begin_step();
    bench.stream->hint(0, std::vector{3, 4});
    expect(orders->until_blocked(), "a hinted read hangs");
    std::string error;
    if (demands) {
      bench.stream->find(1, std::vector{1}, bench.exec);
      try {
        bench.stream->fetch(0, bench.exec);
      } catch (const DeviceError& e) {
        error = e.what();
      }
      expect(error.find("expert 3 of MoE layer 0") == 0, "it is named: " + error);
    }
    bench.stream.reset();  // ends, with the read still under way
  }
  ::unsetenv("ROCKET_EXPERT_READ_SECONDS");
}

// Destroyed with hints on their way.
void destroyed() {
  for (int i = 0; i < 30; ++i) {
    Bench bench(config_of(16, "lru"));
    bench.orders->slow_us = 300;
    bench.stream->begin_step();
    bench.stream->hint(0, std::vector{0, 1, 2, 3, 4, 5});
    if (i % 2) bench.stream->find(0, std::vector{1, 9}, bench.exec);
  }
}

}  // namespace

int main() {
  demand_first();
  counts();
  wishes_end();
  fails();
  refuses();
  hangs();
  destroyed();
  for (const char* policy : {"lru", "lfu", "lfru"}) {
    std::vector<CacheConfig> configs;
    for (const int64_t slots : {3, 4, 8, 16, 33}) configs.push_back(config_of(slots, policy));
    configs.push_back(config_of(0, policy));
    configs.back().layer_slots = {3, 5, 11};
    for (const CacheConfig& config : configs) {
      const std::string what = std::string(policy) + ", " + std::to_string(config.slots) + " slots";
      modelled(config, what);
      runs_free(config, what + ", free", false);
      runs_free(config, what + ", failing", true);
    }
  }
  return check::finish("test_expert_hints");
}
