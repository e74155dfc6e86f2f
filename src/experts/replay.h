// A recorded routing, step by step through an empty cache of experts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "experts/cache.h"

namespace rocket {

struct RoutingView {
  const int32_t* ids = nullptr;        // [rows, layers, topk]; -1 is skipped
  std::span<const int64_t> step_ends;  // the row after each step's last; never falls
  int32_t layers = 0, topk = 0;
};

struct ReplayCounts {
  std::vector<int32_t> lookups, misses;  // [steps, layers], of distinct experts
  std::vector<CacheCounters> layers;
  int32_t slots = 0;  // delivered
};

// config.policy may be belady here. Throws PlanError, InputError.
ReplayCounts replay(const RoutingView& routing, const CacheConfig& config);

}  // namespace rocket
