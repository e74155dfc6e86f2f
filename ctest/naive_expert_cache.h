// The cache of experts in its plainest form, for tests: what src/experts/cache.h promises, without any structure that
// makes it fast.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "experts/cache.h"

namespace check {

using rocket::CacheConfig;
using rocket::CacheCounters;
using rocket::ExpertFetch;
using rocket::ExpertKey;
using rocket::ExpertLookup;

using Uses = std::vector<std::vector<int64_t>>;

// Everything in its plainest form: tables of slots that are searched from end to end.
class Naive {
 public:
  struct Slot {
    int32_t layer = -1, expert = -1;
    int64_t time = 0, mark = 0;
    int hint = 0;  // 1 flying, 2 arrived
  };
  struct Wave {
    std::vector<ExpertLookup> lookups;
    std::vector<ExpertFetch> fetches;
  };

  Naive(const CacheConfig& config, Uses uses)
      : config_(config), uses_(std::move(uses)), counters(static_cast<size_t>(config.layers)) {
    std::vector<int64_t> budgets = config.layer_slots;
    if (budgets.empty()) budgets = {config.slots};
    for (size_t group = 0; group < budgets.size(); ++group) {
      int64_t owned = 0;
      for (int32_t layer = 0; layer < config.layers; ++layer) {
        if (budgets.size() > 1 && layer != static_cast<int32_t>(group)) continue;
        owned += config.owned.empty() ? config.experts : config.owned[static_cast<size_t>(layer)];
      }
      const int32_t first = static_cast<int32_t>(slots.size());
      slots.resize(slots.size() + static_cast<size_t>(std::min(budgets[group], owned)));
      groups.push_back({first, static_cast<int32_t>(slots.size())});
      std::vector<int32_t>& free = free_.emplace_back();
      for (int32_t slot = groups.back().second - 1; slot >= first; --slot) free.push_back(slot);
    }
    lookups_of_.resize(groups.size());
  }

  size_t group(int32_t layer) const { return groups.size() > 1 ? static_cast<size_t>(layer) : 0; }
  int32_t room(int32_t layer) const { return groups[group(layer)].second - groups[group(layer)].first; }
  int32_t find(int32_t layer, int32_t expert) const {
    for (size_t i = 0; i < slots.size(); ++i) {
      if (slots[i].layer == layer && slots[i].expert == expert) return static_cast<int32_t>(i);
    }
    return -1;
  }

  void step() {
    ++steps;
    floor_ = ++clock_;
  }

  std::vector<Wave> resolve(int32_t layer, const std::vector<int32_t>& experts) {
    ++now_;
    if (config_.policy == "lfru" &&
        ++lookups_of_[group(layer)] % (groups.size() > 1 ? 128 : 128 * config_.layers) == 0) {
      for (auto& [key, count] : count_) {
        if (group(key.first) == group(layer)) count /= 2;
      }
    }
    std::vector<int32_t> hits, misses;
    for (const int32_t e : experts) (find(layer, e) >= 0 ? hits : misses).push_back(e);
    std::vector<std::vector<int32_t>> plan;
    std::vector<int32_t> first = hits;
    size_t next = 0;
    while (next < misses.size() && static_cast<int32_t>(first.size()) < room(layer))
      first.push_back(misses[next++]);
    std::sort(first.begin(), first.end());
    if (!first.empty()) plan.push_back(first);
    while (next < misses.size()) {
      const size_t end = std::min(misses.size(), next + static_cast<size_t>(room(layer)));
      plan.emplace_back(misses.begin() + static_cast<int64_t>(next),
                        misses.begin() + static_cast<int64_t>(end));
      next = end;
    }
    std::vector<Wave> waves;
    for (const auto& wave : plan) waves.push_back(run(layer, wave));
    return waves;
  }

