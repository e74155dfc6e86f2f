#include "experts/device_stream.h"

#include "base/error.h"

#ifndef ROCKET_WITH_CUDA
namespace rocket {
namespace {

[[noreturn]] void no_device() {
  throw DeviceError("expert cache: this build has no CUDA support", "use --backend cpu");
}

}  // namespace

BankMemory pinned_bank_memory() {
  no_device();
}

bool device_shares_memory(const Exec&) {
  return false;
}

DeviceExperts make_device_stream(const CacheConfig&, const HostBank::Tables&, std::unique_ptr<HostBank>,
                                 MemorySpace&, const Exec&, int64_t, SlotCopy) {
  no_device();
}

DeviceExperts make_device_stream(const CacheConfig&, const HostBank::Tables&, SplitExperts, MemorySpace&,
                                 const Exec&, int64_t) {
  no_device();
}

DeviceExperts make_device_stream(const CacheConfig&, const HostBank::Tables&, DiskExperts, MemorySpace&,
                                 const Exec&, int64_t) {
  no_device();
}

}  // namespace rocket
#endif
