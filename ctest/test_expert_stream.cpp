// Experts in slots, from a store that may fail: what each wave points to is compared with what the store holds, after
// every look-up, and after every kind of failure; and what a user asks of the cache.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "experts/budget.h"
#include "experts/host_bank.h"
#include "experts/stream.h"
#include "fake_experts.h"

using namespace rocket;
using check::expect;
using namespace check::fake;

namespace {

// Fills pieces with a byte that tells them apart. Fails at the fetch that is set.
class FakeStore : public ExpertStore {
 public:
  struct Orders {
    std::atomic<int> fetches{0}, fail_at{-1};
  };
  explicit FakeStore(std::shared_ptr<Orders> orders) : orders_(std::move(orders)) {}
  const char* name() const override { return "fake"; }
  int32_t pieces() const override { return 3; }
  void fetch(int32_t layer, int32_t expert, int32_t piece, const SlotLayout& layout,
             void* slot) const override {
    const size_t part = static_cast<size_t>(piece);
    char* const base = static_cast<char*>(slot);
    const bool fails = orders_->fetches++ == orders_->fail_at;
    // A fetch that fails has written something, too.
    std::memset(base + layout.data_at[part], fails ? 0xEE : byte_of(layer, expert, piece),
                static_cast<size_t>(layout.data_bytes[part]));
    std::memset(base + layout.scale_at[part], byte_of(layer, expert, piece),
                static_cast<size_t>(layout.scale_bytes[part]));
    if (fails) throw FuelError("expert " + std::to_string(expert) + " of layer " + std::to_string(layer));
  }

 private:
  std::shared_ptr<Orders> orders_;
};

struct Bench {
  explicit Bench(const CacheConfig& config) : orders(std::make_shared<FakeStore::Orders>()) {
    std::vector<std::span<ExpertWeights>> spans;
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      for (int32_t e = 0; e < kExperts; ++e)
        tables[static_cast<size_t>(layer)].push_back(make_expert(layer, e));
      spans.emplace_back(tables[static_cast<size_t>(layer)]);
    }
    stream = std::make_unique<HostStream>(config, std::make_unique<FakeStore>(orders), spans);
    exec.pool = &pool;
  }
  std::shared_ptr<FakeStore::Orders> orders;
  std::vector<ExpertWeights> tables[kLayers];
  std::unique_ptr<HostStream> stream;
  ThreadPool pool{3};
  Exec exec;
};

// One layer of a step. False if the store failed.
bool look_up(Bench& bench, int32_t layer, const std::string& what) {
  const std::vector<int32_t> ids = choices();
  std::vector<int> computed(ids.size(), 0);
  const int32_t waves = bench.stream->find(layer, ids, bench.exec);
  for (int32_t wave = 0; wave < waves; ++wave) {
    const int32_t* now = nullptr;
    try {
      now = bench.stream->fetch(wave, bench.exec);
    } catch (const FuelError&) {
      return false;
    }
    for (size_t i = 0; i < ids.size(); ++i) {
      if (now[i] < 0) continue;
      ++computed[i];
      expect(now[i] == ids[i], what + ": a wave's choice is the row's");
      expect(is_there(bench.tables, layer, now[i]), what + ": the expert's own bytes are in its slot");
    }
  }
  for (size_t i = 0; i < ids.size(); ++i)
    expect(computed[i] == (ids[i] >= 0), what + ": each choice belongs to one wave");
  return true;
}

