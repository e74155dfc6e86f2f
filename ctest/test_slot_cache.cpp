// The cache of experts that devices look up in, on the host: slot for slot what ExpertCache does with lru, for caches of
// every size, with budgets and in waves, by one thread and by several.
#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "experts/slot_state.h"
#include "ops/slot_hint.h"
#include "ops/slot_lookup.h"
#include "slot_team.h"

using namespace rocket;
using check::expect;
using check::HostBlock;
using check::Team;

namespace {

std::mt19937_64 rng(20261130);
int32_t draw(int32_t low, int32_t high) {
  return std::uniform_int_distribution<int32_t>(low, high)(rng);
}

// Weights of two formats, so that slots differ.
std::vector<ExpertWeights> make_table(int32_t experts) {
  std::vector<ExpertWeights> table;
  for (int32_t e = 0; e < experts; ++e) {
    const WeightFormat format = e % 3 == 0 ? WeightFormat::kBF16 : WeightFormat::kNVFP4;
    const auto weight = [&](int64_t out, int64_t in) {
      return Weight{format, out, in, nullptr, nullptr, 0.5f};
    };
    table.push_back({weight(16, 32), weight(16, 32), weight(32, 16)});
  }
  return table;
}

class Device {
 public:
  Device(const CacheConfig& config, int64_t choices, int threads)
      : state_(config, choices), table_(make_table(config.experts)), threads_(threads) {
    const std::vector<std::span<const ExpertWeights>> tables(static_cast<size_t>(config.layers), table_);
    image_ = state_.image(tables, {});
    slot_bytes_ = 0;
    for (const ExpertWeights& e : table_) slot_bytes_ = std::max(slot_bytes_, slot_layout(e).bytes);
    slots_.resize(static_cast<size_t>(slot_bytes_ * state_.slots()));
    cache = state_.cache(image_.data(), slots_.data(), slot_bytes_);
  }
  void look_up(int32_t layer, const std::vector<int32_t>& ids) {
    Team team(threads_);
    const auto work = [&](int thread) {
      HostBlock block(team, thread);
      slot_lookup(cache, layer, ids.data(), static_cast<int64_t>(ids.size()), scratch_, block);
    };
    std::vector<std::thread> others;
    for (int t = 1; t < threads_; ++t) others.emplace_back(work, t);
    work(0);
    for (std::thread& other : others) other.join();
  }
  void begin_step() { *cache.step_floor = *cache.clock; }
  void hint(int32_t layer, int32_t expert) {
    Team team(1);
    HostBlock block(team, 0);
    slot_hint(state_.hints(image_.data(), slots_.data(), slot_bytes_).cache, layer, expert, block);
  }
  StreamStats stats() const { return state_.stats(image_.data() + state_.stats_at()); }
  const SlotState& state() const { return state_; }
  int64_t stored(int32_t expert) const {
    return slot_layout(table_[static_cast<size_t>(expert)]).stored_bytes();
  }
  // Whether the table's entry of an expert points to where its parts lie in a slot.
  bool points_to(int32_t layer, int32_t expert, int32_t slot) const {
    ExpertWeights expected = table_[static_cast<size_t>(expert)];
    place_in_slot(slot_layout(expected), cache.base + slot * slot_bytes_, &expected);
    const ExpertWeights& found = cache.table[layer * cache.experts + expert];
    const Weight* const a[] = {&found.gate, &found.up, &found.down};
    const Weight* const b[] = {&expected.gate, &expected.up, &expected.down};
    for (int i = 0; i < 3; ++i) {
      if (a[i]->data != b[i]->data || a[i]->block_scale != b[i]->block_scale) return false;
      if (a[i]->format != b[i]->format || a[i]->global_scale != 0.5f) return false;
    }
    return true;
  }

  SlotCache cache;

