// The CUDA half of device_rates.h.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "base/error.h"
#include "runtime/device.h"
#include "runtime/device_rates.h"
#include "runtime/median_rate.h"

namespace rocket {
namespace {

constexpr int64_t kMostBytes = int64_t{4} << 30;    // of a device buffer
constexpr int64_t kLinkBytes = int64_t{256} << 20;  // of a transfer
constexpr int64_t kCaches = 8;                      // least size of a device buffer, in L2 caches
constexpr int kThreads = 512;
constexpr int kUnroll = 8;

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw DeviceError(std::string("measuring the device: ") + what + ": " + cudaGetErrorName(status) + ", " +
                        cudaGetErrorString(status),
                    "see whether nvidia-smi finds the device idle and well");
}

struct FreeDevice {
  void operator()(void* p) const { cudaFree(p); }
};
struct FreeHost {
  void operator()(void* p) const { cudaFreeHost(p); }
};

std::unique_ptr<void, FreeDevice> device_buffer(int64_t bytes) {
  void* p = nullptr;
  check(cudaMalloc(&p, static_cast<size_t>(bytes)), "cudaMalloc");
  return std::unique_ptr<void, FreeDevice>(p);
}

std::unique_ptr<void, FreeHost> pinned_buffer(int64_t bytes) {
  void* p = nullptr;
  check(cudaMallocHost(&p, static_cast<size_t>(bytes)), "cudaMallocHost");
  return std::unique_ptr<void, FreeHost>(p);
}

// Random words, the lowest bit of each set: memory may store and move zeros for less. (The finalizer of MurmurHash3.)
__global__ void __launch_bounds__(kThreads) fill_kernel(uint32_t* to, int64_t count) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    uint32_t h = static_cast<uint32_t>(i) + 1;
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    to[i] = (h ^ h >> 16) | 1;
  }
}

// The union of all bits is written only if it has a value that it never has, so that the loads cannot be left out.
__global__ void __launch_bounds__(kThreads)
    read_kernel(const uint4* __restrict__ from, int64_t count, uint32_t never, uint32_t* sink) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  uint32_t bits = 0;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += kUnroll * stride) {
    uint4 v[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      v[j] = i + j * stride < count ? __ldcs(from + i + j * stride) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) bits |= v[j].x | v[j].y | v[j].z | v[j].w;
  }
  if (bits == never) *sink = bits;
}

// The first pass pays for what is set up on demand. A pass returns when the device has finished.
template <typename Pass>
double rate(int64_t bytes, double seconds, const Pass& pass) {
  pass();
  return median_rate_gb_s(bytes, seconds, pass);
}

void finish() {
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

int64_t repeats_of(int64_t bytes) {  // a pass far outlasts its launch
  return std::max<int64_t>(1, (int64_t{16} << 30) / bytes);
}

constexpr uint32_t kNever = 2;  // no union of words that fill_kernel wrote

void fill(void* buffer, int64_t bytes, int processors) {
  fill_kernel<<<static_cast<unsigned>(processors * 4), kThreads>>>(static_cast<uint32_t*>(buffer), bytes / 4);
  check(cudaGetLastError(), "fill kernel");
  finish();
}

double measure_read(const void* buffer, int64_t bytes, int processors, double seconds) {
  const auto sink = device_buffer(4);
  const int64_t repeats = repeats_of(bytes);
  return rate(bytes * repeats, seconds, [&] {
    for (int64_t i = 0; i < repeats; ++i) {
      read_kernel<<<static_cast<unsigned>(processors * 4), kThreads>>>(
          static_cast<const uint4*>(buffer), bytes / 16, kNever, static_cast<uint32_t*>(sink.get()));
    }
    check(cudaGetLastError(), "read kernel");
    finish();
  });
}

double measure_copy(void* buffer, int64_t bytes, double seconds) {
  const int64_t repeats = repeats_of(bytes);
  const size_t half = static_cast<size_t>(bytes / 2);
  return rate(bytes * repeats, seconds, [&] {
    for (int64_t i = 0; i < repeats; ++i) {
      check(cudaMemcpyAsync(static_cast<char*>(buffer) + half, buffer, half, cudaMemcpyDeviceToDevice),
            "copy");
    }
    finish();
  });
}

void measure_link(int64_t bytes, double seconds, DeviceRates& out) {
  const size_t size = static_cast<size_t>(bytes);
  const auto buffer = device_buffer(bytes);
  const auto transfer = [&](void* to, const void* from, cudaMemcpyKind kind) {
    return rate(bytes, seconds, [&] {
      check(cudaMemcpyAsync(to, from, size, kind), "transfer");
      finish();
    });
  };
  {
    const auto pinned = pinned_buffer(bytes);
    std::memset(pinned.get(), 1, size);
    out.pinned_to_gb_s = transfer(buffer.get(), pinned.get(), cudaMemcpyHostToDevice);
    out.pinned_from_gb_s = transfer(pinned.get(), buffer.get(), cudaMemcpyDeviceToHost);
  }
  const std::vector<char> pageable(size, 1);
  out.pageable_to_gb_s = transfer(buffer.get(), pageable.data(), cudaMemcpyHostToDevice);
}

// How many bytes a buffer to measure with takes: an eighth of what is free, more where the L2 cache would hold much of
// that.
int64_t buffer_bytes(int64_t free_bytes, int64_t l2_bytes) {
  constexpr int64_t kStep = 1 << 20;
  const int64_t least = std::max(kStep, (kCaches * l2_bytes + kStep - 1) / kStep * kStep);
  const int64_t most = free_bytes / 2 / kStep * kStep;
  if (most < least) {
    throw DeviceError("measuring the device: expected a buffer of at least " + std::to_string(least) +
                          " bytes, " + std::to_string(kCaches) + " L2 caches, found room for " +
                          std::to_string(most) + ", half of what is free",
                      "free device memory");
  }
  return std::max(std::min(kMostBytes, free_bytes / 8) / kStep * kStep, least);
}

// The device's properties, and how many bytes a buffer to measure with takes.
int64_t open_device(cudaDeviceProp& properties, DeviceRates& out) {
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  check(cudaSetDevice(0), "cudaSetDevice");
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  out.name = properties.name;
  out.unified = properties.integrated != 0;
  out.total_bytes = static_cast<int64_t>(total);
  out.free_bytes = static_cast<int64_t>(free);
  return buffer_bytes(out.free_bytes, properties.l2CacheSize);
}

}  // namespace

std::optional<DeviceRates> device_rates(double seconds, std::string* why) {
  if (cuda_devices(why).empty()) return std::nullopt;
  cudaDeviceProp properties{};
  DeviceRates out;
  const int64_t bytes = open_device(properties, out);
  {
    const auto buffer = device_buffer(bytes);
    fill(buffer.get(), bytes, properties.multiProcessorCount);
    out.read_gb_s = measure_read(buffer.get(), bytes, properties.multiProcessorCount, seconds);
    out.copy_gb_s = measure_copy(buffer.get(), bytes, seconds);
  }
  measure_link(std::min(kLinkBytes, bytes), seconds, out);
  return out;
}

double device_read_gb_s(double seconds) {
  if (cuda_devices().empty()) return 0;
  cudaDeviceProp properties{};
  DeviceRates about;
  const int64_t bytes = open_device(properties, about);
  const auto buffer = device_buffer(bytes);
  fill(buffer.get(), bytes, properties.multiProcessorCount);
  return measure_read(buffer.get(), bytes, properties.multiProcessorCount, seconds);
}

}  // namespace rocket
