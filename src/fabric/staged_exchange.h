// The exchanges of a device, through pinned memory of the host (device_exchange.h).
#pragma once

#include "fabric/device_exchange.h"

namespace rocket {

Exchange make_staged_exchange(Fabric& fabric, const ExchangeConfig& config, const Exec& exec,
                              MemorySpace& memory);

}  // namespace rocket
