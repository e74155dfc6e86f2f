// Exclusive tiers on the host: the look-ups of a cache whose experts lie either in a slot or in a place of the bank, the
// swaps wave by wave, hints between steps, and the fill at the start. After every look-up each expert is in exactly one
// place, with its own bytes, and in the slot where ExpertCache has it.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "experts/slot_state.h"
#include "experts/split_bank.h"
#include "ops/slot_hint.h"
#include "ops/slot_lookup.h"
#include "pattern_store.h"
#include "slot_team.h"

using namespace rocket;
using check::expect;
using check::HostBlock;
using check::Team;

namespace {

std::mt19937_64 rng(20261201);
int32_t draw(int32_t low, int32_t high) {
  return std::uniform_int_distribution<int32_t>(low, high)(rng);
}

// Memory that counts what is out.
struct Memory {
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    for (char* const chunk : out) std::free(chunk);
  }
  std::set<char*> out;
  int taken = 0, given_back = 0, refuse_after = 1 << 30;
  BankMemory bank() {
    BankMemory memory;
    memory.take = [this](size_t bytes) {
      if (taken == refuse_after) throw PlanError("no more memory");
      ++taken;
      return *out.insert(static_cast<char*>(std::malloc(bytes))).first;
    };
    memory.known_as = [](char* p) { return static_cast<const char*>(p); };
    memory.give_back = [this](char* p) {
      ++given_back;
      out.erase(p);
      std::free(p);
    };
    return memory;
  }
};

// Whether the parts of an expert at `slot` are its own.
bool has_bytes(const SlotLayout& layout, int32_t layer, int32_t expert, const char* slot) {
  for (int32_t part = 0; part < 3; ++part) {
    const size_t i = static_cast<size_t>(part);
    const auto same = [&](int which, int64_t at, int64_t bytes) {
      const std::vector<char> all = check::bank_bytes(layer, expert, which, bytes);
      return std::equal(all.begin(), all.end(), slot + at);
    };
    if (!same(part, layout.data_at[i], layout.data_bytes[i])) return false;
    if (!same(3 + part, layout.scale_at[i], layout.scale_bytes[i])) return false;
  }
  return true;
}

class Tiered {
 public:
  Tiered(const CacheConfig& config, int64_t choices, int threads)
      : state_(config, choices, Tiers::kExclusive),
        table_(check::stream_table(config.experts, 32, 16, true)),
        threads_(threads) {
    const HostBank::Tables tables(static_cast<size_t>(config.layers), table_);
    int64_t slot_bytes = 0;
    for (const ExpertWeights& e : table_) slot_bytes = std::max(slot_bytes, slot_layout(e).bytes);
    bank_ = std::make_unique<SplitBank>(tables, state_.in_slots(), state_.in_places(), memory_.bank());
    slots_.resize(static_cast<size_t>(slot_bytes * state_.slots()), '\x7f');
    image_ = state_.image(tables, bank_->places(), slots_.data(), slot_bytes);
    cache = state_.cache(image_.data(), slots_.data(), slot_bytes);
    places = state_.bank(image_.data());
    hints_ = state_.hints(image_.data(), slots_.data(), slot_bytes);
    ThreadPool pool(2);
    bank_->fill(check::PatternStore(), check::pattern_order(config), pool,
                [&](int32_t slot, const char* from, int64_t bytes) {
                  std::copy_n(from, bytes, slots_.data() + slot * slot_bytes);
                },
                {});
  }
  void look_up(int32_t layer, const std::vector<int32_t>& ids) {
    together([&](HostBlock& block) {
      slot_lookup(cache, layer, ids.data(), static_cast<int64_t>(ids.size()), scratch_, block);
    });
  }
  void begin_step() { *cache.step_floor = *cache.clock; }
  void hint(int32_t layer, int32_t expert) {
    together([&](HostBlock& block) { slot_hint(hints_.cache, layer, expert, block); });
    swap_on_host(hints_.cache, places, 1);
  }
  StreamStats stats() const { return state_.stats(image_.data() + state_.stats_at()); }
  const SlotState& state() const { return state_; }
  // Whether the table's entry leads to the expert's own bytes.
  bool table_has(int32_t layer, int32_t expert) const {
    const SlotLayout layout = slot_layout(table_[static_cast<size_t>(expert)]);
    const ExpertWeights& entry = cache.table[layer * cache.experts + expert];
    return entry.gate.data && has_bytes(layout, layer, expert, static_cast<const char*>(entry.gate.data));
  }
  // Each expert in a slot or in a place, alone there, with its bytes.
  std::string lost() const {
    std::set<int32_t> taken_slots, taken_places;
    for (int32_t key = 0; key < cache.layers * cache.experts; ++key) {
      const int32_t slot = cache.slot_of[key], place = cache.place_of[key];
      const std::string who = "expert " + std::to_string(key) + ": ";
      if ((slot >= 0) == (place >= 0)) return who + "in both or nowhere";
      if (slot >= 0 && (cache.key[slot] != key || !taken_slots.insert(slot).second)) return who + "slot";
      if (place >= 0 && !taken_places.insert(place).second) return who + "place";
      const char* const at = slot >= 0 ? cache.base + slot * cache.slot_bytes : places.place[place];
      const SlotLayout layout = slot_layout(table_[static_cast<size_t>(key % cache.experts)]);
      if (!has_bytes(layout, key / cache.experts, key % cache.experts, at)) return who + "bytes";
    }
    return {};
  }

