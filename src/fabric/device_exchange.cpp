#include "fabric/device_exchange.h"

#include "base/error.h"
#include "fabric/staged_exchange.h"

namespace rocket {

Exchange make_exchange(Fabric& fabric, const ExchangeConfig& config, const Exec& exec, MemorySpace& memory) {
  if (exec.cuda) return make_staged_exchange(fabric, config, exec, memory);
  Exchange exchange;
  exchange.rows =
      std::make_unique<RowExchange>(fabric, config.split, config.topk, config.hidden, config.numbers);
  if (config.split_dense) exchange.parts = std::make_unique<PartExchange>(fabric);
  return exchange;
}

#ifndef ROCKET_WITH_CUDA
Exchange make_staged_exchange(Fabric&, const ExchangeConfig&, const Exec&, MemorySpace&) {
  throw DeviceError("boosters: this build has no CUDA support", "use --backend cpu");
}
#endif

}  // namespace rocket
