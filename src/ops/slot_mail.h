// Misses of a look-up (slot_cache.h) that a thread of the host brings from a disk, while a recorded step waits for them on
// the device.
//
// A recorded step cannot call the host. So a kernel writes what a wave misses into memory that host and device share
// (SlotMail), and waits until all of it has arrived (SlotDesk::arrived, which copies to the device raise behind the bytes
// that they bring). One wave is on its way at a time: wave 1 beside the ops of wave 0, later ones behind the wave before.
// The wait ends when nothing has come for the limit: then `late` says so, and no later wave of any step asks or waits any
// more. Who reads the step's results looks at `late` first.
//
// What must not happen while the kernel waits, as the wait would then last as long as the limit:
//   - a call that waits for the device to be idle, or for the context's lock behind such a call, in the thread that
//     serves: cudaMalloc, cudaFree, loading a kernel. Another thread may not make one either, as the copies may need that
//     lock: whoever launches the step waits for its end before it does anything else, kernels are loaded before the
//     first recorded step, and steps that are issued call by call, which load kernels, never wait: there the host looks
//     at the misses itself (`wait` below is false);
//   - kernels of the same step that need more places than are left: the kernel is one small block, and no other kernel
//     waits for blocks of its own beyond a cluster.
#pragma once

#include <cstdint>

#include "ops/exec.h"
#include "ops/slot_cache.h"
#include "ops/slot_fetch.h"

namespace rocket {

// In pinned memory of the host, which the device writes.
struct SlotMail {
  uint64_t posted;  // requests so far; written behind the rest of the last one
  uint64_t late;    // the request that was not answered in time; 0: none
  int32_t layer, count;
  SlotMiss miss[kSlotExperts];
};

constexpr uint64_t kNothingMore = UINT64_MAX;

// In the device's memory.
struct SlotDesk {
  uint64_t posted;   // requests so far
  uint64_t wanted;   // experts in all of them
  uint64_t arrived;  // experts that are in their slots; kNothingMore: the host has given up
  uint64_t late;     // 1: nothing is asked for any more
};

struct SlotPost {
  SlotMail* mail = nullptr;  // the address that the device knows it by
  SlotDesk* desk = nullptr;
  SlotFetchClock* clock = nullptr;
  uint64_t limit_ns = 0;  // without anything coming
};

namespace cuda {

// Wave 1, 2, … of n choices id[n]: asks for its misses and waits for them, or, if not `wait`, only writes the choices of
// a wave beyond 1. stream: as of fetch_slots().
void post_slots(const SlotCache& cache, const SlotPost& post, int32_t wave, const int32_t* id, int64_t n,
                bool wait, void* stream, Exec& exec);

}  // namespace cuda
}  // namespace rocket
