// Threads of the host that look experts up together (ops/slot_cache.h), as the block of a kernel does.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdint>
#include <vector>

namespace check {

struct Team {
  explicit Team(int count) : threads(count), barrier(count), partial(static_cast<size_t>(count)) {}
  const int threads;
  std::barrier<> barrier;
  std::vector<int64_t> partial;
};

class HostBlock {
 public:
  HostBlock(Team& team, int thread) : team_(team), thread_(thread) {}
  int thread() const { return thread_; }
  int threads() const { return team_.threads; }
  void sync() { team_.barrier.arrive_and_wait(); }
  int32_t load(const int32_t* p) const { return *p; }
  void mark(uint32_t* word, uint32_t bits) { std::atomic_ref(*word).fetch_or(bits); }
  void add(int32_t* counter, int32_t n) { std::atomic_ref(*counter).fetch_add(n); }
  void add(uint64_t* counter, uint64_t n) { std::atomic_ref(*counter).fetch_add(n); }
  int64_t oldest(int64_t stamp) {
    team_.partial[static_cast<size_t>(thread_)] = stamp;
    sync();
    const int64_t all = *std::min_element(team_.partial.begin(), team_.partial.end());
    sync();
    return all;
  }

 private:
  Team& team_;
  int thread_;
};

}  // namespace check
