// From what a user asks of the cache of experts to its slots: integers only, before any of it is allocated.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "experts/cache.h"

namespace rocket {

// At most one of the three; none: no cache.
struct CacheRequest {
  int64_t bytes = 0;
  int64_t slots = 0;                 // of all layers together
  std::vector<int64_t> layer_slots;  // of each MoE layer
  bool given() const { return bytes != 0 || slots != 0 || !layer_slots.empty(); }
};

struct CacheBudget {
  CacheConfig config;                                // with slots as asked
  int64_t slot_bytes = 0;                            // of one slot
  int64_t requested_slots = 0, requested_bytes = 0;  // before any cut
  int64_t slots = 0;                                 // delivered
  int64_t bytes() const { return slots * slot_bytes; }
  std::string about;  // one line for people
};

// shape: layers, experts, top-k and, of one of several boosters, owned. numbers: the model's of its MoE layers. Throws InputError (numbers that cannot be),
// PlanError (fewer slots than one token needs, with the fewest that work).
CacheBudget plan_cache(const CacheRequest& request, const CacheConfig& shape, int64_t slot_bytes,
                       const std::vector<int32_t>& numbers);

}  // namespace rocket