void runs(const CacheConfig& config, const std::string& what, bool failures) {
  Bench bench(config);
  int failed = 0;
  for (int step = 0; step < 120; ++step) {
    if (failures && (step == 0 || draw(0, 3) == 0))
      bench.orders->fail_at = bench.orders->fetches + draw(0, 5);
    bench.stream->begin_step();
    bool whole = true;
    for (int32_t layer = 0; layer < kLayers && whole; ++layer) whole = look_up(bench, layer, what);
    if (!whole) ++failed;
    // Whatever the cache says is there is there, once what was not fetched is forgotten.
    bench.stream->begin_step();
    for (int32_t slot = 0; slot < bench.stream->cache().slots(); ++slot) {
      const ExpertKey key = bench.stream->cache().at(slot);
      if (key.layer >= 0)
        expect(is_there(bench.tables, key.layer, key.expert), what + ": the cache tells the truth");
    }
  }
  expect(!failures || failed > 0, what + ": the store has failed");
  const CacheCounters counters = bench.stream->cache().counters();
  if (!failures && config.slots == kLayers * kExperts)
    expect(counters.evictions == 0 && counters.misses <= config.slots, what + ": all fit");
}

// As many bytes as the experts that were fetched have, and none for hits.
void counts_bytes() {
  Bench bench(config_of(kLayers * kExperts, "lru"));
  const std::vector<int32_t> ids = {0, 4, 9};
  int64_t bytes = 0;
  for (const int32_t e : ids) bytes += slot_layout(make_expert(1, e)).stored_bytes();
  for (int pass = 0; pass < 2; ++pass) {
    bench.stream->begin_step();
    bench.stream->find(1, ids, bench.exec);
    bench.stream->fetch(0, bench.exec);
    expect(bench.stream->stats().streamed_bytes == bytes, "streamed bytes are those of the misses");
  }
  const std::vector<int32_t> none(6, -1);
  expect(bench.stream->find(0, none, bench.exec) == 1, "a look-up of no experts is one wave");
  expect(std::equal(none.begin(), none.end(), bench.stream->fetch(0, bench.exec)), "and has no choices");
}

// A bank has every expert as a slot would have it, whatever the order of its pieces; gives its memory back, also when the
// store fails or the caller stops it.
void banks() {
  std::vector<ExpertWeights> tables[kLayers];
  HostBank::Tables spans;
  std::vector<BankPiece> order;
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    for (int32_t e = 0; e < kExperts; ++e) {
      tables[layer].push_back(make_expert(layer, e));
      for (int32_t piece = 0; piece < 3; ++piece) order.push_back({layer, e, piece});
    }
    spans.emplace_back(tables[layer]);
  }
  std::shuffle(order.begin(), order.end(), rng);
  const int64_t all_bytes = HostBank::bytes(spans, order);
  int taken = 0;
  BankMemory memory;
  memory.take = [&](size_t bytes) {
    ++taken;
    return static_cast<char*>(std::aligned_alloc(256, bytes));
  };
  memory.known_as = [](char* chunk) { return chunk + 1; };  // the device's addresses are others
  memory.give_back = [&](char* chunk) {
    --taken;
    std::free(chunk);
  };
  ThreadPool pool(3);
  const auto orders = std::make_shared<FakeStore::Orders>();
  {
    int64_t reported = -1;
    const HostBank bank(spans, FakeStore(orders), order, memory, pool, [&](int64_t done, int64_t total) {
      expect(done >= reported && total == all_bytes, "progress of a bank");
      reported = done;
    });
    expect(taken > 0 && reported == all_bytes, "a bank takes memory and says how far it is");
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      for (int32_t e = 0; e < kExperts; ++e) {
        const SlotLayout layout = slot_layout(tables[layer][static_cast<size_t>(e)]);
        const char* at = bank.experts()[static_cast<size_t>(layer * kExperts + e)] - 1;
        bool same = true;
        for (size_t part = 0; part < 3; ++part) {
          const uint8_t byte = byte_of(layer, e, static_cast<int32_t>(part));
          same = same && all_are(at + layout.data_at[part], layout.data_bytes[part], byte) &&
                 all_are(at + layout.scale_at[part], layout.scale_bytes[part], byte);
        }
        expect(same, "a bank's expert lies as in a slot");
      }
    }
  }
  {
    std::vector<BankPiece> odd;  // those of one of several ranks
    std::copy_if(order.begin(), order.end(), std::back_inserter(odd),
                 [](const BankPiece& p) { return p.expert % 2 == 1; });
    const HostBank bank(spans, FakeStore(orders), odd, memory, pool, {});
    for (size_t i = 0; i < bank.experts().size(); ++i)
      expect((bank.experts()[i] != nullptr) == (i % size_t{kExperts} % 2 == 1), "a bank of some experts");
    expect(HostBank::bytes(spans, odd) < all_bytes, "which takes less");
  }
  expect(taken == 0, "a bank gives its memory back");
  orders->fail_at = orders->fetches + 20;
  for (const bool stops : {false, true}) {
    try {
      const HostBank bank(spans, FakeStore(orders), order, memory, pool, [&](int64_t, int64_t) {
        if (stops) throw FuelError("stopped");
      });
      expect(false, "a bank that fails");
    } catch (const FuelError&) {
    }
    expect(taken == 0, "a bank that failed gives its memory back");
  }
}

