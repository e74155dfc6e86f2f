#include "runtime/read_rate.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

#include "base/arena.h"

namespace rocket {
namespace {

typedef uint64_t Wide __attribute__((vector_size(64)));

constexpr int64_t kBlock = 1 << 16;  // bytes that a thread reads at a time

uint64_t sum_block(const char* from) {
  Wide sums[4] = {};
  for (int64_t i = 0; i < kBlock; i += sizeof sums) {
    for (int j = 0; j < 4; ++j) {
      Wide v;
      std::memcpy(&v, from + i + j * static_cast<int64_t>(sizeof v), sizeof v);
      sums[j] += v;
    }
  }
  const Wide total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  uint64_t sum = 0;
  for (int i = 0; i < 8; ++i) sum += total[i];
  return sum;
}

int64_t default_bytes() {
  int64_t cache = 0;
#ifdef _SC_LEVEL3_CACHE_SIZE
  cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
  return std::clamp<int64_t>(4 * cache, int64_t{128} << 20, int64_t{1} << 30);
}

}  // namespace

double read_rate_gb_s(ThreadPool& pool, int64_t bytes, double seconds) {
  using Clock = std::chrono::steady_clock;
  const int64_t blocks = std::max<int64_t>(1, (bytes > 0 ? bytes : default_bytes()) / kBlock);
  Arena arena(static_cast<size_t>(blocks * kBlock), "read rate");
  char* buffer = arena.take<char>(blocks * kBlock);
  std::atomic<uint64_t> sink{0};
  pool.loop(blocks, 1, [&](int64_t begin, int64_t end, int) {
    std::memset(buffer + begin * kBlock, 1, static_cast<size_t>((end - begin) * kBlock));
  });
  std::vector<double> rates;
  const Clock::time_point start = Clock::now();
  double elapsed = 0;
  while (rates.size() < 3 || elapsed < seconds) {
    const Clock::time_point pass = Clock::now();
    pool.loop(blocks, 16, [&](int64_t begin, int64_t end, int) {
      uint64_t sum = 0;
      for (int64_t i = begin; i < end; ++i) sum += sum_block(buffer + i * kBlock);
      sink.fetch_add(sum, std::memory_order_relaxed);
    });
    const Clock::time_point now = Clock::now();
    rates.push_back(static_cast<double>(blocks * kBlock) / std::chrono::duration<double>(now - pass).count() *
                    1e-9);
    elapsed = std::chrono::duration<double>(now - start).count();
  }
  std::sort(rates.begin(), rates.end());
  return rates[rates.size() / 2];
}

}  // namespace rocket
