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
#include "ops/slot_mail.h"

namespace rocket {

class SlotState {
 public:
  // choices: of all rows of a step in a layer, at most. Throws as ExpertCache, and InputError for more experts of a layer
  // than a look-up takes.
  SlotState(const CacheConfig& config, int64_t choices);

  int64_t bytes() const { return bytes_; }
  int32_t slots() const { return first_.back(); }
  // How many waves a look-up of so many choices in a layer may have, whatever is there.
  int32_t waves(int32_t layer, int64_t choices) const;

  // The arrays of a block at `base`, which is aligned to 256 bytes. The slots lie at `slots`.
  SlotCache cache(char* base, char* slots, int64_t slot_bytes) const;
  SlotBank bank(char* base) const;
  SlotDesk* desk(char* base) const;
  // The part of the block that counts, and what a copy of it says.
  int64_t stats_at() const { return at_.counters; }
  int64_t stats_bytes() const {
    return at_.clocks + static_cast<int64_t>(sizeof(SlotFetchClock)) - at_.counters;
  }
  StreamStats stats(const char* copy) const;
  // The block before any look-up: no expert is there. tables: of each layer, for formats, shapes and global scales; bank:
  // [layers * experts] where each expert lies, or empty.
  std::vector<char> image(std::span<const std::span<const ExpertWeights>> tables,
                          const std::vector<const char*>& bank) const;

 private:
  void read_groups(const ExpertCache& cache);
  int64_t few() const;
  int64_t place(int64_t bytes);

  CacheConfig config_;
  std::vector<int32_t> first_;     // [groups + 1]
  std::vector<SlotShare> shares_;  // [layers], or empty
  int64_t bytes_ = 0;
  struct {
    int64_t first, slot_of, key, stamp, mark, clock, retired, counters, streamed, lookup, miss, rank, hit_id,
        miss_id, share, use, order, turn, victim, parts, table, ticket, bank, desk, clocks;
  } at_{};
};

}  // namespace rocket
