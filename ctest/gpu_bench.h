// What the benchmarks of CUDA ops share: times of launches inside a graph, beside the memory's streaming read rate.
#pragma once

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "bench_results.h"
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

inline const rocket::CudaDevice& device() {
  static const rocket::CudaDevice device = rocket::cuda_devices().at(0);
  return device;
}

// How many sets of buffers launches take in turn, so that what one reads has left the L2 cache when its set comes again:
// what launches read of all sets is four L2 caches, unless that takes too much memory or too many launches.
struct Turns {
  static constexpr int64_t kCaches = 4, kMostLaunches = 4096, kMostBytes = int64_t{8} << 30;

  // `read`: bytes of a set that a launch reads. `size`: bytes of a set in memory. `least`: launches to time.
  Turns(double read, double size, int least) : read(read) {
    const double wanted = read > 0 ? std::ceil(static_cast<double>(kCaches * device().l2_bytes) / read)
                                   : 0.0;  // 0: none would do
    const double room = static_cast<double>(std::min(kMostBytes, device().total_bytes / 4)) / size;
    const double most = std::min(static_cast<double>(kMostLaunches), room);
    sets = static_cast<int>(std::max(2.0, std::min(wanted, most)));
    launches = (least + sets - 1) / sets * sets;  // a replay begins where the one before has ended
  }
  explicit Turns(double read, int least = 24) : Turns(read, read, least) {}
  // As many turns of launches that read less of a set.
  Turns reading(double less) const {
    Turns turns = *this;
    turns.read = less;
    return turns;
  }
  double all() const { return read * sets; }
  bool cold() const { return all() >= static_cast<double>(kCaches * device().l2_bytes); }

  double read;
  int sets, launches;
};

// A block of `size` bytes on the device for each set, all filled with the same values over and over.
class Blocks {
 public:
  template <typename T>
  Blocks(Gpu& gpu, int64_t size, int sets, const std::vector<T>& values)
      : gpu_(gpu), stride_((size + 255) / 256 * 256), sets_(sets) {
    const size_t total = static_cast<size_t>(stride_ * sets_);
    base_ = static_cast<char*>(gpu.memory().allocate(total, "benchmark's blocks"));
    size_t filled = std::min(total, values.size() * sizeof(T));
    gpu.memory().write(base_, values.data(), filled);
    for (size_t part = filled; filled < total; filled += part) {
      part = std::min(filled, total - filled);
      gpu.memory().copy(base_ + filled, base_, part);
    }
  }
  ~Blocks() { gpu_.memory().release(base_); }
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;

  template <typename T = float>
  T* at(int launch) const {
    return reinterpret_cast<T*>(base_ + launch % sets_ * stride_);
  }
  float* operator[](int launch) const { return at(launch); }

 private:
  Gpu& gpu_;
  int64_t stride_;
  int sets_;
  char* base_ = nullptr;
};

// One line: what it took, what it read and wrote by count, and how that compares with `rate` of read_rate(); of launches
// that take turns, also where these are too few for cold buffers. The same as a line of results.
inline void report(const char* name, double us, double bytes, double rate, const Turns* turns = nullptr) {
  const double gb_s = bytes / us * 1e-3;
  std::printf("%-56s %10.2f us  %12.0f bytes  %8.1f GB/s  %5.1f %% of the read rate", name, us, bytes, gb_s,
              gb_s * 1e9 / rate * 100);
  ResultLine line;
  line.add("op", name).add("us", us).add("bytes", bytes).add("gb_s", gb_s).add("fraction", gb_s * 1e9 / rate);
  if (turns) {
    if (!turns->cold()) {
      std::printf("  NOT COLD: %d launches read %.1f MB in turn, %d L2 caches are %.1f MB", turns->sets,
                  turns->all() * 1e-6, static_cast<int>(Turns::kCaches),
                  static_cast<double>(Turns::kCaches * device().l2_bytes) * 1e-6);
    }
    line.add("cold", turns->cold()).add("turns", turns->sets).add("turns_bytes", turns->all());
    line.add("l2_bytes", device().l2_bytes);
  }
  std::printf("\n");
  std::fflush(stdout);
  line.append();
}

}  // namespace check
