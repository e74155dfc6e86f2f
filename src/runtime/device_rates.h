// What an accelerator's memory and its link to the host can do, measured.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace rocket {

struct DeviceRates {
  std::string name;
  bool unified = false;         // CPU and accelerator share one memory
  int64_t total_bytes = 0;      // what the driver says there is
  int64_t free_bytes = 0;       // what it would give; counts clean page cache as used where memory is unified
  double read_gb_s = 0;         // a kernel reads a buffer of random bytes, at least eight L2 caches
  double copy_gb_s = 0;         // within the memory, bytes read and written
  double pinned_to_gb_s = 0;    // from page-locked host memory to the device
  double pageable_to_gb_s = 0;  // from ordinary host memory
  double pinned_from_gb_s = 0;  // back
};

// Rates in GB/s (10^9 bytes), each the median of passes over about `seconds`. Nothing without CUDA support or
// a device; `why` then says which. Throws DeviceError if the device fails, or its free memory is too little to
// measure past its caches.
std::optional<DeviceRates> device_rates(double seconds, std::string* why = nullptr);

// DeviceRates::read_gb_s alone, for benchmarks; 0 without a device.
double device_read_gb_s(double seconds);

}  // namespace rocket
