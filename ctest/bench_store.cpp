// bench_store DIR [GIB] [AT_ONCE] [PASSES]: how fast experts come from a slab, beside a plain sequential read of the same
// file past the page cache, in turn in one run.
//
// Writes a slab of experts with the shapes of GLM-5.3-Flash into DIR (13.50 MiB each, 2 GiB by default) and removes it.
// The plain read takes 4 MiB at a time, one after the other and with eight threads; the store takes AT_ONCE experts (8)
// that are drawn at random, and holds each against its checksum. Both go through the same memory again and again.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/arena.h"
#include "base/error.h"
#include "experts/slab_store.h"
#include "experts/slab_writer.h"

using namespace rocket;

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kLeastRoom = 128 << 20;  // more than caches hold

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

ExpertWeights flash_expert() {
  const auto weight = [](int64_t out, int64_t in) {
    return Weight{WeightFormat::kNVFP4, out, in, nullptr, nullptr, 1.0f};
  };
  return {weight(2048, 4096), weight(2048, 4096), weight(4096, 2048)};
}

// Bytes that no file system makes less of.
class NoiseStore : public ExpertStore {
 public:
  const char* name() const override { return "noise"; }
  int32_t pieces() const override { return 1; }
  void fetch(int32_t, int32_t expert, int32_t, const SlotLayout& layout, void* slot) const override {
    std::mt19937_64 rng(static_cast<uint64_t>(expert));
    auto* const words = static_cast<uint64_t*>(slot);
    std::generate(words, words + layout.bytes / 8, std::ref(rng));
  }
};

// Bytes a second of reading the whole file in order.
double plain_read(const std::string& path, int64_t bytes, char* memory, int64_t memory_bytes, int threads) {
  constexpr int64_t kBlock = 4 << 20;
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECT);
  if (fd < 0)
    throw DeviceError(path + ": the file system refuses O_DIRECT: there is nothing to compare with");
  const int64_t places = memory_bytes / kBlock;
  std::vector<std::thread> readers;
  const auto start = Clock::now();
  for (int thread = 0; thread < threads; ++thread) {
    readers.emplace_back([=] {
      for (int64_t at = thread * kBlock; at < bytes; at += threads * kBlock) {
        if (::pread(fd, memory + at / kBlock % places * kBlock, static_cast<size_t>(kBlock), at) <= 0)
          std::abort();
      }
    });
  }
  for (std::thread& reader : readers) reader.join();
  const double seconds = seconds_since(start);
  ::close(fd);
  return static_cast<double>(bytes) / seconds;
}

// The same of every expert once, in an order that was drawn.
double store_read(const SlabStore& store, const SlotLayout& layout, char* slots, int64_t room, size_t at_once,
                  uint64_t seed) {
  std::vector<int32_t> order(static_cast<size_t>(store.header().experts));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
  const size_t places = static_cast<size_t>(room / layout.bytes);
  const auto start = Clock::now();
  for (size_t first = 0; first < order.size(); first += at_once) {
    std::vector<ExpertRead> reads;
    for (size_t i = first; i < std::min(order.size(), first + at_once); ++i)
      reads.push_back({order[i], &layout, slots + static_cast<int64_t>(i % places) * layout.bytes});
    store.fetch_all(0, reads);
  }
  return static_cast<double>(order.size()) * static_cast<double>(layout.bytes) / seconds_since(start);
}

void run(const std::string& dir, double gib, size_t at_once, int passes) {
  const SlotLayout layout = slot_layout(flash_expert());
  const size_t experts = std::max<size_t>(at_once, static_cast<size_t>(gib * (1 << 30) / layout.bytes));
  const std::vector<ExpertWeights> table(experts, flash_expert());
  const std::vector<std::span<const ExpertWeights>> tables{table};
  const SlabHeader header = plan_slab(1, 2, {0}, tables);
  const auto start = Clock::now();
  write_slab(dir, header, NoiseStore(), tables, {});
  std::printf("%zu experts of %.2f MiB, written in %.1f s\n", experts, layout.bytes / 1048576.0,
              seconds_since(start));

  std::string why;
  std::vector<std::unique_ptr<SlabStore>> stores;
  if (auto uring = make_uring_reader(SlabStore::kDepth, &why)) {
    stores.push_back(std::make_unique<SlabStore>(dir, header, std::move(uring)));
  } else {
    std::printf("SKIP  %s\n", why.c_str());
  }
  stores.push_back(std::make_unique<SlabStore>(dir, header, make_thread_reader(SlabStore::kDepth)));
  const int64_t room = std::max(static_cast<int64_t>(at_once) * layout.bytes, kLeastRoom);
  Arena memory(static_cast<size_t>(room), "slots");
  char* const slots = static_cast<char*>(memory.take_bytes(static_cast<size_t>(room)));
  std::vector<double> one, eight;
  std::vector<std::vector<double>> of(stores.size());
  for (int pass = 0; pass < passes; ++pass) {
    one.push_back(plain_read(slab_path(dir), header.file_bytes, slots, room, 1));
    eight.push_back(plain_read(slab_path(dir), header.file_bytes, slots, room, 8));
    for (size_t i = 0; i < stores.size(); ++i)
      of[i].push_back(store_read(*stores[i], layout, slots, room, at_once, static_cast<uint64_t>(pass)));
  }
  const double best = std::max(median(one), median(eight));
  std::printf("plain O_DIRECT, one read at a time     %7.3f GB/s\n", median(one) * 1e-9);
  std::printf("plain O_DIRECT, eight at a time        %7.3f GB/s\n", median(eight) * 1e-9);
  for (size_t i = 0; i < stores.size(); ++i) {
    std::printf("%-26s %2zu experts  %7.3f GB/s  %5.1f %% of the better\n", stores[i]->name(), at_once,
                median(of[i]) * 1e-9, 100 * median(of[i]) / best);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int i, double fallback) { return argc > i ? std::atof(argv[i]) : fallback; };
  if (argc < 2) {
    std::fprintf(stderr, "usage: bench_store DIR [GIB] [AT_ONCE] [PASSES]\n");
    return 2;
  }
  const std::string dir = std::string(argv[1]) + "/rocket-bench-store";
  int status = 0;
  try {
    run(dir, number(2, 2), static_cast<size_t>(number(3, 8)), static_cast<int>(number(4, 5)));
  } catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    status = 1;
  }
  std::filesystem::remove_all(dir);
  return status;
}
