// The cache of experts against a naive model after every operation: slots, victims, waves, hints and counters, with
// every policy and kind of budget, down to the smallest legal caches.
#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "base/error.h"
#include "check.h"
#include "experts/cache.h"
#include "naive_expert_cache.h"

using namespace rocket;
using check::expect;
using check::Naive;
using check::Uses;

namespace {

std::mt19937_64 rng(20261130);
int32_t draw(int32_t low, int32_t high) {
  return std::uniform_int_distribution<int32_t>(low, high)(rng);
}

// One operation of a script; belady has to know all of them before the first.
struct Operation {
  enum Kind { kPreload, kStep, kResolve, kRows, kHint, kArrived, kForget } kind;
  int32_t layer = 0;
  std::vector<int32_t> experts;
};

std::vector<int32_t> some_experts(int32_t experts, int32_t count) {
  std::vector<int32_t> all(static_cast<size_t>(experts));
  std::iota(all.begin(), all.end(), 0);
  std::vector<int32_t> chosen;
  std::sample(all.begin(), all.end(), std::back_inserter(chosen), count, rng);  // keeps the order
  return chosen;
}

// The choices of many rows, some experts much more often than others, with holes.
std::vector<int32_t> many_choices(int32_t owned, int32_t topk) {
  std::vector<int32_t> ids;
  for (int32_t row = draw(14, 40); row > 0; --row) {
    for (int32_t k = 0; k < topk; ++k) {
      const int32_t limit = draw(0, 2) ? std::max(1, owned / 3) : owned;
      ids.push_back(owned == 0 || draw(0, 9) == 0 ? -1 : draw(0, limit - 1));
    }
  }
  return ids;
}

std::vector<Operation> script(const CacheConfig& c, int32_t steps, bool hints) {
  std::vector<Operation> operations;
  for (int32_t i = draw(0, 20); i > 0; --i) {
    operations.push_back({Operation::kPreload, draw(0, c.layers - 1), {draw(0, c.experts - 1)}});
  }
  for (int32_t step = 0; step < steps; ++step) {
    operations.push_back({Operation::kStep, 0, {}});
    for (int32_t layer = 0; layer < c.layers; ++layer) {
      const int32_t owned = c.owned.empty() ? c.experts : c.owned[static_cast<size_t>(layer)];
      const int32_t topk = std::min(c.topk, owned), rows = draw(0, 5) ? 1 : draw(1, 8);
      const int32_t count = draw(0, 19) ? std::min(owned, draw(topk, topk * rows)) : draw(0, owned);
      if (draw(0, 3)) {
        operations.push_back({Operation::kResolve, layer, some_experts(owned, count)});
      } else {
        operations.push_back({Operation::kRows, layer, many_choices(owned, c.topk)});
      }
      while (hints && draw(0, 2) == 0) {
        const auto kind = std::array{Operation::kHint, Operation::kHint, Operation::kArrived,
                                     Operation::kForget}[static_cast<size_t>(draw(0, 3))];
        const Operation operation{kind, draw(0, c.layers - 1), {draw(0, c.experts - 1)}};
        operations.push_back(operation);
        if (kind == Operation::kHint && draw(0, 1)) {
          operations.push_back({Operation::kArrived, operation.layer, operation.experts});
        }
      }
    }
  }
  return operations;
}

Uses uses_of(const std::vector<Operation>& operations, const CacheConfig& c) {
  Uses uses(static_cast<size_t>(c.layers * c.experts));
  int64_t lookup = 0;
  for (const Operation& operation : operations) {
    if (operation.kind != Operation::kResolve && operation.kind != Operation::kRows) continue;
    for (const int32_t e : std::set<int32_t>(operation.experts.begin(), operation.experts.end())) {
      if (e >= 0) uses[static_cast<size_t>(operation.layer * c.experts + e)].push_back(lookup);
    }
    ++lookup;
  }
  return uses;
}

ExpertCache make_cache(const CacheConfig& config, const Uses& uses) {
  if (config.policy != "belady") return ExpertCache(config);
  return ExpertCache(config, make_belady(ExpertCache::policy_shape(config), uses));
}

bool same(const ExpertLookup& a, const ExpertLookup& b) {
  return a.expert == b.expert && a.slot == b.slot && a.hit == b.hit && a.late == b.late;
}
bool same(const ExpertFetch& a, const ExpertFetch& b) {
  return a.expert == b.expert && a.slot == b.slot && a.evicted == b.evicted &&
         a.evicted_flying == b.evicted_flying;
}

// What must hold of a look-up whatever the model says. `there`: the layer's experts before it.
bool sound(const Operation& operation, std::span<const ExpertWave> waves, const std::set<int32_t>& there,
           const ExpertCache& cache, bool fewest_waves) {
  const size_t room = static_cast<size_t>(cache.slots(operation.layer));
  std::set<int32_t> seen;
  size_t fetched = 0;
  for (size_t w = 0; w < waves.size(); ++w) {
    const ExpertWave& wave = waves[w];
    if (wave.lookups.empty() || wave.lookups.size() > room) return false;
    std::set<int32_t> members, slots;
    size_t fetch = 0;
    for (const ExpertLookup& lookup : wave.lookups) {
      if (!members.empty() && lookup.expert <= *members.rbegin()) return false;
      if (lookup.hit != there.contains(lookup.expert) || (lookup.hit && w > 0)) return false;
      members.insert(lookup.expert);
      if (!seen.insert(lookup.expert).second || !slots.insert(lookup.slot).second) return false;
      if (!lookup.hit && (fetch == wave.fetches.size() || wave.fetches[fetch++].expert != lookup.expert))
        return false;
    }
    for (const ExpertFetch& f : wave.fetches) {
      if (f.evicted.layer == operation.layer && members.contains(f.evicted.expert)) return false;
    }
    if (w + 1 == waves.size()) {
      for (const ExpertLookup& lookup : wave.lookups) {
        if (cache.slot_of(operation.layer, lookup.expert) != lookup.slot) return false;
      }
    }
    fetched += wave.fetches.size();
  }
  const size_t asked = operation.experts.size();
  const size_t hits = static_cast<size_t>(std::count_if(operation.experts.begin(), operation.experts.end(),
                                                        [&](int32_t e) { return there.contains(e); }));
  return seen == std::set<int32_t>(operation.experts.begin(), operation.experts.end()) &&
         fetched == asked - hits && (!fewest_waves || waves.size() == (room ? (asked + room - 1) / room : 0));
}

bool agree(const ExpertCache& cache, const Naive& naive) {
  int32_t resident = 0;
  for (size_t i = 0; i < naive.slots.size(); ++i) {
    const Naive::Slot& slot = naive.slots[i];
    if (!(cache.at(static_cast<int32_t>(i)) == ExpertKey{slot.layer, slot.expert})) return false;
    if (slot.layer < 0) continue;
    ++resident;
    if (cache.slot_of(slot.layer, slot.expert) != static_cast<int32_t>(i)) return false;
  }
  const CacheCounters sum = cache.counters();
  return cache.slots() == static_cast<int32_t>(naive.slots.size()) && cache.resident() == resident &&
         cache.layer_counters() == naive.counters && cache.steps() == naive.steps &&
         naive.preloaded + sum.misses + sum.hints_taken - sum.evictions - naive.forgotten == resident;
}

bool apply(const Operation& o, ExpertCache& cache, Naive& naive) {
  const int32_t expert = o.experts.empty() ? 0 : o.experts[0];
  switch (o.kind) {
    case Operation::kPreload:
      return cache.preload(o.layer, expert) == naive.preload(o.layer, expert);
    case Operation::kStep:
      cache.begin_step();
      naive.step();
      return true;
    case Operation::kResolve:
    case Operation::kRows: {
      std::set<int32_t> there;
      for (const Naive::Slot& slot : naive.slots) {
        if (slot.layer == o.layer) there.insert(slot.expert);
      }
      const bool rows = o.kind == Operation::kRows;
      const auto waves = rows ? cache.resolve_rows(o.layer, o.experts) : cache.resolve(o.layer, o.experts);
      const auto expected = rows ? naive.resolve_rows(o.layer, o.experts) : naive.resolve(o.layer, o.experts);
      std::set<int32_t> asked(o.experts.begin(), o.experts.end());
      asked.erase(-1);
      const Operation distinct{o.kind, o.layer, {asked.begin(), asked.end()}};
      bool ok = waves.size() == expected.size() && sound(distinct, waves, there, cache, !rows);
      for (size_t w = 0; ok && w < waves.size(); ++w) {
        ok = std::ranges::equal(waves[w].lookups, expected[w].lookups,
                                [](auto& a, auto& b) { return same(a, b); }) &&
             std::ranges::equal(waves[w].fetches, expected[w].fetches,
                                [](auto& a, auto& b) { return same(a, b); });
      }
      return ok;
    }
    case Operation::kHint: {
      const int32_t there = naive.find(o.layer, expert);
      if (naive.room(o.layer) == 0) return true;
      const HintedSlot hinted = cache.hint(o.layer, expert);
      if (there >= 0) {
        naive.keep(there);
        return hinted.answer == HintAnswer::kThere && hinted.slot == there;
      }
      ExpertKey evicted;
      const auto slot = naive.hint(o.layer, expert, &evicted);
      if (!slot) return hinted.answer == HintAnswer::kRefused && hinted.slot == -1;
      return hinted.answer == HintAnswer::kTaken && hinted.slot == *slot && hinted.evicted == evicted;
    }
    case Operation::kArrived:
      cache.arrived(o.layer, expert);
      naive.arrived(o.layer, expert);
      return true;
    case Operation::kForget:
      cache.forget(o.layer, expert);
      naive.forget(o.layer, expert);
      return true;
  }
  return false;
}

CacheConfig random_config(const std::string& policy, bool budgets, bool smallest) {
  CacheConfig c;
  c.layers = draw(1, 4);
  c.experts = draw(1, 24);
  c.topk = draw(1, std::min(c.experts, 6));
  c.policy = policy;
  if (draw(0, 2) == 0) {
    for (int32_t layer = 0; layer < c.layers; ++layer) c.owned.push_back(draw(budgets ? 0 : 1, c.experts));
  }
  const auto pick = [&](int64_t fewest, int32_t most) {
    return smallest ? fewest : fewest + draw(0, std::max(0, most - static_cast<int32_t>(fewest)));
  };
  if (budgets) {
    for (int32_t l = 0; l < c.layers; ++l)
      c.layer_slots.push_back(pick(ExpertCache::fewest_slots(c, l), c.experts + 2));
  } else {
    c.slots = pick(ExpertCache::fewest_slots(c), c.layers * c.experts + 2);
  }
  return c;
}

void against_the_naive_model(const std::string& policy, bool budgets, bool smallest) {
  const std::string what = policy + (budgets ? ", budgets" : ", one budget") + (smallest ? ", smallest" : "");
  int64_t hits = 0, waves = 0, useful = 0, late = 0, wasted = 0;
  for (int trial = 0; trial < 30; ++trial) {
    const CacheConfig config = random_config(policy, budgets, smallest);
    const auto operations = script(config, 150, trial % 2 == 0);
    const Uses uses = uses_of(operations, config);
    ExpertCache cache = make_cache(config, uses);
    Naive naive(config, uses);
    for (size_t i = 0; i < operations.size(); ++i) {
      if (!expect(apply(operations[i], cache, naive) && agree(cache, naive),
                  what + ": trial " + std::to_string(trial) + ", operation " + std::to_string(i))) {
        return;
      }
      if (operations[i].kind == Operation::kResolve) {
        waves += static_cast<int64_t>(operations[i].experts.size()) > cache.slots(operations[i].layer);
      }
    }
    const CacheCounters sum = cache.counters();
    hits += sum.hits, useful += sum.hints_useful, late += sum.hints_late, wasted += sum.hints_wasted;
  }
  expect(hits > 0 && waves > 0 && useful > 0 && late > 0 && wasted > 0,
         what + ": the scripts reach everything");
  std::printf("ok    %-32s %lld look-ups in waves, hints: %lld useful, %lld late, %lld wasted\n",
              what.c_str(), static_cast<long long>(waves), static_cast<long long>(useful),
              static_cast<long long>(late), static_cast<long long>(wasted));
}

// The fewest misses there can be, over every choice of victims: contents are bit masks.
int64_t fewest_misses(const std::vector<uint32_t>& asked, int32_t slots) {
  std::map<uint32_t, int64_t> best = {{0, 0}};
  for (const uint32_t need : asked) {
    std::map<uint32_t, int64_t> next;
    for (const auto& [held, misses] : best) {
      const uint32_t others = held & ~need;
      for (uint32_t kept = others;; kept = (kept - 1) & others) {
        if (std::popcount(kept | need) <= slots) {
          const int64_t cost = misses + std::popcount(need & ~held);
          const auto [entry, fresh] = next.try_emplace(kept | need, cost);
          if (!fresh) entry->second = std::min(entry->second, cost);
        }
        if (kept == 0) break;
      }
    }
    best.swap(next);
  }
  int64_t fewest = INT64_MAX;
  for (const auto& [held, misses] : best) fewest = std::min(fewest, misses);
  return fewest;
}

void belady_is_optimal() {
  for (int trial = 0; trial < 60; ++trial) {
    CacheConfig c;
    c.layers = 1, c.experts = draw(4, 8), c.topk = draw(1, 3), c.slots = draw(c.topk, c.experts),
    c.policy = "belady";
    std::vector<Operation> operations;
    std::vector<uint32_t> asked;
    for (int step = 0; step < 25; ++step) {
      operations.push_back({Operation::kResolve, 0, some_experts(c.experts, c.topk)});
      asked.push_back(0);
      for (const int32_t e : operations.back().experts) asked.back() |= 1u << e;
    }
    std::map<std::string, int64_t> misses;
    for (const char* policy : {"belady", "lru", "lfu", "lfru"}) {
      c.policy = policy;
      ExpertCache cache = make_cache(c, uses_of(operations, c));
      for (const Operation& o : operations) cache.resolve(0, o.experts);
      misses[policy] = cache.counters().misses;
      expect(misses[policy] >= misses["belady"], std::string(policy) + " misses at least as often as belady");
    }
    expect(misses["belady"] == fewest_misses(asked, static_cast<int32_t>(c.slots)),
           "belady misses as seldom as can be");
  }
}

template <typename E>
void refuses(const std::string& what, const std::vector<std::string>& words,
             const std::function<void()>& call) {
  try {
    call();
    expect(false, what + ": expected an error");
  } catch (const E& error) {
    const std::string text = std::string(error.what()) + " " + error.hint();
    for (const auto& word : words)
      expect(text.find(word) != std::string::npos, what + ": '" + word + "' in: " + text);
  }
}

void limits_and_errors() {
  CacheConfig c;
  c.layers = 3, c.experts = 16, c.topk = 4, c.slots = 3;
  refuses<PlanError>("too few slots", {"at least 4", "found 3", "give it 4"}, [&] { ExpertCache cache(c); });
  c.layer_slots = {4, 16, 2};
  refuses<PlanError>("a layer with too few", {"layer 2", "at least 4", "found 2"},
                     [&] { ExpertCache cache(c); });
  c.owned = {16, 16, 2};
  ExpertCache small(c);
  expect(small.slots() == 22 && small.slots(2) == 2 && small.first_slot(2) == 20, "budgets lie side by side");
  c.layer_slots = {99, 99, 99};
  expect(ExpertCache(c).slots() == 34, "budgets are cut to the experts there are");
  c.layer_slots.clear(), c.slots = 1000;
  expect(ExpertCache(c).slots() == 34, "one budget is cut, too");
  c.policy = "fifo";
  refuses<InputError>("an unknown policy", {"lru, lfu, lfru", "fifo"}, [&] { ExpertCache cache(c); });
  c.policy = "belady";
  refuses<InputError>("belady without a future", {"future"}, [&] { ExpertCache cache(c); });
  c.policy = "lru";
  ExpertCache cache(c);
  const auto resolve = [&](int32_t layer, std::vector<int32_t> ids) {
    return [&cache, layer, ids] { cache.resolve(layer, ids); };
  };
  refuses<InputError>("a layer there is not", {"layer from 0 to 2", "found 3"}, resolve(3, {1}));
  refuses<InputError>("an expert there is not", {"from 0 to 15", "found 16"}, resolve(0, {16}));
  refuses<InputError>("out of order", {"ascending", "1 after 2"}, resolve(0, {2, 1}));
  refuses<InputError>("twice", {"distinct", "2 after 2"}, resolve(0, {2, 2}));
  expect(cache.counters() == CacheCounters{} && cache.resident() == 0, "a refused look-up changes nothing");
  c.owned[1] = -1;
  refuses<InputError>("owned out of range", {"owned", "-1"}, [&] { ExpertCache bad(c); });
  c.owned = {1};
  refuses<InputError>("owned of other length", {"owned", "3 numbers", "found 1"},
                      [&] { ExpertCache bad(c); });
}

void by_hand() {
  CacheConfig c;
  c.layers = 2, c.experts = 8, c.topk = 2, c.slots = 3;
  ExpertCache cache(c);
  const std::vector<int32_t> choices = {5, -1, 2, 5, 2, 7};
  const auto distinct = cache.distinct(choices);
  expect(std::vector<int32_t>(distinct.begin(), distinct.end()) == std::vector<int32_t>{2, 5, 7},
         "distinct choices");
  cache.begin_step();
  cache.resolve(0, std::vector<int32_t>{2, 5});
  cache.begin_step();
  // 2 is the older of the two; looked up, it is safe, and 5 makes way for the second miss.
  const auto waves = cache.resolve(0, std::vector<int32_t>{0, 1, 2});
  expect(waves.size() == 1 && waves[0].fetches.size() == 2, "one wave, two misses");
  expect(waves[0].fetches[0].evicted == ExpertKey{} && waves[0].fetches[1].evicted == ExpertKey{0, 5},
         "hits are safe");
  const auto many = cache.resolve(0, std::vector<int32_t>{0, 2, 3, 4, 5, 6, 7});
  expect(many.size() == 3 && many[0].lookups[2].expert == 3 && many[2].lookups.size() == 1,
         "waves, hits first");
  expect(cache.counters() == CacheCounters{3, 9, 6, 0, 0, 0, 0}, "counters");
  expect(cache.window().counters == cache.counters() && cache.window().counters == CacheCounters{},
         "windows");
  cache.begin_step();
  cache.resolve(1, std::vector<int32_t>{0, 1, 2});
  expect(cache.hint(1, 3).answer == HintAnswer::kRefused, "a hint evicts nothing that the step uses");
  cache.begin_step();
  expect(cache.hint(1, 3).answer == HintAnswer::kTaken, "what earlier steps used it may evict");
  const auto late = cache.resolve(1, std::vector<int32_t>{3, 4});
  expect(late[0].lookups[0].hit && late[0].lookups[0].late && late[0].fetches.size() == 1,
         "a hint that comes late");
}

// After a prompt each layer has its most used experts, and the next chunk of it finds them.
void after_a_prompt() {
  CacheConfig c;
  c.layers = 4, c.experts = 12, c.topk = 2, c.slots = 14;
  ExpertCache cache(c);
  std::vector<int32_t> ids;  // expert e in about e rows, so that 9, 10 and 11 are the most used
  for (int32_t e = 0; e < c.experts; ++e) ids.insert(ids.end(), static_cast<size_t>(e + 1), e);
  for (int chunk = 0; chunk < 3; ++chunk) {
    cache.begin_step();
    for (int32_t layer = 0; layer < c.layers; ++layer) {
      const int64_t before = cache.layer_counters()[static_cast<size_t>(layer)].misses;
      const auto waves = cache.resolve_rows(layer, ids);
      expect(waves[0].lookups.size() == 5 && waves[1].lookups.size() == 2,
             "three that stay, and a pool of two");
      const int64_t missed = cache.layer_counters()[static_cast<size_t>(layer)].misses - before;
      expect(missed <= (chunk == 0 ? 12 : 9), "a chunk finds those of the one before");
    }
    for (int32_t layer = 0; layer < c.layers; ++layer) {
      expect(cache.slot_of(layer, 11) >= 0, "each layer has its most used expert");
      int32_t there = 0;
      for (int32_t e = 6; e < c.experts; ++e) there += cache.slot_of(layer, e) >= 0;
      expect(there >= 3, "and as many of the most used as it keeps");
    }
  }
  cache.begin_step();
  int32_t retired = 0;
  for (int32_t e = 0; e < c.experts; ++e) retired += cache.slot_of(3, e) >= 0;
  expect(retired == 5, "the last layer has the pool, too");
  std::vector<int32_t> missing;
  for (int32_t e = 0; missing.size() < 2; ++e) {
    if (cache.slot_of(0, e) < 0) missing.push_back(e);
  }
  for (const ExpertFetch& fetch : cache.resolve(0, missing)[0].fetches)
    expect(fetch.evicted.layer == 3, "the pool makes way before what the layers keep");
}

// Hints that know the future: before each look-up the next one's experts are hinted. They arrive at once, or too late.
void perfect_hints() {
  CacheConfig c;
  c.layers = 3, c.experts = 32, c.topk = 4, c.slots = 30;
  std::vector<std::vector<int32_t>> asked;
  for (int i = 0; i < 300; ++i) asked.push_back(some_experts(c.experts, c.topk));
  const auto decode = [&](bool hinted, bool arrive) {
    ExpertCache cache(c);
    for (size_t i = 0; i < asked.size(); ++i) {
      const auto layer_of = [&](size_t lookup) { return static_cast<int32_t>(lookup) % c.layers; };
      if (layer_of(i) == 0) cache.begin_step();
      cache.resolve(layer_of(i), asked[i]);
      for (size_t j = 0; hinted && i + 1 < asked.size() && j < asked[i + 1].size(); ++j) {
        cache.hint(layer_of(i + 1), asked[i + 1][j]);
        if (arrive) cache.arrived(layer_of(i + 1), asked[i + 1][j]);
      }
    }
    return cache.counters();
  };
  const CacheCounters without = decode(false, false), early = decode(true, true), late = decode(true, false);
  const int64_t all = 300 * c.topk;
  expect(without.misses > all / 2 && without.hits + without.misses == all,
         "without hints most look-ups miss");
  expect(early.misses == c.topk && early.hits == all - c.topk,
         "with perfect hints only the first look-up misses");
  expect(early.hints_useful == early.hints_taken && early.hints_late == 0 && early.hints_wasted == 0,
         "all of use");
  expect(late.hints_late == late.hints_taken && late.hints_useful == 0, "those that do not arrive are late");
  std::printf("ok    perfect hints hide %lld of %lld misses\n",
              static_cast<long long>(without.misses - early.misses), static_cast<long long>(without.misses));
}

// Counts look-ups a second through a large cache that misses half of them.
void speed() {
  CacheConfig c;
  c.layers = 42, c.experts = 288, c.topk = 8, c.slots = 42 * 144;
  std::vector<std::vector<int32_t>> asked;
  for (int i = 0; i < 42 * 50; ++i) asked.push_back(some_experts(c.experts, c.topk));
  for (const char* policy : {"lru", "lfu", "lfru"}) {
    c.policy = policy;
    ExpertCache cache(c);
    const auto start = std::chrono::steady_clock::now();
    for (int pass = 0; pass < 20; ++pass) {
      for (size_t i = 0; i < asked.size(); ++i) cache.resolve(static_cast<int32_t>(i) % c.layers, asked[i]);
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("      %-5s %.0f ns an expert looked up, %.0f %% hits\n", policy,
                1e9 * seconds / (20.0 * 42 * 50 * 8),
                100.0 * static_cast<double>(cache.counters().hits) / (20.0 * 42 * 50 * 8));
  }
}

}  // namespace

int main() {
  after_a_prompt();
  perfect_hints();
  speed();
  by_hand();
  limits_and_errors();
  for (const char* policy : {"lru", "lfu", "lfru", "belady"}) {
    for (const bool budgets : {false, true}) {
      for (const bool smallest : {false, true}) against_the_naive_model(policy, budgets, smallest);
    }
  }
  belady_is_optimal();
  return check::finish("test_expert_cache");
}
