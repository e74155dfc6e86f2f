// Weights to ask for ahead of the op that reads them, into a cache that both share. Changes no result; a backend without
// use for it leaves it alone.
#pragma once

#include "ops/weight.h"

namespace rocket {

struct Ahead {
  static constexpr int kMaxWeights = 4;
  Weight weight[kMaxWeights];  // in the order in which they will be read
  int32_t weights = 0;
  int64_t max_bytes = 0;  // of all of them together, from the first one's beginning on
};

}  // namespace rocket
