// A bounded cache of experts in the ops' memory: which expert is in which slot, and which makes way. The same look-ups,
// slots and counters as ExpertCache (experts/cache.h) with lru, many rows as any and no hints, for a backend whose host
// must not be asked in the middle of a step.
//
//   1. All experts of the step in the layer are looked up. Those that are there are hits.
//   2. Each miss, in ascending order, takes the slot with the oldest stamp in its group: a free one (their stamps are
//      below all others, and ascend), else that of the least recently used. None that the wave needs is taken: there is
//      room for all of a wave, and what it needs has newer stamps by then.
//   3. Stamps ascend with the expert within a wave, hits and misses alike.
// Waves. What fits beside the hits is looked up with them, but computed apart, so that the hits need not wait for bytes:
//   wave 0   the hits
//   wave 1   the lowest misses, as many as fit beside them
//   wave 2 … the next misses, as many as there are slots each; they take slots of earlier waves, so their bytes may be
//            written only when these have been computed with
// Since an expert belongs to one wave of a look-up, its entry in the table of experts is right as soon as it has a slot.
//
// slot_lookup() is run by one block of threads, or on the host by one thread (or several, in a test): `Block` says which.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/experts.h"
#include "ops/host_device.h"

namespace rocket {

constexpr int32_t kSlotExperts = 4096;  // of a layer, at most
constexpr int32_t kSlotWords = kSlotExperts / 32;
constexpr int64_t kNoStamp = INT64_MAX;

// Counted for each distinct expert of a look-up. Evictions count for the layer whose expert made way.
struct SlotCounters {
  int64_t hits, misses, evictions;
};

// Where an expert's parts lie in its slot. A scale at -1: it has none.
struct SlotParts {
  int64_t data_at[3], scale_at[3];
  int64_t bytes, stored_bytes;  // with and without padding
};

struct SlotMiss {
  int32_t expert, slot;
};

// The look-up in hand.
struct SlotLookup {
  int32_t layer, hits, misses;
  int32_t beside;  // misses of wave 1
  int32_t room;    // slots of the layer's group
};

// All arrays are in the ops' memory.
struct SlotCache {
  int32_t layers = 0, experts = 0;
  bool budgets = false;              // a group of slots for each layer; else one for all
  const int32_t* first = nullptr;    // [groups + 1] the first slot of each group
  int32_t* slot_of = nullptr;        // [layers * experts], -1 = not there
  int32_t* key = nullptr;            // [slots] layer * experts + expert, -1 = free
  int64_t* stamp = nullptr;          // [slots]; of free slots below 0
  int64_t* clock = nullptr;          // [1] the next stamp
  SlotCounters* counters = nullptr;  // [layers]
  uint64_t* streamed = nullptr;      // [1] bytes of all misses so far, without padding
  SlotLookup* lookup = nullptr;      // [1]
  SlotMiss* miss = nullptr;          // [experts] the look-up's misses, ascending
  int32_t* rank = nullptr;           // [experts] of its experts: the place in `miss`, -1 = a hit
  int32_t* hit_id = nullptr;         // [rows, topk] the choices of wave 0, -1 = another's
  int32_t* miss_id = nullptr;        // [rows, topk] those of wave 1, later of the wave in hand
  const SlotParts* parts = nullptr;  // [layers * experts]
  ExpertWeights* table = nullptr;    // [layers * experts]
  char* base = nullptr;              // [slots, slot_bytes]
  int64_t slot_bytes = 0;
  unsigned* ticket = nullptr;  // [1] 0 between launches
};

// The misses of wave 1, 2, …: places [begin, end) in `miss`.
struct SlotRange {
  int32_t begin, end;
};
ROCKET_HOST_DEVICE SlotRange slot_wave(const SlotLookup& l, int32_t wave) {
  if (wave <= 1) return {0, wave == 1 ? l.beside : 0};
  const int64_t begin = l.beside + (wave - 2) * int64_t{l.room}, end = begin + l.room;
  const int64_t all = l.misses;
  return {static_cast<int32_t>(begin < all ? begin : all), static_cast<int32_t>(end < all ? end : all)};
}

// How many waves a look-up of at most so many distinct experts may have, whatever is there. At least 2.
ROCKET_HOST_DEVICE int32_t slot_waves(int64_t distinct, int64_t room) {
  if (room < 1 || distinct <= room) return 2;
  return static_cast<int32_t>((distinct + room - 1) / room) + 1;
}

// The choice as wave 1, 2, … has it.
ROCKET_HOST_DEVICE int32_t slot_wave_id(const SlotRange& range, const int32_t* rank, int32_t id) {
  if (id < 0) return -1;
  return rank[id] >= range.begin && rank[id] < range.end ? id : -1;
}

// Shared by the threads of a look-up.
struct SlotScratch {
  uint32_t seen[kSlotWords], there[kSlotWords];  // a bit an expert: chosen, and in a slot before the look-up
  int16_t seen_before[kSlotWords + 1];           // bits of the words before
  int16_t hit_before[kSlotWords + 1];            // of both
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

// Gives a slot to an expert, by one thread.
ROCKET_HOST_DEVICE void take(const SlotCache& c, int32_t slot, int32_t key, int64_t stamp) {
  const int32_t old = c.key[slot];
  if (old >= 0) {
    c.slot_of[old] = -1;
    ++c.counters[old / c.experts].evictions;
  }
  c.key[slot] = key;
  c.slot_of[key] = slot;
  c.stamp[slot] = stamp;
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

}  // namespace slots

// One look-up of the choices id[n] (-1 is skipped) in a layer, by all threads of the block; the last writes are not yet
// behind a barrier when it returns. Block:
//   thread(), threads()      which thread this is, of how many
//   sync()                   all threads get here before any goes on, and see what others have written
//   load(p)                  *p of a choice, which another block may have written
//   mark(word, bits)         ors into a word that others are marking
//   oldest(stamp)            the smallest stamp of all threads, in every thread; a sync() in itself
//   add(counter, n)          to a counter that others are adding to
template <typename Block>
ROCKET_HOST_DEVICE void slot_lookup(const SlotCache& c, int32_t layer, const int32_t* id, int64_t n,
                                    SlotScratch& s, Block& block) {
  using namespace slots;
  const int32_t thread = block.thread(), threads = block.threads();
  const int32_t words = (c.experts + 31) / 32, base = layer * c.experts;
  const int32_t* const group = c.first + (c.budgets ? layer : 0);
  const int32_t first = group[0], last = group[1], room = last - first;
  const int64_t now = *c.clock;
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
  const int32_t hits = s.hit_before[words], misses = s.seen_before[words] - hits;
  const int32_t beside = misses < room - hits ? misses : room - hits;
  for (int32_t e = thread; e < c.experts; e += threads) {
    if (!has(s.seen, e)) continue;
    const int32_t before = misses_below(s, e);
    if (has(s.there, e)) {
      c.rank[e] = -1;
      c.stamp[c.slot_of[base + e]] = now + hits_below(s, e) + (before < beside ? before : beside);
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
    take(c, mine.slot, base + e, now + m + (m < beside ? hits_below(s, e) : hits));
    c.miss[m].slot = mine.slot;
    mine = find_oldest(c.stamp, first + thread, last, threads);
  }
  block.sync();
  for (int32_t m = thread; m < misses; m += threads) {
    const SlotMiss& miss = c.miss[m];
    point_into_slot(c, base + miss.expert, miss.slot);
    block.add(c.streamed, static_cast<uint64_t>(c.parts[base + miss.expert].stored_bytes));
  }
}

}  // namespace rocket
