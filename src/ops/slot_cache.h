// A bounded cache of experts in the ops' memory: which expert is in which slot, and which makes way. The same look-ups,
// slots and counters as ExpertCache (experts/cache.h) with lru and no hints, for a backend whose host must not be asked
// in the middle of a step. A look-up (slot_lookup.h) of few rows:
//
//   1. All experts of the step in the layer are looked up. Those that are there are hits.
//   2. Each miss, in ascending order, takes the slot with the oldest stamp in its group: a free one (their stamps are
//      below all others, and ascend), else that of the least recently used. None that the wave needs is taken: there is
//      room for all of a wave, and what it needs has newer stamps by then.
//   3. Stamps ascend with the expert within a wave, hits and misses alike.
// Of many rows: as cache.h says; retired experts have stamps between those of free slots and all others.
//
// Waves. What fits beside the hits is looked up with them, but computed apart, so that the hits need not wait for bytes:
//   wave 0   the hits
//   wave 1   the first misses, as many as fit beside them
//   wave 2 … the next misses; they take slots of earlier waves, so their bytes may be written only when these have been
//            computed with
// Since an expert belongs to one wave of a look-up, its entry in the table of experts is right as soon as it has a slot.
//
// Tiers. Behind the slots either all experts lie somewhere (a bank, a disk), or only those without a slot, each in a place
// of its own (`place_of`): then every slot is full from the start, and a miss trades places with the expert that makes way
// for it. In the order of the misses, as the look-up lists them in `trade`:
//   before a miss   the expert in place p, another in slot s
//   after it        the expert in slot s, the other in place p
// An expert that a look-up fetches and whose slot a later wave takes has made two such moves by its end.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/experts.h"
#include "ops/host_device.h"

namespace rocket {

constexpr int32_t kSlotExperts = 4096;  // of a layer, at most
constexpr int32_t kSlotWords = kSlotExperts / 32;
constexpr int64_t kNoStamp = INT64_MAX;
constexpr int64_t kFreeStamp = -(int64_t{1} << 62);  // of slot 0 while it is free; they ascend with the slot
constexpr int64_t kRetiredStamp = -(int64_t{1} << 61);  // of the first expert that retires; they ascend

// Counted for each distinct expert of a look-up. Evictions count for the layer whose expert made way.
struct SlotCounters {
  int64_t hits, misses, evictions;
  uint64_t hints_taken, hints_useful, hints_wasted;
};

// Where an expert's parts lie in its slot. A scale at -1: it has none.
struct SlotParts {
  int64_t data_at[3], scale_at[3];
  int64_t bytes, stored_bytes;  // with and without padding
};

struct SlotMiss {
  int32_t expert, slot;
};

// What a miss trades (`place_of`): its place, and the key of the expert that goes there from the miss's slot, -1: none.
struct SlotTrade {
  int32_t place, key;
};

// The look-up in hand.
struct SlotLookup {
  int32_t layer, hits, misses;
  int32_t beside;  // misses of wave 1
  int32_t room;    // misses of each further wave but the last
};

// Of a layer, for look-ups of many rows: experts that it keeps, and slots beside them (K and P of experts/cache.h).
struct SlotShare {
  int32_t kept, pool;
};

// All arrays are in the ops' memory.
struct SlotCache {
  int32_t layers = 0, experts = 0;
  int64_t few = 0;                 // choices of a look-up of few rows, at most
  bool budgets = false;            // a group of slots for each layer; else one for all
  const int32_t* first = nullptr;  // [groups + 1] the first slot of each group
  int32_t* slot_of = nullptr;      // [layers * experts], -1 = not there
  int32_t* key = nullptr;          // [slots] layer * experts + expert, -1 = free
  int64_t* stamp = nullptr;        // [slots]; of free slots and retired experts below 0
  int64_t* mark = nullptr;         // [slots] the same for all of a wave, and newer than those of earlier ones
  int64_t* clock = nullptr;        // [1] the next stamp
  int64_t* retired = nullptr;      // [1] the next stamp of an expert that retires
  SlotCounters* counters = nullptr;  // [layers]
  uint64_t* streamed = nullptr;      // [1] bytes of all misses so far, without padding
  SlotLookup* lookup = nullptr;      // [1]
  SlotMiss* miss = nullptr;          // [experts] the look-up's misses, wave by wave, ascending in each
  int32_t* rank = nullptr;           // [experts] of its experts: the place in `miss`, -1 = a hit
  int32_t* hit_id = nullptr;         // [rows, topk] the choices of wave 0, -1 = another's
  int32_t* miss_id = nullptr;        // [rows, topk] those of wave 1, later of the wave in hand
  const SlotShare* share = nullptr;  // [layers]
  int32_t* use = nullptr;            // [experts] rows that chose it, in a look-up of many
  int32_t* order = nullptr;          // [experts] its experts, the least used first
  int32_t* turn = nullptr;           // [experts] of its misses: how many less used ones are missing
  int32_t* victim = nullptr;         // [experts] slots that a wave takes
  const SlotParts* parts = nullptr;  // [layers * experts]
  ExpertWeights* table = nullptr;    // [layers * experts]
  char* base = nullptr;              // [slots, slot_bytes]
  int64_t slot_bytes = 0;
  unsigned* ticket = nullptr;  // [1] 0 between launches
  // Hints (slot_hint.h).
  int32_t* hinted = nullptr;       // [slots] 1: a hint's expert, not demanded since
  uint64_t* hints = nullptr;       // [1] how many of these
  uint64_t* hint_bytes = nullptr;  // [2] of useful and of wasted ones
  int64_t* step_floor = nullptr;   // [1] the clock when the last step began
  // Where only experts without a slot lie behind the slots; else null.
  int32_t* place_of = nullptr;  // [layers * experts] -1 = in a slot
  SlotTrade* trade = nullptr;   // [experts] of the look-up's misses, as they stand in `miss`
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

// How many waves a look-up of at most so many distinct experts may have, whatever is there: `first` slots for the hits
// and the misses beside them, `further` for each further wave. At least 2.
ROCKET_HOST_DEVICE int32_t slot_waves(int64_t distinct, int64_t first, int64_t further) {
  if (further < 1 || distinct <= first) return 2;
  return static_cast<int32_t>((distinct - first + further - 1) / further) + 2;
}

// The choice as wave 1, 2, … has it.
ROCKET_HOST_DEVICE int32_t slot_wave_id(const SlotRange& range, const int32_t* rank, int32_t id) {
  if (id < 0) return -1;
  return rank[id] >= range.begin && rank[id] < range.end ? id : -1;
}

}  // namespace rocket