  // ids: [rows, topk], -1 is none.
  std::vector<Wave> resolve_rows(int32_t layer, const std::vector<int32_t>& ids) {
    std::map<int32_t, int32_t> rows;
    for (const int32_t id : ids) {
      if (id >= 0) ++rows[id];
    }
    std::vector<int32_t> experts;
    for (const auto& [expert, count] : rows) experts.push_back(expert);
    if (config_.policy != "lru" || static_cast<int32_t>(ids.size()) / config_.topk <= 16)
      return resolve(layer, experts);
    ++now_;
    std::sort(experts.begin(), experts.end(),
              [&](int32_t a, int32_t b) { return std::pair(rows[a], -a) < std::pair(rows[b], -b); });
    std::vector<std::vector<int32_t>> plan(1);
    for (const int32_t e : experts) {
      if (find(layer, e) >= 0) plan[0].push_back(e);
    }
    const auto [kept, pool] = share(layer);
    const int32_t room = std::max(kept + pool, held(layer));
    for (const int32_t e : experts) {
      if (find(layer, e) >= 0) continue;
      if (static_cast<int32_t>(plan.back().size()) == (plan.size() == 1 ? room : pool)) plan.emplace_back();
      plan.back().push_back(e);
    }
    bulk_room_ = room;
    std::vector<Wave> waves;
    for (auto& wave : plan) {
      std::sort(wave.begin(), wave.end());
      if (!wave.empty()) waves.push_back(run(layer, wave, &experts));
    }
    ++clock_;
    std::vector<int32_t> there;
    for (const int32_t e : experts) {
      if (find(layer, e) >= 0) there.push_back(find(layer, e));
    }
    for (size_t i = 0; i < there.size(); ++i) {
      Slot& slot = slots[static_cast<size_t>(there[i])];
      slot.mark = clock_;
      slot.time = static_cast<int64_t>(there.size() - i) > kept ? ++time_ - kRetired : ++time_;
    }
    return waves;
  }

  std::optional<int32_t> hint(int32_t layer, int32_t expert, ExpertKey* evicted) {
    const auto& free = free_[group(layer)];
    if (free.empty()) {
      const int32_t v = victim(layer, floor_);
      if (v < 0 || slots[static_cast<size_t>(v)].hint == 1) return std::nullopt;
    }
    bool flying = false;
    const int32_t slot = take(layer, floor_, evicted, &flying);
    slots[static_cast<size_t>(slot)] = {layer, expert, ++time_, clock_, 1};
    ++counters[static_cast<size_t>(layer)].hints_taken;
    return slot;
  }
  void keep(int32_t slot) {  // hinted while it is there
    slots[static_cast<size_t>(slot)].mark = clock_;
    if (config_.policy == "lru") slots[static_cast<size_t>(slot)].time = ++time_;
  }
  int32_t preload(int32_t layer, int32_t expert) {
    auto& free = free_[group(layer)];
    if (free.empty() || find(layer, expert) >= 0) return -1;
    const int32_t slot = free.back();
    free.pop_back();
    slots[static_cast<size_t>(slot)] = {layer, expert, ++time_, clock_, 0};
    ++preloaded;
    return slot;
  }
  void arrived(int32_t layer, int32_t expert) {
    const int32_t slot = find(layer, expert);
    if (slot >= 0 && slots[static_cast<size_t>(slot)].hint == 1) slots[static_cast<size_t>(slot)].hint = 2;
  }
  void forget(int32_t layer, int32_t expert) {
    const int32_t slot = find(layer, expert);
    if (slot < 0) return;
    if (slots[static_cast<size_t>(slot)].hint) ++counters[static_cast<size_t>(layer)].hints_wasted;
    slots[static_cast<size_t>(slot)] = {};
    free_[group(layer)].push_back(slot);
    ++forgotten;
  }

  std::vector<Slot> slots;
  std::vector<std::pair<int32_t, int32_t>> groups;
  int64_t steps = 0, forgotten = 0, preloaded = 0;

 private:
  int32_t held(int32_t layer) const {
    return static_cast<int32_t>(
        std::count_if(slots.begin(), slots.end(), [&](const Slot& slot) { return slot.layer == layer; }));
  }
  // What a layer keeps in look-ups of many rows, and the pool beside it.
  std::pair<int32_t, int32_t> share(int32_t layer) const {
    const int64_t all = room(layer), pool = std::max(std::min<int64_t>(config_.topk, all),
                                                     std::min<int64_t>(config_.experts, all / 8));
    if (groups.size() > 1 || !config_.layer_slots.empty())
      return {static_cast<int32_t>(all - pool), static_cast<int32_t>(pool)};
    const auto owned = [&](int32_t l) {
      return config_.owned.empty() ? config_.experts : config_.owned[static_cast<size_t>(l)];
    };
    int64_t sum = 0;
    for (int32_t l = 0; l < config_.layers; ++l) sum += owned(l);
    return {static_cast<int32_t>((all - pool) * owned(layer) / std::max<int64_t>(sum, 1)),
            static_cast<int32_t>(pool)};
  }
  int32_t take_own(int32_t layer, int64_t floor, const std::vector<int32_t>& order, ExpertKey* evicted,
                   bool* flying) {
    std::map<std::tuple<int64_t, int64_t, int32_t>, int32_t> worth;
    for (size_t i = 0; i < slots.size(); ++i) {
      const Slot& slot = slots[i];
      if (slot.layer != layer || slot.mark >= floor) continue;
      const auto at = std::find(order.begin(), order.end(), slot.expert);
      const bool used = at != order.end();
      worth[{used ? at - order.begin() : -1, used ? 0 : slot.mark, slot.expert}] = static_cast<int32_t>(i);
    }
    const int32_t victim = worth.begin()->second;
    clear(victim, evicted, flying);
    return victim;
  }