  SlotCache cache;
  SlotBank places;

 private:
  template <typename F>
  void together(F part) {
    Team team(threads_);
    const auto work = [&](int thread) {
      HostBlock block(team, thread);
      part(block);
    };
    std::vector<std::thread> others;
    for (int t = 1; t < threads_; ++t) others.emplace_back(work, t);
    work(0);
    for (std::thread& other : others) other.join();
  }

  Memory memory_;
  SlotState state_;
  SlotHints hints_;
  std::vector<ExpertWeights> table_;
  std::unique_ptr<SplitBank> bank_;
  std::vector<char> image_, slots_;
  int threads_;
  SlotScratch scratch_;
};

std::vector<int32_t> choices(const CacheConfig& config, int32_t rows) {
  std::vector<int32_t> ids;
  for (int32_t row = 0; row < rows; ++row) {
    std::vector<int32_t> mine;
    while (static_cast<int32_t>(mine.size()) < config.topk) {
      const int32_t e = draw(0, 2) == 0 ? draw(0, config.experts - 1)
                                        : draw(0, std::min(config.experts - 1, 2 * config.topk));
      if (std::find(mine.begin(), mine.end(), e) == mine.end()) mine.push_back(e);
    }
    if (draw(0, 9) == 0) mine.back() = -1;
    ids.insert(ids.end(), mine.begin(), mine.end());
  }
  return ids;
}

// A look-up and its waves: each wave's experts are where the table says while it is computed with.
void look_up(Tiered& tiers, int32_t layer, const std::vector<int32_t>& ids, const std::string& what) {
  tiers.look_up(layer, ids);
  const int32_t bound = tiers.state().waves(layer, static_cast<int64_t>(ids.size()));
  const SlotCache& c = tiers.cache;
  for (int32_t wave = 0; wave < bound; ++wave) {
    swap_on_host(c, tiers.places, wave);
    const SlotRange range = slot_wave(*c.lookup, wave);
    for (size_t i = 0; i < ids.size(); ++i) {
      const int32_t id = wave == 0 ? c.hit_id[i] : slot_wave_id(range, c.rank, ids[i]);
      if (id >= 0) expect(tiers.table_has(layer, id), what + ": bytes in wave " + std::to_string(wave));
    }
  }
}

void compare(const Tiered& tiers, const ExpertCache& cache, const CacheConfig& config,
             const std::string& what) {
  for (int32_t slot = 0; slot < cache.slots(); ++slot) {
    const ExpertKey key = cache.at(slot);
    expect(key.layer >= 0 && tiers.cache.key[slot] == key.layer * config.experts + key.expert,
           what + ": slot " + std::to_string(slot));
  }
  expect(tiers.stats().layers == cache.layer_counters(), what + ": counters");
}

