// Where a device's slots are filled from. Launches go to `stream` (a cudaStream_t), or, where it is null, to the ops'.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/memory_space.h"
#include "experts/device_stream.h"
#include "experts/slot_state.h"

namespace rocket {

class SlotSource {
 public:
  virtual ~SlotSource() = default;
  virtual const char* name() const = 0;
  // Brings the misses of a wave of the last look-up into their slots, and writes the choices of a wave beyond 1.
  virtual void bring(int32_t layer, int32_t wave, std::span<const int32_t> ids, void* stream, Exec& exec) = 0;
  virtual void check() {}  // throws what went wrong in an earlier pass
  virtual void begin_pass() {}
  virtual void end_pass() {}                          // throws what went wrong in the pass
  virtual double seconds() const { return 0; }        // beside what the device's clock has
  virtual bool takes_hints() const { return false; }  // whether the device can fetch by itself between steps
  // Whether an expert is this rank's.
  virtual bool has(int32_t /*layer*/, int32_t /*expert*/) const { return true; }
};

// What a source is made for.
struct SlotTarget {
  SlotCache cache;
  SlotBank bank;
  SlotDesk* desk = nullptr;
};

// By a thread of the host. Waits for the ops' stream.
std::unique_ptr<SlotSource> make_disk_source(const SlotTarget& target, DiskExperts disk,
                                             const HostBank::Tables& tables, MemorySpace& memory,
                                             const Exec& exec);

}  // namespace rocket
