#include "experts/cache.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "base/error.h"

namespace rocket {
namespace {

int32_t owned_of(const CacheConfig& config, int32_t layer) {
  return config.owned.empty() ? config.experts : config.owned[static_cast<size_t>(layer)];
}

void check_counts(const CacheConfig& c) {
  if (c.layers < 1 || c.experts < 1 || int64_t{c.layers} * c.experts > std::numeric_limits<int32_t>::max()) {
    throw InputError("expert cache: expected layers and experts, and fewer than 2^31 of them, found " +
                     std::to_string(c.layers) + " layers of " + std::to_string(c.experts));
  }
  if (c.topk < 1 || c.topk > c.experts) {
    throw InputError("expert cache: expected a top-k from 1 to " + std::to_string(c.experts) + ", found " +
                     std::to_string(c.topk));
  }
  for (const auto& [name, size] :
       {std::pair{"layer_slots", c.layer_slots.size()}, {"owned", c.owned.size()}}) {
    if (size != 0 && size != static_cast<size_t>(c.layers)) {
      throw InputError("expert cache: " + std::string(name) + ": expected " + std::to_string(c.layers) +
                       " numbers, found " + std::to_string(size));
    }
  }
  for (const int32_t owned : c.owned) {
    if (owned < 0 || owned > c.experts) {
      throw InputError("expert cache: owned: expected from 0 to " + std::to_string(c.experts) + ", found " +
                       std::to_string(owned));
    }
  }
}

// The first slot of each group, and their end. Budgets beyond the experts that there are are cut.
std::vector<int32_t> group_slots(const CacheConfig& c) {
  check_counts(c);
  std::vector<int32_t> first = {0};
  const auto add = [&](const std::string& where, int64_t asked, int64_t fewest, int64_t most) {
    if (asked < fewest) {
      throw PlanError("expert cache" + where + ": expected at least " + std::to_string(fewest) +
                          " slots (one token's experts of a layer), found " + std::to_string(asked),
                      "give it " + std::to_string(fewest) + " slots or more");
    }
    first.push_back(first.back() + static_cast<int32_t>(std::min(asked, most)));
  };
  if (c.layer_slots.empty()) {
    int64_t most = 0;
    for (int32_t layer = 0; layer < c.layers; ++layer) most += owned_of(c, layer);
    add("", c.slots, ExpertCache::fewest_slots(c), most);
    return first;
  }
  for (int32_t layer = 0; layer < c.layers; ++layer) {
    add(", MoE layer " + std::to_string(layer) + " (from 0)", c.layer_slots[static_cast<size_t>(layer)],
        ExpertCache::fewest_slots(c, layer), owned_of(c, layer));
  }
  return first;
}

}  // namespace

CacheCounters& CacheCounters::operator+=(const CacheCounters& o) {
  hits += o.hits, misses += o.misses, evictions += o.evictions;
  hints_taken += o.hints_taken, hints_useful += o.hints_useful;
  hints_late += o.hints_late, hints_wasted += o.hints_wasted;
  return *this;
}

CacheCounters& CacheCounters::operator-=(const CacheCounters& o) {
  hits -= o.hits, misses -= o.misses, evictions -= o.evictions;
  hints_taken -= o.hints_taken, hints_useful -= o.hints_useful;
  hints_late -= o.hints_late, hints_wasted -= o.hints_wasted;
  return *this;
}

int64_t ExpertCache::fewest_slots(const CacheConfig& config, int32_t layer) {
  return std::min(config.topk, owned_of(config, layer));
}

int64_t ExpertCache::fewest_slots(const CacheConfig& config) {
  int64_t fewest = 0;
  for (int32_t layer = 0; layer < config.layers; ++layer)
    fewest = std::max(fewest, fewest_slots(config, layer));
  return fewest;
}

PolicyShape ExpertCache::policy_shape(const CacheConfig& config) {
  const bool budgets = !config.layer_slots.empty();
  PolicyShape shape;
  shape.slots = group_slots(config).back();
  shape.groups = budgets ? config.layers : 1;
  shape.keys = config.layers * config.experts;
  shape.keys_per_group = shape.keys / shape.groups;
  shape.layers_per_group = budgets ? 1 : config.layers;
  return shape;
}

ExpertCache::ExpertCache(const CacheConfig& config, std::unique_ptr<EvictionPolicy> policy)
    : experts_(config.experts),
      topk_(config.topk),
      budgets_(!config.layer_slots.empty()),
      first_(group_slots(config)) {
  if (!policy && config.policy == "lru" && config.many_rows) shares_ = shares_of(config, first_);
  policy_ = policy ? std::move(policy) : make_policy(config.policy, policy_shape(config));
  for (size_t group = 0; group + 1 < first_.size(); ++group) {
    std::vector<int32_t>& free = free_.emplace_back(static_cast<size_t>(first_[group + 1] - first_[group]));
    std::iota(free.rbegin(), free.rend(), first_[group]);
  }
  held_.resize(static_cast<size_t>(first_.back()));
  mark_.resize(held_.size());
  slot_.assign(static_cast<size_t>(config.layers) * static_cast<size_t>(config.experts), -1);
  counters_.resize(static_cast<size_t>(config.layers));
  layer_held_.resize(static_cast<size_t>(config.layers));
  seen_.resize(static_cast<size_t>(config.experts));
}

void ExpertCache::check(int32_t layer, int32_t expert) const {
  if (layer < 0 || static_cast<size_t>(layer) >= counters_.size()) {
    throw InputError("expert cache: expected a layer from 0 to " + std::to_string(counters_.size() - 1) +
                     ", found " + std::to_string(layer));
  }
  if (expert < 0 || expert >= experts_) {
    throw InputError("expert cache: expected an expert from 0 to " + std::to_string(experts_ - 1) +
                     ", found " + std::to_string(expert));
  }
}

void ExpertCache::check_lookup(int32_t layer, std::span<const int32_t> experts) const {
  check(layer, 0);
  int32_t before = -1;
  for (const int32_t expert : experts) {
    check(layer, expert);
    if (expert <= before) {
      throw InputError("expert cache: expected distinct experts in ascending order, found " +
                       std::to_string(expert) + " after " + std::to_string(before));
    }
    before = expert;
  }
  if (!experts.empty() && slots(layer) == 0) {
    throw InputError("expert cache: layer " + std::to_string(layer) +
                     " owns no experts, and was asked for some");
  }
}

void ExpertCache::begin_step() {
  ++steps_;
  step_floor_ = ++clock_;
}

std::span<const ExpertWave> ExpertCache::resolve(int32_t layer, std::span<const int32_t> experts) {
  check_lookup(layer, experts);
  policy_->begin(group(layer));
  split_waves(layer, experts);
  run_waves(layer, experts.size(), false);
  return waves_;
}

void ExpertCache::run_waves(int32_t layer, size_t experts, bool bulk) {
  fetches_.clear();
  fetches_.reserve(experts);  // waves point into it
  waves_.clear();
  size_t begin = 0;
  for (const size_t end : wave_ends_) {
    const size_t fetched = fetches_.size();
    const std::span<ExpertLookup> lookups = std::span(lookups_).subspan(begin, end - begin);
    run_wave(layer, lookups, bulk);
    waves_.push_back({lookups, {fetches_.data() + fetched, fetches_.size() - fetched}});
    begin = end;
  }
}

// Fills lookups_, wave after wave, and wave_ends_.
void ExpertCache::split_waves(int32_t layer, std::span<const int32_t> experts) {
  lookups_.clear();
  wave_ends_.clear();
  if (experts.empty()) return;
  const size_t room = static_cast<size_t>(slots(layer));
  misses_.clear();
  for (const int32_t expert : experts) {
    const int32_t slot = slot_of(layer, expert);
    if (slot < 0) misses_.push_back(expert);
  }
  const size_t hits = experts.size() - misses_.size();
  const size_t beside = std::min(misses_.size(), room - hits);  // misses of the first wave
  const int32_t later = beside < misses_.size() ? misses_[beside] : experts_;
  for (const int32_t expert : experts) {
    const int32_t slot = slot_of(layer, expert);
    if (slot >= 0 || expert < later) lookups_.push_back({expert, slot, slot >= 0, false});
  }
  wave_ends_.push_back(lookups_.size());
  for (size_t i = beside; i < misses_.size(); ++i) {
    lookups_.push_back({misses_[i], -1, false, false});
    if ((i - beside + 1) % room == 0 || i + 1 == misses_.size()) wave_ends_.push_back(lookups_.size());
  }
}

void ExpertCache::run_wave(int32_t layer, std::span<ExpertLookup> lookups, bool bulk) {
  const int32_t g = group(layer);
  const int64_t now = ++clock_;
  for (ExpertLookup& lookup : lookups) {
    if (!lookup.hit) continue;
    count_hit(layer, lookup);
    mark_[static_cast<size_t>(lookup.slot)] = now;
    policy_->hold(g, lookup.slot);
  }
  for (ExpertLookup& lookup : lookups) {
    if (lookup.hit) continue;
    ++counters_[static_cast<size_t>(layer)].misses;
    ExpertFetch fetch{lookup.expert, -1, {}, false};
    // Never without a slot: a wave has at most as many experts as the group has slots.
    fetch.slot = lookup.slot = bulk ? take_bulk_slot(layer, now, &fetch.evicted, &fetch.evicted_flying)
                                    : take_slot(g, now, &fetch.evicted, &fetch.evicted_flying);
    fill(g, fetch.slot, key(layer, lookup.expert), Hint::kNone);
    fetches_.push_back(fetch);
  }
  for (const ExpertLookup& lookup : lookups) policy_->use(g, lookup.slot);
}

void ExpertCache::count_hit(int32_t layer, ExpertLookup& lookup) {
  CacheCounters& counters = counters_[static_cast<size_t>(layer)];
  Held& held = held_[static_cast<size_t>(lookup.slot)];
  ++counters.hits;
  lookup.late = held.hint == Hint::kFlying;
  if (lookup.late) ++counters.hints_late;
  if (held.hint == Hint::kArrived) ++counters.hints_useful;
  held.hint = Hint::kNone;
}

// A free slot, else that of a victim whose mark is below the floor; -1 if there is none.
int32_t ExpertCache::take_slot(int32_t g, int64_t floor, ExpertKey* evicted, bool* flying) {
  std::vector<int32_t>& free = free_[static_cast<size_t>(g)];
  if (!free.empty()) {
    const int32_t slot = free.back();
    free.pop_back();
    return slot;
  }
  const int32_t slot = policy_->victim(g, {mark_.data(), floor});
  if (slot < 0) return -1;
  *flying = held_[static_cast<size_t>(slot)].hint == Hint::kFlying;
  *evicted = evict(g, slot);
  return slot;
}

void ExpertCache::fill(int32_t g, int32_t slot, int32_t key, Hint hint) {
  held_[static_cast<size_t>(slot)] = {key, hint};
  mark_[static_cast<size_t>(slot)] = clock_;
  slot_[static_cast<size_t>(key)] = slot;
  ++layer_held_[static_cast<size_t>(key / experts_)];
  ++resident_;
  policy_->insert(g, slot, key);
}

ExpertKey ExpertCache::evict(int32_t g, int32_t slot) {
  Held& held = held_[static_cast<size_t>(slot)];
  const ExpertKey gone = at(slot);
  CacheCounters& counters = counters_[static_cast<size_t>(gone.layer)];
  ++counters.evictions;
  if (held.hint != Hint::kNone) ++counters.hints_wasted;
  slot_[static_cast<size_t>(held.key)] = -1;
  held = {};
  --layer_held_[static_cast<size_t>(gone.layer)];
  --resident_;
  policy_->remove(g, slot);
  return gone;
}

HintedSlot ExpertCache::hint(int32_t layer, int32_t expert) {
  check(layer, expert);
  const int32_t g = group(layer);
  if (const int32_t slot = slot_of(layer, expert); slot >= 0) {
    mark_[static_cast<size_t>(slot)] = clock_;
    policy_->hold(g, slot);
    return {HintAnswer::kThere, slot, {}};
  }
  if (free_[static_cast<size_t>(g)].empty()) {
    const int32_t victim = policy_->victim(g, {mark_.data(), step_floor_});
    if (victim < 0 || held_[static_cast<size_t>(victim)].hint == Hint::kFlying) return {};
  }
  HintedSlot taken{HintAnswer::kTaken, -1, {}};
  bool flying = false;
  taken.slot = take_slot(g, step_floor_, &taken.evicted, &flying);
  fill(g, taken.slot, key(layer, expert), Hint::kFlying);
  ++counters_[static_cast<size_t>(layer)].hints_taken;
  return taken;
}

int32_t ExpertCache::preload(int32_t layer, int32_t expert) {
  check(layer, expert);
  const int32_t g = group(layer);
  if (free_[static_cast<size_t>(g)].empty() || slot_of(layer, expert) >= 0) return -1;
  ExpertKey evicted;
  bool flying = false;
  const int32_t slot = take_slot(g, 0, &evicted, &flying);
  fill(g, slot, key(layer, expert), Hint::kNone);
  return slot;
}

void ExpertCache::arrived(int32_t layer, int32_t expert) {
  check(layer, expert);
  const int32_t slot = slot_of(layer, expert);
  if (slot < 0) return;
  Held& held = held_[static_cast<size_t>(slot)];
  if (held.hint == Hint::kFlying) held.hint = Hint::kArrived;
}

void ExpertCache::forget(int32_t layer, int32_t expert) {
  check(layer, expert);
  const int32_t slot = slot_of(layer, expert);
  if (slot < 0) return;
  const int32_t g = group(layer);
  Held& held = held_[static_cast<size_t>(slot)];
  if (held.hint != Hint::kNone) ++counters_[static_cast<size_t>(layer)].hints_wasted;
  slot_[static_cast<size_t>(held.key)] = -1;
  held = {};
  --layer_held_[static_cast<size_t>(layer)];
  --resident_;
  policy_->remove(g, slot);
  free_[static_cast<size_t>(g)].push_back(slot);
}

std::span<const int32_t> ExpertCache::distinct(std::span<const int32_t> ids) {
  for (const int32_t id : ids) {
    if (id != -1) check(0, id);
  }
  distinct_.clear();
  for (const int32_t id : ids) {
    if (id < 0 || seen_[static_cast<size_t>(id)]) continue;
    seen_[static_cast<size_t>(id)] = true;
    distinct_.push_back(id);
  }
  for (const int32_t id : distinct_) seen_[static_cast<size_t>(id)] = false;
  std::sort(distinct_.begin(), distinct_.end());
  return distinct_;
}

int32_t ExpertCache::slot_of(int32_t layer, int32_t expert) const {
  return slot_[static_cast<size_t>(key(layer, expert))];
}

ExpertKey ExpertCache::at(int32_t slot) const {
  const int32_t key = held_[static_cast<size_t>(slot)].key;
  return key < 0 ? ExpertKey{} : ExpertKey{key / experts_, key % experts_};
}

int32_t ExpertCache::slots(int32_t layer) const {
  return first_[static_cast<size_t>(group(layer)) + 1] - first_slot(layer);
}

int32_t ExpertCache::first_slot(int32_t layer) const {
  return first_[static_cast<size_t>(group(layer))];
}

CacheCounters ExpertCache::counters() const {
  CacheCounters sum;
  for (const CacheCounters& counters : counters_) sum += counters;
  return sum;
}

CacheWindow ExpertCache::window() {
  const CacheWindow now{steps_, counters()};
  CacheWindow since = now;
  since.steps -= reported_.steps;
  since.counters -= reported_.counters;
  reported_ = now;
  return since;
}

}  // namespace rocket
