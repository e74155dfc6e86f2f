// Brings the misses of a look-up (slot_cache.h) into their slots, from where they lie in slot layout in memory that the
// device can read: the host's, pinned. The device reads it itself, since which experts are missing is known only there.
//
//   wave 1        beside the ops of wave 0, on a stream of its own; its choices are there already
//   wave 2 …      behind the ops of the wave before; writes the wave's choices, too
// A launch that finds nothing missing ends at once. Sizes are multiples of 16 bytes, and so are all places.
//
// Where only experts without a slot lie there, a miss and the expert that makes way for it trade places: swap_slots()
// brings the one and takes the other back, piece by piece through registers, so that no more room is needed. Bytes then
// cross the link both ways at once. Slots and places hold any expert.
#pragma once

#include <cstdint>

#include "ops/exec.h"
#include "ops/slot_cache.h"

namespace rocket {

// While bytes were on their way, in nanoseconds of the device's clock.
struct SlotFetchClock {
  uint64_t begin;  // of the fetch that runs; the largest number: none
  uint64_t total;
  unsigned ticket;  // 0 between launches
};

struct SlotBank {
  const char* const* expert = nullptr;  // [layers * experts], or null
  char* const* place = nullptr;         // of experts without a slot, or null
  SlotFetchClock* clock = nullptr;      // [1]
};

enum class SlotCopy {
  kLoads,  // 16 bytes a thread and load
  kBulk,   // whole pieces through shared memory, by the copy engine of each multiprocessor
};
constexpr SlotCopy kSlotCopy = SlotCopy::kLoads;

namespace cuda {

// stream: a cudaStream_t of one's own for wave 1; null: the ops' stream. n choices id[n].
void fetch_slots(const SlotCache& cache, const SlotBank& bank, int32_t wave, const int32_t* id, int64_t n,
                 SlotCopy copy, void* stream, Exec& exec);
// The same from and to places.
void swap_slots(const SlotCache& cache, const SlotBank& bank, int32_t wave, const int32_t* id, int64_t n,
                void* stream, Exec& exec);

}  // namespace cuda
}  // namespace rocket
