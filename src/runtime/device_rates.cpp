#include "runtime/device_rates.h"

#include "runtime/device.h"

namespace rocket {

#ifndef ROCKET_WITH_CUDA
std::optional<DeviceRates> device_rates(double, std::string* why) {
  cuda_devices(why);
  return std::nullopt;
}

double device_read_gb_s(double) {
  return 0;
}
#endif

}  // namespace rocket
