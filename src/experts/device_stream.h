// Experts in slots of a device's memory; those without one in a bank in the host's memory that the device reads itself, or
// on a disk from which a thread of the host brings them (ops/slot_mail.h). A bank has all experts, or, where host and
// device hold the model only together, exactly those without a slot, which the device writes back itself.
//
// The router looks its choices up (ops/slot_cache.h), so a step is the same sequence of launches whatever is missing, and
// can be recorded. From find() on, what fits beside the hits comes in on a stream of its own, while the ops of wave 0 work
// on the hits; wave 1 waits for it. The number of waves depends on the number of choices only; those that find nothing to
// do end at once.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/memory_space.h"
#include "experts/host_bank.h"
#include "experts/stream.h"
#include "ops/slot_fetch.h"

namespace rocket {

// Pinned memory for a bank.
BankMemory pinned_bank_memory();
// Whether the device's memory is the host's: then experts in a bank are where a device reads them as they are, and a cache
// of them would be a second copy. ROCKET_ONE_MEMORY=1 says so of any device, for tests.
bool device_shares_memory(const Exec& exec);

struct DeviceExperts {
  std::unique_ptr<ExpertStream> stream;
  std::vector<const ExpertWeights*> tables;  // of each layer, in the device's memory
};

// Experts that are read once, from `store` in this order, into slots and a bank of the others.
struct SplitExperts {
  std::unique_ptr<ExpertStore> store;
  std::vector<BankPiece> order;
  HostBank::Progress progress;
};

// Experts that stay on a disk.
struct DiskExperts {
  std::unique_ptr<ExpertStore> store;
  std::vector<int32_t> numbers;  // the model's of each MoE layer, for errors
  std::chrono::nanoseconds limit = expert_read_limit();
};

// tables: of each MoE layer, for formats, shapes and global scales. choices: of all rows of a step in a layer, at most.
// memory and exec are a backend's, which outlives the stream. Takes SlotState's bytes and those of the slots; from a disk
// also pinned memory of the host, SlotServer's staging.
DeviceExperts make_device_stream(const CacheConfig& config, const HostBank::Tables& tables,
                                 std::unique_ptr<HostBank> bank, MemorySpace& memory, const Exec& exec,
                                 int64_t choices, SlotCopy copy = kSlotCopy);
DeviceExperts make_device_stream(const CacheConfig& config, const HostBank::Tables& tables,
                                 SplitExperts split, MemorySpace& memory, const Exec& exec, int64_t choices);
DeviceExperts make_device_stream(const CacheConfig& config, const HostBank::Tables& tables, DiskExperts disk,
                                 MemorySpace& memory, const Exec& exec, int64_t choices);

}  // namespace rocket
