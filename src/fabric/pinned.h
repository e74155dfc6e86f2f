// What an exchange between ranks has in pinned memory. For .cu files.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <string>

#include "base/memory.h"
#include "ops/cuda.cuh"

namespace rocket {

// Zeroed memory of the host that the device knows. It is the process's own, pinned afterwards: MPI libraries read blocks
// out of another process's memory, which the kernel need not allow where a driver has mapped it.
class Pinned {
 public:
  explicit Pinned(int64_t bytes)
      : bytes_(static_cast<size_t>((std::max<int64_t>(bytes, 1) + 4095) / 4096 * 4096)) {
    host_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (host_ == MAP_FAILED) refuse();
    const cudaError_t status =
        cudaHostRegister(host_, bytes_, cudaHostRegisterMapped | cudaHostRegisterPortable);
    if (status != cudaSuccess) {
      munmap(host_, bytes_);
      cudaGetLastError();
      if (status == cudaErrorMemoryAllocation) refuse();
      cuda_check(status, "boosters: pinned memory");
    }
    cuda_check(cudaHostGetDevicePointer(&device_, host_, 0), "boosters: pinned memory");
  }
  ~Pinned() {
    if (kept_) return;
    cudaHostUnregister(host_);
    munmap(host_, bytes_);
  }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  void keep() { kept_ = true; }  // a message that failed may still be written there: never give it back
  template <typename T>
  T* host() const {
    return static_cast<T*>(host_);
  }
  template <typename T>
  T* device() const {
    return static_cast<T*>(device_);
  }

 private:
  [[noreturn]] void refuse() const {
    throw PlanError("boosters: the system refused " + format_bytes(static_cast<int64_t>(bytes_)) +
                        " of pinned memory for what crosses between ranks",
                    "free memory, raise the container's limit of locked memory, or lower --prefill-chunk");
  }

  size_t bytes_;
  void* host_ = nullptr;
  void* device_ = nullptr;
  bool kept_ = false;
};

}  // namespace rocket
