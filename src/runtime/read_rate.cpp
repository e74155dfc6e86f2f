#include "runtime/read_rate.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/arena.h"
#include "runtime/median_rate.h"

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

struct Buffer {
  Arena arena;
  char* data;
  int64_t blocks;

  Buffer(ThreadPool& pool, int64_t bytes)
      : arena(static_cast<size_t>(bytes), "read rate"),
        data(arena.take<char>(bytes)),
        blocks(bytes / kBlock) {
    pool.loop(blocks, 1, [&](int64_t begin, int64_t end, int) {
      std::memset(data + begin * kBlock, 1, static_cast<size_t>((end - begin) * kBlock));
    });
  }
};

// A whole number of pairs of blocks.
int64_t buffer_bytes(int64_t bytes) {
  return std::max<int64_t>(1, (bytes > 0 ? bytes : default_bytes()) / (2 * kBlock)) * 2 * kBlock;
}

}  // namespace

double read_rate_gb_s(ThreadPool& pool, int64_t bytes, double seconds) {
  const Buffer buffer(pool, buffer_bytes(bytes));
  std::atomic<uint64_t> sink{0};
  return median_rate_gb_s(buffer.blocks * kBlock, seconds, [&] {
    pool.loop(buffer.blocks, 16, [&](int64_t begin, int64_t end, int) {
      uint64_t sum = 0;
      for (int64_t i = begin; i < end; ++i) sum += sum_block(buffer.data + i * kBlock);
      sink.fetch_add(sum, std::memory_order_relaxed);
    });
  });
}

double copy_rate_gb_s(ThreadPool& pool, int64_t bytes, double seconds) {
  const Buffer buffer(pool, buffer_bytes(bytes));
  const int64_t half = buffer.blocks / 2;
  return median_rate_gb_s(buffer.blocks * kBlock, seconds, [&] {
    pool.loop(half, 16, [&](int64_t begin, int64_t end, int) {
      std::memcpy(buffer.data + (half + begin) * kBlock, buffer.data + begin * kBlock,
                  static_cast<size_t>((end - begin) * kBlock));
    });
  });
}

}  // namespace rocket
