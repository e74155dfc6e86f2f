#include "runtime/device_rates.h"

#include "runtime/device.h"

namespace rocket {

#ifndef ROCKET_WITH_CUDA
std::optional<DeviceRates> device_rates(double, std::string* why) {
  cuda_devices(why);
  return std::nullopt;
}
#endif

}  // namespace rocket
