// A look-up of few rows in a cache of experts (slot_cache.h), and what it shares with those of many (slot_many.h).
#pragma once

#include "ops/slot_cache.h"

namespace rocket {

// Shared by the threads of a look-up.
struct SlotScratch {
  uint32_t seen[kSlotWords], there[kSlotWords];  // a bit an expert: chosen, and in a slot before the look-up
  int16_t seen_before[kSlotWords + 1];           // bits of the words before
  int16_t hit_before[kSlotWords + 1];            // of both
  uint32_t placed[kSlotWords];                   // a bit for each place in `order`
  int32_t held[2];                               // experts of the layer that are there; in turn
};

namespace slots {

ROCKET_HOST_DEVICE int32_t count_bits(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __popc(bits);
#else
  return __builtin_popcount(bits);
#endif
}
ROCKET_HOST_DEVICE uint32_t bit_of(int32_t expert) {
  return 1u << (expert % 32);
}
ROCKET_HOST_DEVICE bool has(const uint32_t* bits, int32_t expert) {
  return (bits[expert / 32] & bit_of(expert)) != 0;
}
ROCKET_HOST_DEVICE int32_t hits_below(const SlotScratch& s, int32_t expert) {
  const int32_t w = expert / 32;
  return s.hit_before[w] + count_bits(s.seen[w] & s.there[w] & (bit_of(expert) - 1));
}
ROCKET_HOST_DEVICE int32_t misses_below(const SlotScratch& s, int32_t expert) {
  const int32_t w = expert / 32;
  return s.seen_before[w] - s.hit_before[w] + count_bits(s.seen[w] & ~s.there[w] & (bit_of(expert) - 1));
}

// The experts of a word that have a slot, a bit each.
ROCKET_HOST_DEVICE uint32_t find_there(const int32_t* slot_of, int32_t first, int32_t experts) {
  uint32_t bits = 0;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int32_t i = 0; i < 32; ++i) {
    if (first + i < experts && slot_of[first + i] >= 0) bits |= 1u << i;
  }
  return bits;
}

// The oldest of a thread's slots: first, first + step, … below last. Stamps of a group differ from each other.
struct Oldest {
  int64_t stamp;
  int32_t slot;
};
ROCKET_HOST_DEVICE Oldest find_oldest(const int64_t* stamp, int32_t first, int32_t last, int32_t step) {
  Oldest oldest = {kNoStamp, -1};
  for (int32_t slot = first; slot < last; slot += step) {
    const int64_t s = stamp[slot];
    if (s < oldest.stamp) oldest = {s, slot};
  }
  return oldest;
}

// A hinted expert is demanded, or makes way before that.
template <typename Block>
ROCKET_HOST_DEVICE void end_hint(const SlotCache& c, int32_t slot, bool useful, Block& block) {
  const int32_t key = c.key[slot];
  SlotCounters& counters = c.counters[key / c.experts];
  c.hinted[slot] = 0;
  block.add(useful ? &counters.hints_useful : &counters.hints_wasted, uint64_t{1});
  block.add(c.hint_bytes + (useful ? 0 : 1), static_cast<uint64_t>(c.parts[key].stored_bytes));
  block.add(c.hints, ~uint64_t{0});  // one less
}

// Gives a slot to the expert of a miss, by one thread. hints: whether any slot has a hint's expert.
template <typename Block>
ROCKET_HOST_DEVICE void give(const SlotCache& c, int32_t miss, int32_t slot, int32_t key, int64_t stamp,
                             bool hints, Block& block) {
  const int32_t old = c.key[slot];
  if (hints && c.hinted[slot] != 0) end_hint(c, slot, false, block);
  if (old >= 0) c.slot_of[old] = -1;
  if (c.place_of) {
    const int32_t place = c.place_of[key];
    c.trade[miss] = {place, old};
    c.place_of[key] = -1;
    if (old >= 0) c.place_of[old] = place;
  }
  c.key[slot] = key;
  c.slot_of[key] = slot;
  c.stamp[slot] = stamp;
}
// The same, counted, while no other thread does it.
template <typename Block>
ROCKET_HOST_DEVICE void take(const SlotCache& c, int32_t miss, int32_t slot, int32_t key, int64_t stamp,
                             bool hints, Block& block) {
  const int32_t old = c.key[slot];
  if (old >= 0) ++c.counters[old / c.experts].evictions;
  give(c, miss, slot, key, stamp, hints, block);
}

ROCKET_HOST_DEVICE void point_weight(Weight& w, char* slot, int64_t data_at, int64_t scale_at) {
  w.data = slot + data_at;
  w.block_scale = scale_at < 0 ? nullptr : slot + scale_at;
}
ROCKET_HOST_DEVICE void point_into_slot(const SlotCache& c, int32_t key, int32_t slot) {
  const SlotParts& parts = c.parts[key];
  ExpertWeights& e = c.table[key];
  char* const at = c.base + slot * c.slot_bytes;
  point_weight(e.gate, at, parts.data_at[0], parts.scale_at[0]);
  point_weight(e.up, at, parts.data_at[1], parts.scale_at[1]);
  point_weight(e.down, at, parts.data_at[2], parts.scale_at[2]);
}

// Which experts are chosen, and which of the layer are there.
template <typename Block>
ROCKET_HOST_DEVICE void find_chosen(const SlotCache& c, int32_t layer, const int32_t* id, int64_t n,
                                    SlotScratch& s, Block& block) {
  const int32_t thread = block.thread(), threads = block.threads();
  const int32_t words = (c.experts + 31) / 32, base = layer * c.experts;
  for (int32_t w = thread; w < words; w += threads) {
    s.seen[w] = 0;
    s.there[w] = find_there(c.slot_of + base, w * 32, c.experts);
  }
  block.sync();
  for (int64_t i = thread; i < n; i += threads) {
    const int32_t e = block.load(id + i);
    if (e >= 0) block.mark(&s.seen[e / 32], bit_of(e));
  }
  block.sync();
  for (int32_t w = thread; w <= words; w += threads) {
    int32_t seen = 0, hit = 0;
    for (int32_t i = 0; i < w; ++i) {
      seen += count_bits(s.seen[i]);
      hit += count_bits(s.seen[i] & s.there[i]);
    }
    s.seen_before[w] = static_cast<int16_t>(seen);
    s.hit_before[w] = static_cast<int16_t>(hit);
  }
  block.sync();
}

// The table's entries of the misses, and their bytes.
template <typename Block>
ROCKET_HOST_DEVICE void point_misses(const SlotCache& c, int32_t base, int32_t misses, Block& block) {
  for (int32_t m = block.thread(); m < misses; m += block.threads()) {
    const SlotMiss& miss = c.miss[m];
    point_into_slot(c, base + miss.expert, miss.slot);
    block.add(c.streamed, static_cast<uint64_t>(c.parts[base + miss.expert].stored_bytes));
  }
}

template <typename Block>
ROCKET_HOST_DEVICE void look_up_few(const SlotCache& c, int32_t layer, const int32_t* id, int64_t n,
                                    int64_t now, bool hints, SlotScratch& s, Block& block) {
  const int32_t thread = block.thread(), threads = block.threads();
  const int32_t words = (c.experts + 31) / 32, base = layer * c.experts;
  const int32_t* const group = c.first + (c.budgets ? layer : 0);
  const int32_t first = group[0], last = group[1], room = last - first;
  const int32_t hits = s.hit_before[words], misses = s.seen_before[words] - hits;
  const int32_t beside = misses < room - hits ? misses : room - hits;
  for (int32_t e = thread; e < c.experts; e += threads) {
    if (!has(s.seen, e)) continue;
    const int32_t before = misses_below(s, e);
    if (has(s.there, e)) {
      c.rank[e] = -1;
      const int32_t slot = c.slot_of[base + e];
      c.stamp[slot] = now + hits_below(s, e) + (before < beside ? before : beside);
      c.mark[slot] = now;
      if (hints && c.hinted[slot] != 0) end_hint(c, slot, true, block);
    } else {
      c.rank[e] = before;
      c.miss[before] = {e, -1};
    }
  }
  for (int64_t i = thread; i < n; i += threads) {
    const int32_t e = block.load(id + i);
    const bool hit = e >= 0 && has(s.there, e);
    c.hit_id[i] = hit ? e : -1;
    c.miss_id[i] = e >= 0 && !hit && misses_below(s, e) < beside ? e : -1;
  }
  if (thread == 0) {
    *c.lookup = {layer, hits, misses, beside, room};
    *c.clock = now + hits + misses;
    c.counters[layer].hits += hits;
    c.counters[layer].misses += misses;
  }
  if (misses == 0) return;

  block.sync();
  Oldest mine = find_oldest(c.stamp, first + thread, last, threads);
  for (int32_t m = 0; m < misses; ++m) {
    if (block.oldest(mine.stamp) != mine.stamp || mine.slot < 0) continue;
    const int32_t e = c.miss[m].expert;
    // Of the first wave's experts those below e come before it; of later ones all that came before.
    take(c, m, mine.slot, base + e, now + m + (m < beside ? hits_below(s, e) : hits), hints, block);
    c.mark[mine.slot] = m < beside ? now : now + hits + beside + (m - beside) / room * room;
    c.miss[m].slot = mine.slot;
    mine = find_oldest(c.stamp, first + thread, last, threads);
  }
  block.sync();
  point_misses(c, base, misses, block);
}

}  // namespace slots
}  // namespace rocket