 private:
  SlotState state_;
  std::vector<ExpertWeights> table_;
  std::vector<char> image_, slots_;
  int64_t slot_bytes_;
  int threads_;
  SlotScratch scratch_;
};

// The waves as the device has them, against those of the cache: its first wave is 0 and 1 together.
void check_waves(const Device& device, int32_t layer, const std::vector<int32_t>& ids,
                 std::span<const ExpertWave> waves, const std::string& what) {
  const SlotCache& c = device.cache;
  std::vector<int32_t> distinct = ids;
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  const int32_t bound = device.state().waves(layer, static_cast<int64_t>(ids.size()));
  expect(static_cast<int32_t>(waves.size()) + 1 <= bound, what + ": no more waves than the bound");
  std::vector<int> computed(ids.size());
  size_t misses = 0;
  for (int32_t wave = 0; wave < bound; ++wave) {
    const size_t theirs = static_cast<size_t>(std::max(0, wave - 1));
    std::vector<int32_t> expected;
    if (theirs < waves.size()) {
      for (const ExpertLookup& lookup : waves[theirs].lookups) {
        if (lookup.hit == (wave == 0)) expected.push_back(lookup.expert);
        if (lookup.hit != (wave == 0)) continue;
        expect(device.points_to(layer, lookup.expert, lookup.slot), what + ": the table points to the slot");
        if (wave == 0) continue;
        expect(c.miss[misses].expert == lookup.expert && c.miss[misses].slot == lookup.slot,
               what + ": misses and their slots");
        ++misses;
      }
    }
    const SlotRange range = slot_wave(*c.lookup, wave);
    if (wave > 0)
      expect(range.end - range.begin == static_cast<int32_t>(expected.size()), what + ": misses of a wave");
    for (size_t i = 0; i < ids.size(); ++i) {
      const bool member = ids[i] >= 0 && std::binary_search(expected.begin(), expected.end(), ids[i]);
      int32_t found = -1;
      if (wave == 0) found = c.hit_id[i];
      if (wave == 1) found = c.miss_id[i];
      if (wave >= 1)
        expect(wave > 1 || slot_wave_id(range, c.rank, ids[i]) == found,
               what + ": two ways to a wave's choices");
      if (wave > 1) found = slot_wave_id(range, c.rank, ids[i]);
      expect(found == (member ? ids[i] : -1), what + ": choices of wave " + std::to_string(wave));
      computed[i] += found >= 0;
    }
  }
  for (size_t i = 0; i < ids.size(); ++i)
    expect(computed[i] == (ids[i] >= 0), what + ": each choice belongs to one wave");
}

void check_state(const Device& device, const ExpertCache& cache, const CacheConfig& config,
                 const std::string& what) {
  for (int32_t slot = 0; slot < cache.slots(); ++slot) {
    const ExpertKey key = cache.at(slot);
    const int32_t expected = key.layer < 0 ? -1 : key.layer * config.experts + key.expert;
    expect(device.cache.key[slot] == expected, what + ": slot " + std::to_string(slot));
    if (expected >= 0) expect(device.cache.slot_of[expected] == slot, what + ": slot of an expert");
  }
  int64_t there = 0;
  for (int32_t key = 0; key < config.layers * config.experts; ++key) there += device.cache.slot_of[key] >= 0;
  expect(there == cache.resident(), what + ": experts that are there");
  for (int32_t layer = 0; layer < config.layers; ++layer) {
    const CacheCounters& a = cache.layer_counters()[static_cast<size_t>(layer)];
    const SlotCounters& b = device.cache.counters[layer];
    expect(a.hits == b.hits && a.misses == b.misses && a.evictions == b.evictions,
           what + ": counters of layer " + std::to_string(layer));
  }
}

// Rows of top-k choices that favour low experts, so that there are hits in small caches.
std::vector<int32_t> choices(const CacheConfig& config, int32_t rows) {
  std::vector<int32_t> ids;
  for (int32_t row = 0; row < rows; ++row) {
    std::vector<int32_t> mine;
    while (static_cast<int32_t>(mine.size()) < config.topk) {
      const int32_t e = draw(0, 2) == 0 ? draw(0, config.experts - 1)
                                        : draw(0, std::min(config.experts - 1, 2 * config.topk));
      if (std::find(mine.begin(), mine.end(), e) == mine.end()) mine.push_back(e);
    }
    std::sort(mine.begin(), mine.end());
    if (draw(0, 9) == 0) mine.back() = -1;
    ids.insert(ids.end(), mine.begin(), mine.end());
  }
  return ids;
}

// Mostly a decode step's; else any number, and often one just beyond what counts as few.
int32_t rows_of_step(int32_t most_rows) {
  switch (draw(0, 7)) {
    case 0:
    case 1:
      return draw(1, most_rows);
    case 2:
      return std::min(most_rows, draw(16, 19));
    default:
      return draw(1, std::min(2, most_rows));
  }
}

void runs(const CacheConfig& config, int32_t most_rows, int steps, int threads) {
  std::string what = std::string(config.many_rows ? "" : "as any, ") + std::to_string(config.layers) +
                     " layers of " + std::to_string(config.experts) + ", " +
                     (config.layer_slots.empty() ? std::to_string(config.slots) + " slots" : "budgets") +
                     ", threads " + std::to_string(threads);
  ExpertCache cache(config);
  Device device(config, int64_t{most_rows} * config.topk, threads);
  expect(device.state().slots() == cache.slots(), what + ": slots");
  int64_t streamed = 0;
  for (int step = 0; step < steps; ++step) {
    cache.begin_step();
    for (int32_t layer = 0; layer < config.layers; ++layer) {
      if (draw(0, 19) == 0) continue;
      std::vector<int32_t> ids = choices(config, rows_of_step(most_rows));
      if (draw(0, 29) == 0) std::fill(ids.begin(), ids.end(), -1);
      const std::span<const ExpertWave> waves = cache.resolve_rows(layer, ids);
      for (const ExpertWave& wave : waves) {
        for (const ExpertFetch& fetch : wave.fetches) streamed += device.stored(fetch.expert);
      }
      device.look_up(layer, ids);
      check_waves(device, layer, ids, waves, what);
      expect(*device.cache.streamed == static_cast<uint64_t>(streamed), what + ": streamed bytes");
    }
    if (step % 4 == 0 || step + 1 == steps) check_state(device, cache, config, what);
  }
}

// Hints between steps, into free slots and others, as ExpertCache takes them.
void hints(const CacheConfig& config, int32_t most_rows, int steps) {
  const std::string what = "hints, " + std::to_string(config.slots) + " slots";
  ExpertCache cache(config);
  Device device(config, int64_t{most_rows} * config.topk, 1);
  int64_t useful = 0, wasted = 0;
  for (int step = 0; step < steps; ++step) {
    for (int n = draw(0, 9); n > 0; --n) {
      const int32_t layer = draw(0, config.layers - 1), expert = draw(0, config.experts - 1);
      const HintedSlot taken = cache.hint(layer, expert);
      device.hint(layer, expert);
      if (taken.answer != HintAnswer::kTaken) continue;
      cache.arrived(layer, expert);
      expect(device.points_to(layer, expert, taken.slot), what + ": the table points to the slot");
    }
    check_state(device, cache, config, what);
    cache.begin_step();
    device.begin_step();
    for (int32_t layer = 0; layer < config.layers; ++layer) {
      const std::vector<int32_t> ids = choices(config, draw(1, most_rows));
      device.look_up(layer, ids);
      check_waves(device, layer, ids, cache.resolve_rows(layer, ids), what);
    }
    check_state(device, cache, config, what);
    const StreamStats stats = device.stats();
    expect(stats.layers == cache.layer_counters(), what + ": counters");
    const CacheCounters sum = cache.counters();
    expect(sum.hints_taken == sum.hints_useful + sum.hints_wasted + stats.hints_there, what + ": each hint");
    useful = stats.hint_bytes.useful, wasted = stats.hint_bytes.wasted;
  }
  const bool tight =
      config.layer_slots.empty() && config.slots < 2 * config.topk;  // one layer pushes out another's
  expect(tight || (useful > 0 && wasted > 0), what + ": of both kinds");
}

CacheConfig config_of(int32_t layers, int32_t experts, int32_t topk, int64_t slots) {
  CacheConfig c;
  c.layers = layers, c.experts = experts, c.topk = topk, c.slots = slots;
  return c;
}

void all() {
  for (const int threads : {1, 3}) {
    const int steps = threads == 1 ? 150 : 20;
    for (const int64_t slots : {3, 4, 9, 17, 32, 33}) {
      for (const int32_t most_rows : {7, 40}) runs(config_of(3, 11, 3, slots), most_rows, steps, threads);
    }
    for (const int64_t slots : {6, 7, 23, 60, 90, 150, 255, 256})
      runs(config_of(4, 64, 6, slots), 30, steps, threads);
    for (const int64_t slots : {8, 100, 719, 1440}) runs(config_of(5, 288, 8, slots), 64, steps / 3, threads);
    runs(config_of(1, 1, 1, 1), 3, 20, threads);
    runs(config_of(2, 32, 4, 40), 9, steps, threads);
    runs(config_of(2, 65, 6, 6), 30, steps / 2, threads);
    CacheConfig budgets = config_of(4, 40, 4, 0);
    budgets.layer_slots = {4, 7, 40, int64_t{1} << 40};
    runs(budgets, 20, steps, threads);
    budgets = config_of(5, 33, 3, 0);
    budgets.layer_slots = {3, 5, 16, 32, 33};
    runs(budgets, 48, steps, threads);
    CacheConfig owned = config_of(3, 24, 4, 30);
    owned.owned = {24, 9, 2};
    runs(owned, 24, steps, threads);
    CacheConfig as_any = config_of(3, 40, 4, 50);
    as_any.many_rows = false;
    runs(as_any, 40, steps, threads);
  }
  for (const int64_t slots : {6, 7, 23, 90, 150}) hints(config_of(4, 64, 6, slots), 3, 200);
  CacheConfig budgets = config_of(4, 40, 4, 0);
  budgets.layer_slots = {4, 7, 38, 11};
  hints(budgets, 16, 200);
  runs(config_of(2, 4096, 16, 5000), 512, 12, 1);
  runs(config_of(2, 4096, 64, 64), 200, 6, 1);
  try {
    SlotState(config_of(1, 4097, 8, 8), 8);
    expect(false, "more experts than a look-up takes are refused");
  } catch (const InputError& error) {
    expect(std::string(error.what()).find("4097") != std::string::npos, "and their number is said");
  }
  CacheConfig lfu = config_of(1, 9, 2, 4);
  lfu.policy = "lfu";
  try {
    SlotState(lfu, 8);
    expect(false, "other policies are refused");
  } catch (const InputError&) {
  }
}

}  // namespace

int main() {
  all();
  return check::finish("test_slot_cache");
}
