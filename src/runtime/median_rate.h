// Timing of passes over memory.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

namespace rocket {

// GB/s (10^9 bytes) of passes of `bytes` each: the median of at least three, over about `seconds`.
template <typename Pass>
double median_rate_gb_s(int64_t bytes, double seconds, const Pass& pass) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> rates;
  const Clock::time_point start = Clock::now();
  double elapsed = 0;
  while (rates.size() < 3 || elapsed < seconds) {
    const Clock::time_point begin = Clock::now();
    pass();
    const Clock::time_point end = Clock::now();
    rates.push_back(static_cast<double>(bytes) / std::chrono::duration<double>(end - begin).count() * 1e-9);
    elapsed = std::chrono::duration<double>(end - start).count();
  }
  std::sort(rates.begin(), rates.end());
  return rates[rates.size() / 2];
}

}  // namespace rocket
