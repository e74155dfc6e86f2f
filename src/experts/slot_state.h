// The arrays of a cache of experts in the ops' memory (ops/slot_cache.h), as one block.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "experts/cache.h"
#include "experts/slot_layout.h"
#include "experts/stream.h"
#include "ops/slot_cache.h"
#include "ops/slot_fetch.h"
#include "ops/slot_hint.h"
#include "ops/slot_mail.h"

namespace rocket {

// What lies behind a cache's slots: all experts, or only those without a slot (ops/slot_cache.h).
enum class Tiers { kInclusive, kExclusive };

class SlotState {
 public:
  // choices: of all rows of a step in a layer, at most. Throws as ExpertCache, and InputError for more experts of a layer
  // than a look-up takes.
  SlotState(const CacheConfig& config, int64_t choices, Tiers tiers = Tiers::kInclusive);

  int64_t bytes() const { return bytes_; }
  int32_t slots() const { return first_.back(); }
  // How many waves a look-up of so many choices in a layer may have, whatever is there.
  int32_t waves(int32_t layer, int64_t choices) const;

  // The arrays of a block at `base`, which is aligned to 256 bytes. The slots lie at `slots`.
  SlotCache cache(char* base, char* slots, int64_t slot_bytes) const;
  SlotBank bank(char* base) const;
  SlotDesk* desk(char* base) const;
  // Without a gate.
  SlotHints hints(char* base, char* slots, int64_t slot_bytes) const;
  // The part of the block that counts, and what a copy of it says.
  int64_t stats_at() const { return at_.counters; }
  int64_t stats_bytes() const {
    return at_.clocks + static_cast<int64_t>(sizeof(SlotFetchClock)) - at_.counters;
  }
  StreamStats stats(const char* copy) const;
  // The keys (layer * experts + expert) of the experts that exclusive tiers have in the slots from the start, slot by
  // slot, the one that makes way first at the front; and of those that lie in the places, place by place.
  const std::vector<int32_t>& in_slots() const { return in_slots_; }
  std::vector<int32_t> in_places() const;
  // The block before any look-up. tables: of each layer, for formats, shapes and global scales. Inclusive: no expert is
  // there; bank: [layers * experts] where each lies, or empty. Exclusive: in_slots() are in the slots at `slots_at`; bank: the places.
  std::vector<char> image(std::span<const std::span<const ExpertWeights>> tables,
                          const std::vector<const char*>& bank, char* slots_at = nullptr,
                          int64_t slot_bytes = 0) const;

 private:
  void read_groups(const ExpertCache& cache);
  void choose_in_slots();
  void fill_tiers(char* base, char* slots_at, int64_t slot_bytes) const;
  int64_t few() const;
  int64_t place(int64_t bytes);

  CacheConfig config_;
  Tiers tiers_;
  std::vector<int32_t> in_slots_;  // empty: inclusive
  std::vector<int32_t> first_;     // [groups + 1]
  std::vector<SlotShare> shares_;  // [layers], or empty
  int64_t bytes_ = 0;
  struct {
    int64_t first, slot_of, key, stamp, mark, clock, retired, counters, streamed, lookup, miss, rank, hit_id,
        miss_id, share, use, order, turn, victim, parts, table, ticket, bank, desk, clocks, place_of, trade,
        hinted, hints, hint_bytes, step_floor, hint_lookup, hint_miss, hint_trade, hints_met;
  } at_{};
};

}  // namespace rocket
