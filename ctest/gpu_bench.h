// What the benchmarks of CUDA ops share: times of launches inside a graph, beside the memory's streaming read rate.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "gpu_check.h"
#include "runtime/device_rates.h"

namespace check {

inline int32_t next_measurement() {
  static int32_t number = 0;
  return ++number;
}

// Microseconds for each of `launches` calls issue(0) … issue(launches - 1), recorded as one graph: the median over
// seven replays. For cold weights the calls go through buffers that together are far larger than the L2 cache.
template <typename F>
double time_us(Gpu& gpu, int launches, F issue) {
  rocket::Backend::Key key;  // graphs are kept by key: one of its own for each measurement
  key.first_logit = next_measurement();
  const auto all = [&] {
    for (int i = 0; i < launches; ++i) issue(i);
  };
  for (int warm = 0; warm < 2; ++warm) gpu.backend->run(key, all);  // loads the kernels, then records
  gpu.backend->wait();
  rocket::StageClock& clock = gpu.backend->clock();
  std::vector<double> us;
  for (int pass = 0; pass < 7; ++pass) {
    clock.clear();
    const int begin = clock.mark();
    gpu.backend->run(key, all);
    const int end = clock.mark();
    gpu.backend->wait();
    us.push_back(clock.ms(begin, end) * 1e3 / launches);
  }
  clock.clear();
  std::sort(us.begin(), us.end());
  return us[us.size() / 2];
}

// Bytes a second of a kernel that only reads, over a buffer far larger than the caches.
inline double read_rate(Gpu& gpu) {
  gpu.backend->wait();
  return rocket::device_read_gb_s(0.3) * 1e9;
}

// One line: what it took, what it read and wrote by count, and how that compares with `rate` of read_rate(). Also a
// line of JSON at the end of the file that ROCKET_BENCH_OUT names, if it does.
inline void report(const char* name, double us, double bytes, double rate) {
  const double gb_s = bytes / us * 1e-3;
  std::printf("%-56s %10.2f us  %12.0f bytes  %8.1f GB/s  %5.1f %% of the read rate\n", name, us, bytes, gb_s,
              gb_s * 1e9 / rate * 100);
  std::fflush(stdout);
  const char* path = std::getenv("ROCKET_BENCH_OUT");
  std::FILE* file = path && *path ? std::fopen(path, "a") : nullptr;
  if (!file) return;
  std::fprintf(file, "{\"op\": \"%s\", \"us\": %.3f, \"bytes\": %.0f, \"gb_s\": %.1f, \"fraction\": %.4f}\n",
               name, us, bytes, gb_s, gb_s * 1e9 / rate);
  std::fclose(file);
}

}  // namespace check
