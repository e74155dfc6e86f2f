// The CUDA half of device.h.
#include <cuda_runtime.h>

#include "runtime/device.h"

namespace rocket {

std::vector<CudaDevice> cuda_devices(std::string* why) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    if (why)
      *why = std::string("no CUDA device: ") + cudaGetErrorName(status) + ", " + cudaGetErrorString(status);
    return {};
  }
  if (count == 0 && why) *why = "no CUDA device was found";
  std::vector<CudaDevice> devices;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
    devices.push_back({properties.name, static_cast<int64_t>(properties.totalGlobalMem),
                       properties.major * 10 + properties.minor, properties.l2CacheSize});
  }
  return devices;
}

}  // namespace rocket
