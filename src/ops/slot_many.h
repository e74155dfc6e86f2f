// A look-up of many rows in a cache of experts (slot_cache.h), as experts/cache.h says.
//
// All misses of a look-up get their slots here, wave by wave: once the layer holds what it may, those of its own experts
// make way that the look-up does not use, and in later waves those that it uses least. A later wave begins with only such
// experts there as the look-up uses, since the wave before it was full.
#pragma once

#include "ops/slot_few.h"

namespace rocket::slots {

struct ManyLookup {
  int32_t layer, base;  // base: key of the layer's expert 0
  int32_t chosen, hits, misses, beside;
  int32_t most;  // experts that the layer may hold
  int64_t now;
  SlotShare share;
  bool hints;  // whether any slot has a hint's expert
};

ROCKET_HOST_DEVICE int32_t bits_below(const uint32_t* bits, int32_t place) {
  int32_t count = count_bits(bits[place / 32] & (bit_of(place) - 1));
  for (int32_t w = 0; w < place / 32; ++w) count += count_bits(bits[w]);
  return count;
}

// Fills `order`: by the rows that chose an expert, of equals the higher first.
template <typename Block>
ROCKET_HOST_DEVICE void rank_by_use(const SlotCache& c, const int32_t* id, int64_t n, const SlotScratch& s,
                                    Block& block) {
  const int32_t thread = block.thread(), threads = block.threads();
  for (int32_t e = thread; e < c.experts; e += threads) c.use[e] = 0;
  block.sync();
  for (int64_t i = thread; i < n; i += threads) {
    const int32_t e = block.load(id + i);
    if (e >= 0) block.add(c.use + e, 1);
  }
  block.sync();
  for (int32_t e = thread; e < c.experts; e += threads) {
    if (!has(s.seen, e)) continue;
    const int32_t rows = c.use[e];
    int32_t place = 0;
    for (int32_t f = 0; f < c.experts; ++f) {
      const int32_t other = c.use[f];
      place += other > 0 && (other < rows || (other == rows && f > e));
    }
    c.order[place] = e;
  }
  block.sync();
}

// Fills `placed`: a bit for each place in `order` whose expert has a slot.
template <typename Block>
ROCKET_HOST_DEVICE void find_placed(const SlotCache& c, const ManyLookup& l, SlotScratch& s, Block& block) {
  for (int32_t w = block.thread(); w < (l.chosen + 31) / 32; w += block.threads()) {
    uint32_t bits = 0;
    for (int32_t i = w * 32; i < l.chosen && i < w * 32 + 32; ++i) {
      if (c.slot_of[l.base + c.order[i]] >= 0) bits |= bit_of(i);
    }
    s.placed[w] = bits;
  }
  block.sync();
}

ROCKET_HOST_DEVICE int32_t wave_begin(const ManyLookup& l, int32_t turn) {
  return turn < l.beside ? 0 : l.beside + (turn - l.beside) / l.share.pool * l.share.pool;
}

// Fills `miss`: the least used first, in waves, and each wave ascending. Hits are stamped as the newest.
template <typename Block>
ROCKET_HOST_DEVICE void order_misses(const SlotCache& c, const ManyLookup& l, SlotScratch& s, Block& block) {
  const int32_t thread = block.thread(), threads = block.threads();
  find_placed(c, l, s, block);
  for (int32_t i = thread; i < l.chosen; i += threads) {
    const int32_t e = c.order[i];
    if (has(s.there, e)) {
      c.rank[e] = -1;
      const int32_t slot = c.slot_of[l.base + e];
      c.stamp[slot] = l.now + hits_below(s, e);
      if (l.hints && c.hinted[slot] != 0) end_hint(c, slot, true, block);
    } else {
      c.turn[e] = i - bits_below(s.placed, i);
    }
  }
  block.sync();
  for (int32_t e = thread; e < c.experts; e += threads) {
    if (!has(s.seen, e) || has(s.there, e)) continue;
    const int32_t begin = wave_begin(l, c.turn[e]);
    int32_t place = begin;
    for (int32_t f = 0; f < e; ++f) {
      if (has(s.seen, f) && !has(s.there, f)) place += wave_begin(l, c.turn[f]) == begin;
    }
    c.rank[e] = place;
    c.miss[place] = {e, -1};
  }
  block.sync();
}

// Slots for the first wave while the layer holds fewer than it may: free ones, and those of the oldest in the group. The
// wave's own are newer than all others. Returns how many misses have one.
template <typename Block>
ROCKET_HOST_DEVICE int32_t take_oldest(const SlotCache& c, const ManyLookup& l, SlotScratch& s,
                                       Block& block) {
  const int32_t* const group = c.first + (c.budgets ? l.layer : 0);
  const int32_t first = group[0] + block.thread(), last = group[1], threads = block.threads();
  Oldest mine = find_oldest(c.stamp, first, last, threads);
  int32_t m = 0;
  for (; m < l.beside; ++m) {
    const int64_t oldest = block.oldest(mine.stamp);
    const int32_t held = s.held[m % 2];  // written before that barrier, and next behind the one to come
    if (held == l.most) break;
    if (oldest != mine.stamp || mine.slot < 0) continue;
    const int32_t old = c.key[mine.slot];
    const bool own = old >= 0 && old / c.experts == l.layer;
    s.held[(m + 1) % 2] = own ? held : held + 1;
    take(c, m, mine.slot, l.base + c.miss[m].expert, l.now + l.hits + m, l.hints, block);
    c.miss[m].slot = mine.slot;
    mine = find_oldest(c.stamp, first, last, threads);
  }
  block.sync();
  return m;
}

// The layer's own that the look-up does not use, the longest unused first, of equals the lower.
template <typename Block>
ROCKET_HOST_DEVICE void find_unused(const SlotCache& c, const ManyLookup& l, int32_t wanted,
                                    const SlotScratch& s, Block& block) {
  const auto unused = [&](int32_t e) {
    return has(s.there, e) && !has(s.seen, e) ? c.slot_of[l.base + e] : -1;
  };
  for (int32_t e = block.thread(); e < c.experts; e += block.threads()) {
    const int32_t slot = unused(e);
    if (slot < 0) continue;
    const int64_t mark = c.mark[slot];
    int32_t place = 0;
    for (int32_t f = 0; f < c.experts; ++f) {
      const int32_t other = unused(f);
      if (other >= 0) place += c.mark[other] < mark || (c.mark[other] == mark && f < e);
    }
    if (place < wanted) c.victim[place] = slot;
  }
  block.sync();
}

// Those that the look-up uses least.
template <typename Block>
ROCKET_HOST_DEVICE void find_least_used(const SlotCache& c, const ManyLookup& l, int32_t wanted,
                                        SlotScratch& s, Block& block) {
  find_placed(c, l, s, block);
  for (int32_t i = block.thread(); i < l.chosen; i += block.threads()) {
    if (!has(s.placed, i)) continue;
    const int32_t place = bits_below(s.placed, i);
    if (place < wanted) c.victim[place] = c.slot_of[l.base + c.order[i]];
  }
  block.sync();
}

// Gives `victim` to the misses [begin, end), in order.
template <typename Block>
ROCKET_HOST_DEVICE void give_victims(const SlotCache& c, const ManyLookup& l, int32_t begin, int32_t end,
                                     Block& block) {
  for (int32_t m = begin + block.thread(); m < end; m += block.threads()) {
    const int32_t slot = c.victim[m - begin];
    give(c, m, slot, l.base + c.miss[m].expert, l.now + l.hits + m, l.hints, block);
    c.miss[m].slot = slot;
  }
  block.sync();
}

// The most used that are there are the most recent from here on, and the others retire.
template <typename Block>
ROCKET_HOST_DEVICE void settle(const SlotCache& c, const ManyLookup& l, int64_t retired, SlotScratch& s,
                               Block& block) {
  find_placed(c, l, s, block);
  int32_t there = 0;
  for (int32_t w = 0; w < (l.chosen + 31) / 32; ++w) there += count_bits(s.placed[w]);
  const int64_t settled = l.now + l.chosen;
  for (int32_t i = block.thread(); i < l.chosen; i += block.threads()) {
    if (!has(s.placed, i)) continue;
    const int32_t slot = c.slot_of[l.base + c.order[i]], place = bits_below(s.placed, i);
    c.mark[slot] = settled;
    c.stamp[slot] = place < there - l.share.kept ? retired + place : settled + place;
  }
  if (block.thread() == 0) {
    *c.clock = settled + l.chosen;
    *c.retired = retired + l.chosen;
  }
}

template <typename Block>
ROCKET_HOST_DEVICE void look_up_many(const SlotCache& c, int32_t layer, const int32_t* id, int64_t n,
                                     int64_t now, int64_t retired, bool hints, SlotScratch& s, Block& block) {
  const int32_t words = (c.experts + 31) / 32;
  ManyLookup l = {};
  l.layer = layer, l.base = layer * c.experts, l.now = now, l.share = c.share[layer], l.hints = hints;
  l.chosen = s.seen_before[words], l.hits = s.hit_before[words], l.misses = l.chosen - l.hits;
  int32_t held = 0;
  for (int32_t w = 0; w < words; ++w) held += count_bits(s.there[w]);
  const int32_t share = l.share.kept + l.share.pool;
  l.most = held > share ? held : share;
  l.beside = l.misses < l.most - l.hits ? l.misses : l.most - l.hits;
  if (block.thread() == 0) {
    *c.lookup = {layer, l.hits, l.misses, l.beside, l.share.pool};
    c.counters[layer].hits += l.hits;
    c.counters[layer].misses += l.misses;
    s.held[0] = held;
  }
  rank_by_use(c, id, n, s, block);
  order_misses(c, l, s, block);
  for (int64_t i = block.thread(); i < n; i += block.threads()) {
    const int32_t e = block.load(id + i);
    const bool hit = e >= 0 && has(s.there, e);
    c.hit_id[i] = hit ? e : -1;
    c.miss_id[i] = e >= 0 && !hit && c.rank[e] < l.beside ? e : -1;
  }
  const int32_t taken = take_oldest(c, l, s, block);
  if (taken < l.beside) {
    find_unused(c, l, l.beside - taken, s, block);
    give_victims(c, l, taken, l.beside, block);
  }
  for (int32_t begin = l.beside; begin < l.misses; begin += l.share.pool) {
    const int32_t end = begin + l.share.pool < l.misses ? begin + l.share.pool : l.misses;
    find_least_used(c, l, end - begin, s, block);
    give_victims(c, l, begin, end, block);
  }
  if (block.thread() == 0) c.counters[layer].evictions += l.misses - taken;
  settle(c, l, retired, s, block);
  point_misses(c, l.base, l.misses, block);
}

}  // namespace rocket::slots
