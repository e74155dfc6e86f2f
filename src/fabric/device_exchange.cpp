#include "fabric/device_exchange.h"

#include "base/error.h"
#include "fabric/nccl_exchange.h"
#include "fabric/parcel.h"
#include "fabric/staged_exchange.h"

namespace rocket {
namespace {

// Empty: all ranks can take NCCL. Else why not, the same on all of them.
std::string why_no_nccl(Fabric& fabric, const Exec& exec) {
  const NcclChance mine = nccl_chance(exec);
  ParcelWriter parcel;
  parcel.text(mine.missing);
  parcel.text(mine.device);
  const std::vector<std::string> all = fabric.gather(parcel.data(), "whether it has NCCL");
  if (fabric.rank() != 0) return fabric.hear("whether all ranks have NCCL");
  std::string why;
  std::vector<std::string> devices;
  for (const std::string& message : all) {
    ParcelReader reader(message);
    const std::string missing = reader.text();
    devices.push_back(reader.text());
    const std::string who = "rank " + std::to_string(devices.size() - 1);
    if (why.empty() && !missing.empty()) why = who + ": " + missing;
    for (size_t r = 0; r + 1 < devices.size() && why.empty(); ++r) {
      if (devices[r] == devices.back())
        why = "rank " + std::to_string(r) + " and " + who + " share a GPU, which NCCL does not take";
    }
  }
  fabric.tell(why);
  return why;
}

}  // namespace

Exchange make_exchange(Fabric& fabric, const ExchangeConfig& config, const Exec& exec, MemorySpace& memory) {
  Exchange exchange;
  if (!exec.cuda) {
    exchange.rows =
        std::make_unique<RowExchange>(fabric, config.split, config.topk, config.hidden, config.numbers);
    if (config.split_dense) exchange.parts = std::make_unique<PartExchange>(fabric);
    return exchange;
  }
  const std::string why = why_no_nccl(fabric, exec);
  if (why.empty()) return make_nccl_exchange(fabric, config, exec, memory);
  exchange = make_staged_exchange(fabric, config, exec, memory);
  exchange.about = "rows through pinned memory (" + why + ")";
  return exchange;
}

#ifndef ROCKET_WITH_CUDA
namespace {

[[noreturn]] void no_device() {
  throw DeviceError("boosters: this build has no CUDA support", "use --backend cpu");
}

}  // namespace

Exchange make_staged_exchange(Fabric&, const ExchangeConfig&, const Exec&, MemorySpace&) {
  no_device();
}

NcclChance nccl_chance(const Exec&) {
  no_device();
}

Exchange make_nccl_exchange(Fabric&, const ExchangeConfig&, const Exec&, MemorySpace&) {
  no_device();
}
#endif

}  // namespace rocket
