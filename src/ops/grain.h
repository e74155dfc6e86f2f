// How many items of a parallel loop a thread should take at once.
#pragma once

#include <cstdint>

#include "ops/vec.h"

namespace rocket::ROCKET_ISA {

// Starting a loop on other threads costs about as much as touching 8,192 floats in cache, so smaller loops
// stay on the caller. `cost` is the number of floats that one item touches.
ROCKET_INLINE int64_t grain(int64_t cost) {
  constexpr int64_t kWorthAThread = 8192;
  return cost >= kWorthAThread ? 1 : kWorthAThread / (cost > 0 ? cost : 1);
}

}  // namespace rocket::ROCKET_ISA
