#include "experts/slot_state.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "ops/slot_few.h"

namespace rocket {
namespace {

SlotParts parts_of(const SlotLayout& layout) {
  SlotParts parts{};
  for (size_t i = 0; i < 3; ++i) {
    parts.data_at[i] = layout.data_at[i];
    parts.scale_at[i] = layout.scale_bytes[i] > 0 ? layout.scale_at[i] : -1;
  }
  parts.bytes = layout.bytes;
  parts.stored_bytes = layout.stored_bytes();
  return parts;
}

const CacheConfig& checked(const CacheConfig& config) {
  if (config.experts > kSlotExperts) {
    throw InputError("expert cache: expected at most " + std::to_string(kSlotExperts) +
                         " experts a layer on a device, found " + std::to_string(config.experts),
                     "leave the cache's options out, or use --backend cpu");
  }
  if (config.policy != "lru") {
    throw InputError("expert cache: expected the policy lru on a device, found " + config.policy);
  }
  return config;
}

template <typename T>
T* at(char* base, int64_t offset) {
  return reinterpret_cast<T*>(base + offset);
}

}  // namespace

int64_t SlotState::place(int64_t bytes) {
  const int64_t here = bytes_;
  bytes_ += (bytes + 255) / 256 * 256;
  return here;
}

SlotState::SlotState(const CacheConfig& config, int64_t choices, Tiers tiers)
    : config_(checked(config)), tiers_(tiers) {
  read_groups(ExpertCache(config));
  if (tiers == Tiers::kExclusive) choose_in_slots();
  const int64_t layers = config.layers, experts = config.experts, keys = layers * experts, all = slots();
  at_.first = place(static_cast<int64_t>(first_.size()) * 4);
  at_.slot_of = place(keys * 4);
  at_.key = place(all * 4);
  at_.stamp = place(all * 8);
  at_.mark = place(all * 8);
  at_.clock = place(8);
  at_.retired = place(8);
  at_.counters = place(layers * static_cast<int64_t>(sizeof(SlotCounters)));  // these are read together
  at_.streamed = place(8);
  at_.hints = place(8);
  at_.hint_bytes = place(16);
  at_.clocks = place(sizeof(SlotFetchClock));
  at_.lookup = place(sizeof(SlotLookup));
  at_.ticket = place(4);
  at_.miss = place(experts * static_cast<int64_t>(sizeof(SlotMiss)));
  at_.rank = place(experts * 4);
  at_.hit_id = place(choices * 4);
  at_.miss_id = place(choices * 4);
  at_.share = place(layers * static_cast<int64_t>(sizeof(SlotShare)));
  for (int64_t* const each : {&at_.use, &at_.order, &at_.turn, &at_.victim}) *each = place(experts * 4);
  at_.parts = place(keys * static_cast<int64_t>(sizeof(SlotParts)));
  at_.table = place(keys * static_cast<int64_t>(sizeof(ExpertWeights)));
  at_.bank = place(keys * 8);
  at_.desk = place(sizeof(SlotDesk));
  at_.place_of = place(keys * 4);
  at_.trade = place(experts * static_cast<int64_t>(sizeof(SlotTrade)));
  at_.hinted = place(all * 4);
  at_.step_floor = place(8);
  at_.hint_lookup = place(sizeof(SlotLookup));
  at_.hint_miss = place(sizeof(SlotMiss));
  at_.hint_trade = place(sizeof(SlotTrade));
  at_.hints_met = place(8);
}

// The lowest of each layer. Where one group of slots is all layers', as many of each, in turn: then no layer's make way
// before another's.
void SlotState::choose_in_slots() {
  if (!config_.owned.empty())
    throw InputError("expert cache: expected all experts on this booster where tiers are exclusive");
  const bool budgets = !config_.layer_slots.empty();
  for (int32_t group = 0; group + 1 < static_cast<int32_t>(first_.size()); ++group) {
    const size_t end = static_cast<size_t>(first_[static_cast<size_t>(group) + 1]);
    const int32_t first_layer = budgets ? group : 0, last_layer = budgets ? group + 1 : config_.layers;
    for (int32_t e = 0; e < config_.experts; ++e) {
      for (int32_t layer = first_layer; layer < last_layer && in_slots_.size() < end; ++layer) {
        in_slots_.push_back(layer * config_.experts + e);
      }
    }
  }
}

std::vector<int32_t> SlotState::in_places() const {
  const int32_t keys = config_.layers * config_.experts;
  std::vector<bool> in_slot(static_cast<size_t>(keys));
  for (const int32_t key : in_slots_) in_slot[static_cast<size_t>(key)] = true;
  std::vector<int32_t> rest;
  for (int32_t key = 0; key < keys; ++key) {
    if (!in_slot[static_cast<size_t>(key)]) rest.push_back(key);
  }
  return rest;
}

void SlotState::read_groups(const ExpertCache& cache) {
  first_ = {0};
  const int32_t groups = config_.layer_slots.empty() ? 1 : config_.layers;
  for (int32_t group = 0; group < groups; ++group) first_.push_back(first_.back() + cache.slots(group));
  for (const ExpertCache::Share& share : cache.shares()) shares_.push_back({share.kept, share.pool});
}

int64_t SlotState::few() const {
  return shares_.empty() ? INT64_MAX : int64_t{ExpertCache::kFewRows} * config_.topk;
}

int32_t SlotState::waves(int32_t layer, int64_t choices) const {
  const int64_t distinct = std::min<int64_t>(choices, config_.experts);
  if (choices > few()) {
    const SlotShare& share = shares_[static_cast<size_t>(layer)];
    return slot_waves(distinct, share.kept + share.pool, share.pool);
  }
  const size_t group = config_.layer_slots.empty() ? 0 : static_cast<size_t>(layer);
  const int64_t room = first_[group + 1] - first_[group];
  return slot_waves(distinct, room, room);
}

SlotCache SlotState::cache(char* base, char* slots, int64_t slot_bytes) const {
  SlotCache c;
  c.layers = config_.layers;
  c.experts = config_.experts;
  c.few = few();
  c.budgets = !config_.layer_slots.empty();
  c.first = at<int32_t>(base, at_.first);
  c.slot_of = at<int32_t>(base, at_.slot_of);
  c.key = at<int32_t>(base, at_.key);
  c.stamp = at<int64_t>(base, at_.stamp);
  c.mark = at<int64_t>(base, at_.mark);
  c.clock = at<int64_t>(base, at_.clock);
  c.retired = at<int64_t>(base, at_.retired);
  c.counters = at<SlotCounters>(base, at_.counters);
  c.streamed = at<uint64_t>(base, at_.streamed);
  c.lookup = at<SlotLookup>(base, at_.lookup);
  c.miss = at<SlotMiss>(base, at_.miss);
  c.rank = at<int32_t>(base, at_.rank);
  c.hit_id = at<int32_t>(base, at_.hit_id);
  c.miss_id = at<int32_t>(base, at_.miss_id);
  c.share = at<SlotShare>(base, at_.share);
  c.use = at<int32_t>(base, at_.use);
  c.order = at<int32_t>(base, at_.order);
  c.turn = at<int32_t>(base, at_.turn);
  c.victim = at<int32_t>(base, at_.victim);
  c.parts = at<SlotParts>(base, at_.parts);
  c.table = at<ExpertWeights>(base, at_.table);
  c.base = slots;
  c.slot_bytes = slot_bytes;
  c.ticket = at<unsigned>(base, at_.ticket);
  c.hinted = at<int32_t>(base, at_.hinted);
  c.hints = at<uint64_t>(base, at_.hints);
  c.hint_bytes = at<uint64_t>(base, at_.hint_bytes);
  c.step_floor = at<int64_t>(base, at_.step_floor);
  if (tiers_ == Tiers::kExclusive) {
    c.place_of = at<int32_t>(base, at_.place_of);
    c.trade = at<SlotTrade>(base, at_.trade);
  }
  return c;
}

SlotBank SlotState::bank(char* base) const {
  SlotBank bank;
  if (tiers_ == Tiers::kExclusive) {
    bank.place = at<char*>(base, at_.bank);
  } else {
    bank.expert = at<const char*>(base, at_.bank);
  }
  bank.clock = at<SlotFetchClock>(base, at_.clocks);
  return bank;
}

SlotHints SlotState::hints(char* base, char* slots, int64_t slot_bytes) const {
  SlotHints h;
  h.cache = cache(base, slots, slot_bytes);
  h.cache.lookup = at<SlotLookup>(base, at_.hint_lookup);
  h.cache.miss = at<SlotMiss>(base, at_.hint_miss);
  if (tiers_ == Tiers::kExclusive) h.cache.trade = at<SlotTrade>(base, at_.hint_trade);
  h.bank = bank(base);
  h.met = at<unsigned>(base, at_.hints_met);
  return h;
}

SlotDesk* SlotState::desk(char* base) const {
  return at<SlotDesk>(base, at_.desk);
}

StreamStats SlotState::stats(const char* copy) const {
  const auto value = [&](auto* to, int64_t offset) {
    std::memcpy(to, copy + (offset - at_.counters), sizeof(*to));
  };
  StreamStats stats;
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    SlotCounters c;
    value(&c, at_.counters + layer * static_cast<int64_t>(sizeof(c)));
    CacheCounters& to = stats.layers.emplace_back();
    to.hits = c.hits;
    to.misses = c.misses;
    to.evictions = c.evictions;
    to.hints_taken = static_cast<int64_t>(c.hints_taken);
    to.hints_useful = static_cast<int64_t>(c.hints_useful);
    to.hints_wasted = static_cast<int64_t>(c.hints_wasted);
  }
  uint64_t streamed = 0, hints = 0, hint_bytes[2] = {};
  SlotFetchClock clock{};
  value(&streamed, at_.streamed);
  value(&hints, at_.hints);
  value(&hint_bytes, at_.hint_bytes);
  stats.hints_there = static_cast<int64_t>(hints);
  stats.hint_bytes.useful = static_cast<int64_t>(hint_bytes[0]);
  stats.hint_bytes.wasted = static_cast<int64_t>(hint_bytes[1]);
  value(&clock, at_.clocks);
  stats.streamed_bytes = static_cast<int64_t>(streamed);
  stats.fetch_seconds = static_cast<double>(clock.total) * 1e-9;
  return stats;
}