// Each hint that was given a slot.
void balance(const Tiered& tiers, const std::string& what) {
  const StreamStats stats = tiers.stats();
  CacheCounters sum;
  for (const CacheCounters& c : stats.layers) sum += c;
  int64_t there = 0;
  for (int32_t slot = 0; slot < tiers.state().slots(); ++slot) there += tiers.cache.hinted[slot];
  expect(stats.hints_there == there && sum.hints_taken == sum.hints_useful + sum.hints_wasted + there,
         what + ": each hint is accounted for");
  expect((stats.hint_bytes.useful > 0) == (sum.hints_useful > 0) &&
             (stats.hint_bytes.wasted > 0) == (sum.hints_wasted > 0),
         what + ": and its bytes");
}

// Between two steps, to both.
void draw_hints(Tiered& tiers, ExpertCache& cache, const CacheConfig& config) {
  for (int n = draw(0, 12); n > 0; --n) {
    const int32_t layer = draw(0, config.layers - 1), expert = draw(0, config.experts - 1);
    if (cache.hint(layer, expert).answer == HintAnswer::kTaken) cache.arrived(layer, expert);
    tiers.hint(layer, expert);
  }
}

// With hints a look-up of many rows may choose between experts that were used last in another order than the model.
void runs(const CacheConfig& config, int32_t most_rows, int steps, int threads, bool hints = false) {
  const bool modelled = !hints || most_rows <= ExpertCache::kFewRows || !config.many_rows;
  const std::string what =
      std::to_string(config.layers) + " layers of " + std::to_string(config.experts) + ", " +
      (config.layer_slots.empty() ? std::to_string(config.slots) + " slots" : "budgets") + ", threads " +
      std::to_string(threads) + (hints ? ", hints" : "");
  Tiered tiers(config, int64_t{most_rows} * config.topk, threads);
  ExpertCache cache(config);
  int32_t slot = 0;
  for (const int32_t key : tiers.state().in_slots())
    expect(cache.preload(key / config.experts, key % config.experts) == slot++, what + ": from the start");
  expect(slot == cache.slots(), what + ": every slot is full");
  expect(tiers.lost() == "", what + ": filled: " + tiers.lost());
  for (int step = 0; step < steps; ++step) {
    if (hints) draw_hints(tiers, cache, config);
    expect(tiers.lost() == "", what + ": " + tiers.lost());
    cache.begin_step();
    tiers.begin_step();
    for (int32_t layer = 0; layer < config.layers; ++layer) {
      const int32_t rows = draw(0, 3) == 0 ? draw(1, most_rows) : draw(1, std::min(2, most_rows));
      const std::vector<int32_t> ids = choices(config, rows);
      cache.resolve_rows(layer, ids);
      look_up(tiers, layer, ids, what);
      if (step % 3 == 0) expect(tiers.lost() == "", what + ": " + tiers.lost());
    }
    if (modelled) compare(tiers, cache, config, what);
    balance(tiers, what);
  }
  expect(tiers.lost() == "", what + ": at the end: " + tiers.lost());
}

CacheConfig config_of(int32_t layers, int32_t experts, int32_t topk, int64_t slots) {
  CacheConfig c;
  c.layers = layers, c.experts = experts, c.topk = topk, c.slots = slots;
  return c;
}

// The slots' experts of one group are spread over its layers, and each group of slots has its own layer's.
void what_lies_where() {
  const SlotState together(config_of(3, 8, 2, 7), 8, Tiers::kExclusive);
  expect(together.in_slots() == std::vector<int32_t>({0, 8, 16, 1, 9, 17, 2}), "as many of each layer");
  expect(together.in_places().size() == 17 && together.in_places().front() == 3, "and the rest");
  CacheConfig budgets = config_of(3, 8, 2, 0);
  budgets.layer_slots = {2, 9, 3};
  const SlotState apart(budgets, 8, Tiers::kExclusive);
  expect(apart.in_slots() == std::vector<int32_t>({0, 1, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18}),
         "each layer's budget");
  CacheConfig owned = config_of(2, 8, 2, 4);
  owned.owned = {8, 3};
  try {
    SlotState(owned, 8, Tiers::kExclusive);
    expect(false, "experts of another booster are refused");
  } catch (const InputError&) {
  }
}

