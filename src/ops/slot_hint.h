// Hints of a cache of experts (slot_cache.h): an expert that may be wanted soon gets a slot before anything asks for it.
//
//   between steps    hints are taken only there, one after the other: no slot is in use, and the link is idle
//   whose slot       a free one, else that of the least recently used expert which the last step has not used, and which
//                    no hint has named since it began; if there is none, the hint is dropped
//   there already    it is kept from other hints, and counts as recently used
//   a step begins    the expert on its way comes to its end; all that were not begun are dropped
// No result depends on a hint, and none counts as a hit or a miss. Hinted experts that a look-up finds were useful, and
// those that make way before that were wasted; none is late, as a step begins behind them.
#pragma once

#include "ops/exec.h"
#include "ops/slot_fetch.h"
#include "ops/slot_few.h"

namespace rocket {

// Of one hint: `c` with a lookup, miss and trade of its own, which say what is to be fetched, as wave 1 of a look-up. By all
// threads of a block (slot_lookup.h); the last writes are not yet behind a barrier when it returns.
template <typename Block>
ROCKET_HOST_DEVICE void slot_hint(const SlotCache& c, int32_t layer, int32_t expert, Block& block) {
  const int32_t key = layer * c.experts + expert, there = c.slot_of[key];
  const int64_t now = *c.clock, floor = *c.step_floor;
  const bool hints = *c.hints != 0;
  const int32_t* const group = c.first + (c.budgets ? layer : 0);
  slots::Oldest mine = {kNoStamp, -1};
  for (int32_t slot = group[0] + block.thread(); there < 0 && slot < group[1]; slot += block.threads()) {
    const bool free = c.key[slot] < 0 || c.mark[slot] < floor;
    if (free && c.stamp[slot] < mine.stamp) mine = {c.stamp[slot], slot};
  }
  const int64_t oldest = block.oldest(mine.stamp);
  if (there >= 0 || oldest == kNoStamp) {
    if (block.thread() != 0) return;
    *c.lookup = {layer, 0, 0, 0, 1};
    if (there < 0) return;
    c.mark[there] = c.stamp[there] = now;
    *c.clock = now + 1;
    return;
  }
  if (oldest != mine.stamp || mine.slot < 0) return;
  slots::take(c, 0, mine.slot, key, now, hints, block);
  slots::point_into_slot(c, key, mine.slot);
  c.mark[mine.slot] = now;
  c.hinted[mine.slot] = 1;
  c.miss[0] = {expert, mine.slot};
  *c.lookup = {layer, 0, 1, 1, 1};
  *c.clock = now + 1;
  ++c.counters[layer].hints_taken;
  block.add(c.hints, uint64_t{1});
}

constexpr int32_t kHintsAtOnce = 64;  // of a launch

// In memory of the host that the device reads.
struct SlotGate {
  uint64_t steps;  // begun so far
};

// What hints have apart from look-ups.
struct SlotHints {
  SlotCache cache;                 // with a lookup, miss and trade of their own
  SlotBank bank;                   // inclusive or exclusive
  const SlotGate* gate = nullptr;  // the address that the device knows it by
  unsigned* met = nullptr;         // [2] 0 between launches
};

struct SlotHintList {
  int32_t layer, count;
  int32_t expert[kHintsAtOnce];
  uint64_t steps;  // begun when they were given: once there are more, none is begun
};

namespace cuda {

// On the ops' stream. Takes the hints in order, and fetches each.
void hint_slots(const SlotHints& hints, const SlotHintList& list, Exec& exec);
// A step begins: what it and later hints use is kept from hints.
void begin_hints(const SlotCache& cache, Exec& exec);

}  // namespace cuda
}  // namespace rocket