template <typename E>
void refuses(const std::string& what, const CacheRequest& request, const CacheConfig& shape,
             std::initializer_list<std::string> words) {
  try {
    plan_cache(request, shape, 1 << 20, {3, 4, 7});
    expect(false, what + ": not refused");
  } catch (const E& error) {
    for (const std::string& word : words) {
      const std::string all = error.what() + (" | " + error.hint());
      expect(all.find(word) != std::string::npos, what + ": '" + word + "' is not in: " + all);
    }
  }
}

void budgets() {
  const CacheConfig shape = config_of(0, "lru");
  const auto plan = [&](const CacheRequest& request) {
    return plan_cache(request, shape, 1 << 20, {3, 4, 7});
  };
  const CacheBudget some = plan({(10 << 20) + 5, 0, {}});
  expect(some.slots == 10 && some.requested_bytes == (10 << 20) + 5, "a size holds whole slots");
  const CacheBudget large = plan({int64_t{56} << 30, 0, {}});
  expect(large.slots == 33 && large.bytes() == 33 << 20, "a size above all experts is cut");
  expect(large.requested_slots == 56 << 10 && large.about.find("56.00 GiB") != std::string::npos, "and said");
  expect(plan({0, 3, {}}).slots == 3, "the smallest legal cache");
  const CacheBudget map = plan({0, 0, {3, 11, int64_t{1} << 40}});
  expect(map.slots == 3 + 11 + 11 && ExpertCache(map.config).slots() == map.slots, "budgets are cut each");
  refuses<PlanError>("slots", {0, 2, {}}, shape, {"at least 3 slots", "found 2", "--expert-slots to 3"});
  refuses<PlanError>("size", {(3 << 20) - 1, 0, {}}, shape,
                     {"at least 3.00 MiB", "3 slots", "hold 2", "--expert-cache-gib to 0.002930"});
  refuses<PlanError>("map", {0, 0, {3, 2, 3}}, shape, {"layer 4", "at least 3", "found 2"});
  refuses<InputError>("map of other layers", {0, 0, {3, 3}}, shape, {"3 MoE layers", "found 2"});
  refuses<InputError>("two", {1 << 30, 4, {}}, shape, {"found 2"});
  refuses<InputError>("below 0", {0, -1, {}}, shape, {"found -1"});
}

}  // namespace

int main() {
  budgets();
  counts_bytes();
  banks();
  for (const char* policy : {"lru", "lfu", "lfru"}) {
    for (const int64_t slots : {3, 4, 8, 16, 33}) {
      const std::string what = std::string(policy) + ", " + std::to_string(slots) + " slots";
      runs(config_of(slots, policy), what, false);
      runs(config_of(slots, policy), what + ", failing", true);
    }
    CacheConfig budgets = config_of(0, policy);
    budgets.layer_slots = {3, 5, 11};
    runs(budgets, std::string(policy) + ", budgets", false);
    runs(budgets, std::string(policy) + ", budgets, failing", true);
  }
  return check::finish("test_expert_stream");
}