  Wave run(int32_t layer, const std::vector<int32_t>& experts, const std::vector<int32_t>* bulk = nullptr) {
    Wave wave;
    const int64_t now = ++clock_;
    CacheCounters& c = counters[static_cast<size_t>(layer)];
    for (const int32_t e : experts) {
      ExpertLookup lookup{e, find(layer, e), false, false};
      if (lookup.slot >= 0) {
        Slot& slot = slots[static_cast<size_t>(lookup.slot)];
        lookup.hit = true;
        lookup.late = slot.hint == 1;
        ++c.hits;
        c.hints_late += slot.hint == 1;
        c.hints_useful += slot.hint == 2;
        slot.hint = 0;
        slot.mark = now;
      }
      wave.lookups.push_back(lookup);
    }
    for (ExpertLookup& lookup : wave.lookups) {
      if (lookup.hit) continue;
      ++c.misses;
      ExpertFetch fetch{lookup.expert, -1, {}, false};
      fetch.slot = lookup.slot = bulk && held(layer) >= bulk_room_
                                     ? take_own(layer, now, *bulk, &fetch.evicted, &fetch.evicted_flying)
                                     : take(layer, now, &fetch.evicted, &fetch.evicted_flying);
      slots[static_cast<size_t>(fetch.slot)] = {layer, lookup.expert, ++time_, now, 0};
      wave.fetches.push_back(fetch);
    }
    for (const ExpertLookup& lookup : wave.lookups) {
      slots[static_cast<size_t>(lookup.slot)].time = ++time_;
      count_[{layer, lookup.expert}] += 65536;
    }
    return wave;
  }

  std::pair<int64_t, int64_t> worth(const Slot& slot) const {
    if (config_.policy == "lru") return {0, slot.time};
    if (config_.policy == "belady") {
      for (const int64_t use : uses_[static_cast<size_t>(slot.layer * config_.experts + slot.expert)]) {
        if (use > now_) return {-use, slot.time};
      }
      return {-INT64_MAX, slot.time};
    }
    const auto found = count_.find({slot.layer, slot.expert});
    return {found == count_.end() ? 0 : found->second, slot.time};
  }
  int32_t victim(int32_t layer, int64_t floor) const {
    int32_t best = -1;
    for (int32_t i = groups[group(layer)].first; i < groups[group(layer)].second; ++i) {
      const Slot& slot = slots[static_cast<size_t>(i)];
      if (slot.layer < 0 || slot.mark >= floor) continue;
      if (best < 0 || worth(slot) < worth(slots[static_cast<size_t>(best)])) best = i;
    }
    return best;
  }
  int32_t take(int32_t layer, int64_t floor, ExpertKey* evicted, bool* flying) {
    auto& free = free_[group(layer)];
    if (!free.empty()) {
      const int32_t slot = free.back();
      free.pop_back();
      return slot;
    }
    const int32_t slot = victim(layer, floor);
    clear(slot, evicted, flying);
    return slot;
  }
  void clear(int32_t slot, ExpertKey* evicted, bool* flying) {
    Slot& gone = slots[static_cast<size_t>(slot)];
    *evicted = {gone.layer, gone.expert};
    *flying = gone.hint == 1;
    CacheCounters& c = counters[static_cast<size_t>(gone.layer)];
    ++c.evictions;
    c.hints_wasted += gone.hint != 0;
    gone = {};
  }

  static constexpr int64_t kRetired = int64_t{1} << 40;  // before all that are not

  CacheConfig config_;
  int32_t bulk_room_ = 0;
  Uses uses_;
  std::vector<std::vector<int32_t>> free_;
  std::map<std::pair<int32_t, int32_t>, int64_t> count_;
  std::vector<int64_t> lookups_of_;
  int64_t clock_ = 0, time_ = 0, floor_ = 0, now_ = -1;

 public:
  std::vector<CacheCounters> counters;
};

}  // namespace check
