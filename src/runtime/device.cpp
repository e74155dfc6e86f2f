#include "runtime/device.h"

#include "base/error.h"

namespace rocket {

#ifndef ROCKET_WITH_CUDA
std::vector<CudaDevice> cuda_devices(std::string* why) {
  if (why) *why = "this build has no CUDA support";
  return {};
}
#endif

std::string choose_backend(const std::string& requested) {
  if (requested == "auto" || requested == "cpu") return "cpu";
  if (requested != "cuda") {
    throw InputError("backend: expected auto, cpu or cuda, found '" + requested + "'");
  }
  std::string why = "the engine of this version has no CUDA kernels";
  cuda_devices(&why);
  throw DeviceError("backend cuda: " + why, "use --backend cpu, or auto");
}

}  // namespace rocket