class FailingStore : public check::PatternStore {
 public:
  FailingStore(int32_t expert, bool hangs) : expert_(expert), hangs_(hangs) {}
  void fetch(int32_t layer, int32_t expert, int32_t piece, const SlotLayout& layout,
             void* slot) const override {
    if (expert == expert_) throw FuelError("a read failed");
    PatternStore::fetch(layer, expert, piece, layout, slot);
  }
  bool hung() const override { return hangs_; }

 private:
  int32_t expert_;
  bool hangs_;
};

void fills() {
  const CacheConfig config = config_of(2, 12, 2, 9);
  const std::vector<ExpertWeights> table = check::stream_table(config.experts, 32, 16, true);
  const HostBank::Tables tables(2, table);
  const SlotState state(config, 8, Tiers::kExclusive);
  ThreadPool pool(2);
  {
    Memory memory;
    std::vector<int> filled(9);
    int64_t last = 0, all = 0;
    {
      SplitBank bank(tables, state.in_slots(), state.in_places(), memory.bank());
      bank.fill(
          check::PatternStore(), check::pattern_order(config), pool,
          [&](int32_t slot, const char*, int64_t) { ++filled[static_cast<size_t>(slot)]; },
          [&](int64_t done, int64_t total) {
            expect(done >= last && done <= total, "progress only grows");
            last = done, all = total;
          });
    }
    expect(std::all_of(filled.begin(), filled.end(), [](int n) { return n == 1; }), "each slot once");
    expect(last == all && all == HostBank::bytes(tables, check::pattern_order(config)),
           "progress to the end");
    expect(memory.taken == 1 && memory.given_back == 1, "memory is given back");
  }
  for (const int32_t expert : {1, 11}) {  // of a slot, of a place
    for (const bool hangs : {false, true}) {
      Memory memory;
      try {
        SplitBank bank(tables, state.in_slots(), state.in_places(), memory.bank());
        bank.fill(FailingStore(expert, hangs), check::pattern_order(config), pool,
                  [](int32_t, const char*, int64_t) {}, {});
        expect(false, "what the store throws is thrown");
      } catch (const FuelError&) {
      }
      expect(memory.given_back == (hangs ? 0 : 1), "memory stays where a read may still write");
    }
  }
  Memory none;
  none.refuse_after = 0;
  try {
    SplitBank(tables, state.in_slots(), state.in_places(), none.bank());
    expect(false, "memory that is refused");
  } catch (const PlanError&) {
  }
  try {
    SplitBank(tables, {}, {}, none.bank());
    expect(false, "nothing to hold");
  } catch (const InputError&) {
  }
}

void all() {
  what_lies_where();
  fills();
  for (const int threads : {1, 3}) {
    const int steps = threads == 1 ? 60 : 12;
    for (const int64_t slots : {3, 4, 9, 17, 32}) {
      for (const int32_t most_rows : {7, 40}) runs(config_of(3, 11, 3, slots), most_rows, steps, threads);
    }
    for (const int64_t slots : {6, 7, 23, 90, 150, 255})
      runs(config_of(4, 64, 6, slots), 30, steps / 3, threads);
    runs(config_of(1, 2, 1, 1), 3, 20, threads);
    runs(config_of(2, 65, 6, 6), 30, steps / 3, threads);
    CacheConfig budgets = config_of(4, 40, 4, 0);
    budgets.layer_slots = {4, 7, 40, 11};
    runs(budgets, 20, steps / 2, threads);
    budgets = config_of(5, 33, 3, 0);
    budgets.layer_slots = {3, 5, 16, 32, 33};
    runs(budgets, 48, steps / 2, threads);
    CacheConfig as_any = config_of(3, 40, 4, 50);
    as_any.many_rows = false;
    runs(as_any, 40, steps / 2, threads);
    runs(as_any, 40, steps / 2, threads, true);
    for (const int64_t slots : {3, 4, 9, 17, 32}) {
      for (const int32_t most_rows : {5, 16, 40})
        runs(config_of(3, 11, 3, slots), most_rows, steps, threads, true);
    }
    for (const int64_t slots : {6, 23, 150, 255})
      runs(config_of(4, 64, 6, slots), 4, steps / 3, threads, true);
    runs(budgets, 16, steps / 2, threads, true);
    runs(budgets, 48, steps / 2, threads, true);
  }
}

}  // namespace

int main() {
  all();
  return check::finish("test_slot_tiers");
}
