#include "runtime/device.h"

#include "base/error.h"
#include "runtime/backend.h"

namespace rocket {
namespace {

#ifdef ROCKET_WITH_CUDA
constexpr const char* kNoDeviceHint =
    "see whether nvidia-smi finds a device, and whether CUDA_VISIBLE_DEVICES hides it; or use --backend cpu, "
    "or auto";
#else
constexpr const char* kNoSupport = "this build has no CUDA support";
constexpr const char* kNoDeviceHint =
    "use --backend cpu, or auto; or build with CUDA: pip install . -C cmake.define.ROCKET_CUDA=ON "
    "(README.md, On an NVIDIA GPU)";
#endif

}  // namespace

#ifndef ROCKET_WITH_CUDA
std::vector<CudaDevice> cuda_devices(std::string* why) {
  if (why) *why = kNoSupport;
  return {};
}
bool has_kernels(int32_t) {
  return false;
}
#endif

std::string choose_backend(const std::string& requested, int32_t device, std::string* choice) {
  if (requested == "cpu") return "cpu";
  if (requested != "auto" && requested != "cuda") {
    throw InputError("backend: expected auto, cpu or cuda, found '" + requested + "'");
  }
  std::string why;
  const std::vector<CudaDevice> devices = cuda_devices(&why);
  bool usable = !devices.empty();
  const CudaDevice found = usable ? devices[static_cast<size_t>(device) % devices.size()] : CudaDevice{};
  if (usable && !has_kernels(device)) {
    usable = false;
    why = "this build has no kernels for " + found.name + ", sm_" + std::to_string(found.arch);
  }
  if (requested == "cuda") {
    if (!usable) {
      throw DeviceError("backend cuda: " + why,
                        devices.empty()
                            ? kNoDeviceHint
                            : "build with ROCKET_CUDA_ARCHS=native there, or all; or use --backend cpu");
    }
    return "cuda";
  }
  if (choice) *choice = usable ? "backend: cuda (" + found.name + ")" : "backend: cpu (" + why + ")";
  return usable ? "cuda" : "cpu";
}

#ifndef ROCKET_WITH_CUDA
std::unique_ptr<Backend> make_cuda_backend(int, const CudaLimits&) {
  throw DeviceError(std::string("backend cuda: ") + kNoSupport, kNoDeviceHint);
}
#endif

}  // namespace rocket
