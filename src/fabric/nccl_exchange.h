// The exchanges of devices among themselves, through NCCL (device_exchange.h).
#pragma once

#include <string>

#include "fabric/device_exchange.h"

namespace rocket {

struct NcclChance {
  std::string missing;  // what this rank lacks; empty: nothing
  std::string device;   // tells its device from all others
};
NcclChance nccl_chance(const Exec& exec);

// On all ranks, where all have the chance. NCCL starts at the first call and stays for as long as the process: a recorded
// step that calls it may outlive an engine's exchange.
Exchange make_nccl_exchange(Fabric& fabric, const ExchangeConfig& config, const Exec& exec,
                            MemorySpace& memory);

}  // namespace rocket
