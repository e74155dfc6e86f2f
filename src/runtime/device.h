// Which accelerators there are, and which backend a run takes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace rocket {

struct CudaDevice {
  std::string name;
  int64_t total_bytes = 0;
  int arch = 0;  // 90 for sm_90, 121 for sm_121
  int64_t l2_bytes = 0;
};

// The NVIDIA devices that this build can see; empty without CUDA support, driver or device. `why` says why it
// is empty.
std::vector<CudaDevice> cuda_devices(std::string* why = nullptr);

// Whether this build has kernels for a device. Makes a context there, as using it would.
bool has_kernels(int32_t device);

// "cpu" or "cuda" from "auto", "cpu" or "cuda". `choice` gets a line that says what auto chose and why, else nothing.
// `device` is the one to be used. Throws InputError for another word, DeviceError where "cuda" cannot be.
std::string choose_backend(const std::string& requested, int32_t device, std::string* choice = nullptr);

}  // namespace rocket
