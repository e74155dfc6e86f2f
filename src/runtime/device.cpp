#include "runtime/device.h"

#include "base/error.h"
#include "runtime/backend.h"

namespace rocket {

#ifndef ROCKET_WITH_CUDA
std::vector<CudaDevice> cuda_devices(std::string* why) {
  if (why) *why = "this build has no CUDA support";
  return {};
}
#endif

std::string choose_backend(const std::string& requested, std::string* choice) {
  if (requested == "cpu") return "cpu";
  if (requested != "auto" && requested != "cuda") {
    throw InputError("backend: expected auto, cpu or cuda, found '" + requested + "'");
  }
  std::string why;
  const std::vector<CudaDevice> devices = cuda_devices(&why);
  if (requested == "cuda") {
    if (devices.empty()) throw DeviceError("backend cuda: " + why, "use --backend cpu, or auto");
    return "cuda";
  }
  if (choice)
    *choice = devices.empty() ? "backend: cpu (" + why + ")" : "backend: cuda (" + devices[0].name + ")";
  return devices.empty() ? "cpu" : "cuda";
}

#ifndef ROCKET_WITH_CUDA
std::unique_ptr<Backend> make_cuda_backend(int, const CudaLimits&) {
  throw DeviceError("backend cuda: this build has no CUDA support", "use --backend cpu, or auto");
}
#endif

}  // namespace rocket
