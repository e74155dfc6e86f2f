// Which expert makes way when a cache of experts is full. A policy orders the slots of each group; slots of
// different groups never compete. A group is one layer where every layer has a budget, else all layers.
//
//   lru     the least recently used
//   lfu     the least often used since the start (uses are remembered of absent experts too), then lru
//   lfru    the least often used of late: as lfu, with every count halved from time to time
//   belady  the one whose next use is farthest away: the fewest misses there can be. Needs the future
//
// Integers only, and every tie is broken: the same calls give the same victims on every machine.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace rocket {

// What a policy has to know about the cache that asks it.
struct PolicyShape {
  int32_t groups = 0;
  int32_t slots = 0;           // of all groups
  int32_t keys = 0;            // layer * experts + expert
  int32_t keys_per_group = 0;  // key / keys_per_group is its group
  int32_t layers_per_group = 1;
};

// Slots that must stay: those whose mark is at least `floor`. Marks only grow.
struct SlotGuard {
  const int64_t* mark;
  int64_t floor;
  bool holds(int32_t slot) const { return mark[slot] >= floor; }
};

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  virtual void begin(int32_t /*group*/) {}                     // a layer is about to be looked up
  virtual void hold(int32_t /*group*/, int32_t /*slot*/) {}    // marked anew without a use, which may follow
  virtual void retire(int32_t /*group*/, int32_t /*slot*/) {}  // makes way before all that were not retired
  virtual void insert(int32_t group, int32_t slot,
                      int32_t key) = 0;               // a free slot was filled, by demand or a hint
  virtual void use(int32_t group, int32_t slot) = 0;  // demanded: once a look-up
  virtual void remove(int32_t group, int32_t slot) = 0;
  virtual int32_t victim(int32_t group, const SlotGuard& guard) const = 0;  // -1: every slot is guarded
};

// lru, lfu or lfru. Throws InputError for any other name.
std::unique_ptr<EvictionPolicy> make_policy(const std::string& name, const PolicyShape& shape);

// uses[key]: ascending numbers of the look-ups (0 = the cache's first resolve) that will ask for the key.
std::unique_ptr<EvictionPolicy> make_belady(const PolicyShape& shape, std::vector<std::vector<int64_t>> uses);

}  // namespace rocket
