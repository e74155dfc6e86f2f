// Parallel loops over items of known cost.
#pragma once

#include <cstdint>

#include "ops/exec.h"
#include "ops/vec.h"

namespace rocket::ROCKET_ISA {

// Items that a thread takes at once, at least, where each touches `cost` floats. Waking a thread costs about
// as much as touching 16,384 floats in cache, so a loop that is worth less than two threads stays on the
// caller.
ROCKET_INLINE int64_t grain(int64_t items, int64_t cost) {
  constexpr int64_t kWorthAThread = 16384;
  if (cost < 1) cost = 1;
  if (items * cost < 2 * kWorthAThread) return items;
  return cost < kWorthAThread ? kWorthAThread / cost : 1;
}

// Calls f(begin, end, thread) on ranges that cover [0, items).
template <typename F>
ROCKET_INLINE void parallel(Exec& exec, int64_t items, int64_t cost, F&& f) {
  exec.pool->loop(items, grain(items, cost), f);
}

}  // namespace rocket::ROCKET_ISA
