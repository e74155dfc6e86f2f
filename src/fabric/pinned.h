// What an exchange between ranks has in pinned memory. For .cu files.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#include "base/memory.h"
#include "ops/cuda.cuh"

namespace rocket {

// Pinned memory of the host that the device knows.
class Pinned {
 public:
  explicit Pinned(int64_t bytes) {
    const auto size = static_cast<size_t>(std::max<int64_t>(bytes, 64));
    const cudaError_t status = cudaHostAlloc(&host_, size, cudaHostAllocMapped | cudaHostAllocPortable);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw PlanError("boosters: the system refused " + format_bytes(bytes) +
                          " of pinned memory for what crosses between ranks",
                      "free memory, raise the container's limit of locked memory, or lower --prefill-chunk");
    }
    cuda_check(status, "boosters");
    std::memset(host_, 0, size);
    cuda_check(cudaHostGetDevicePointer(&device_, host_, 0), "boosters");
  }
  ~Pinned() {
    if (!kept_) cudaFreeHost(host_);
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
  void* host_ = nullptr;
  void* device_ = nullptr;
  bool kept_ = false;
};

}  // namespace rocket
