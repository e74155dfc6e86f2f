// The CUDA half of device.h.
#include <cuda_runtime.h>

#include <string>

#include "runtime/device.h"

namespace rocket {
namespace {

__global__ void any_kernel() {}

std::string version_words(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// The runtime calls a driver that is not there insufficient, like one that is too old.
std::string why_no_devices(cudaError_t status) {
  int driver = 0, runtime = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = -1;  // unknown; 0 is none
  if (cudaRuntimeGetVersion(&runtime) != cudaSuccess) runtime = 0;
  cudaGetLastError();
  if (driver == 0) return "no CUDA device: no NVIDIA driver was found";
  std::string words =
      std::string("no CUDA device: ") + cudaGetErrorName(status) + ", " + cudaGetErrorString(status);
  if (status == cudaErrorInsufficientDriver && driver > 0 && runtime > 0)
    words +=
        " (driver for CUDA " + version_words(driver) + ", build with CUDA " + version_words(runtime) + ")";
  return words;
}

}  // namespace

// The device stays this thread's: to go back to another would make a context there, too.
bool has_kernels(int32_t device) {
  cudaFuncAttributes attributes{};
  if (cudaSetDevice(device) != cudaSuccess) {
    cudaGetLastError();
    return true;
  }
  const cudaError_t status = cudaFuncGetAttributes(&attributes, any_kernel);
  cudaGetLastError();
  // Only these say that there is no image; whatever else is wrong is said by what uses the device.
  return status != cudaErrorNoKernelImageForDevice && status != cudaErrorInvalidDeviceFunction;
}

std::vector<CudaDevice> cuda_devices(std::string* why) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    if (why) *why = why_no_devices(status);
    return {};
  }
  if (count == 0 && why) *why = "no CUDA device was found";
  std::vector<CudaDevice> devices;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    const cudaError_t known = cudaGetDeviceProperties(&properties, i);
    if (known != cudaSuccess) {  // indices are the runtime's: none may be left out
      if (why) *why = "CUDA device " + std::to_string(i) + ": " + cudaGetErrorString(known);
      return {};
    }
    devices.push_back({properties.name, static_cast<int64_t>(properties.totalGlobalMem),
                       properties.major * 10 + properties.minor, properties.l2CacheSize});
  }
  return devices;
}

}  // namespace rocket