std::vector<char> SlotState::image(std::span<const std::span<const ExpertWeights>> tables,
                                   const std::vector<const char*>& bank, char* slots_at,
                                   int64_t slot_bytes) const {
  std::vector<char> image(static_cast<size_t>(bytes_));
  char* const base = image.data();
  std::copy(first_.begin(), first_.end(), at<int32_t>(base, at_.first));
  const int64_t keys = int64_t{config_.layers} * config_.experts;
  std::fill_n(at<int32_t>(base, at_.slot_of), keys, -1);
  std::fill_n(at<int32_t>(base, at_.key), slots(), -1);
  int64_t* const stamp = at<int64_t>(base, at_.stamp);
  for (int64_t slot = 0; slot < slots(); ++slot) stamp[slot] = kFreeStamp + slot;
  *at<int64_t>(base, at_.retired) = kRetiredStamp;
  std::copy(shares_.begin(), shares_.end(), at<SlotShare>(base, at_.share));
  at<SlotFetchClock>(base, at_.clocks)->begin = UINT64_MAX;
  SlotParts* parts = at<SlotParts>(base, at_.parts);
  ExpertWeights* entry = at<ExpertWeights>(base, at_.table);
  for (const std::span<const ExpertWeights> table : tables) {
    for (const ExpertWeights& expert : table) {
      const SlotLayout layout = slot_layout(expert);
      *parts++ = parts_of(layout);
      *entry = expert;
      place_in_slot(layout, nullptr, entry++);
    }
  }
  std::copy(bank.begin(), bank.end(), at<const char*>(base, at_.bank));
  if (tiers_ == Tiers::kExclusive) fill_tiers(base, slots_at, slot_bytes);
  return image;
}

// As if the experts in the slots had been asked for once, in order.
void SlotState::fill_tiers(char* base, char* slots_at, int64_t slot_bytes) const {
  const SlotCache c = cache(base, slots_at, slot_bytes);
  for (int32_t slot = 0; slot < static_cast<int32_t>(in_slots_.size()); ++slot) {
    const int32_t key = in_slots_[static_cast<size_t>(slot)];
    c.key[slot] = key;
    c.slot_of[key] = slot;
    c.stamp[slot] = slot;
    c.place_of[key] = -1;
    slots::point_into_slot(c, key, slot);
  }
  *c.clock = static_cast<int64_t>(in_slots_.size());
  const std::vector<int32_t> rest = in_places();
  for (int32_t p = 0; p < static_cast<int32_t>(rest.size()); ++p)
    c.place_of[rest[static_cast<size_t>(p)]] = p;
}

}  // namespace rocket
