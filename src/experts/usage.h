// Which experts a run has used, where experts are read in place from the mapped checkpoint.
//
// Counted for each distinct expert of a layer in a step. The first use of an expert is a miss: its bytes come
// from the file (or the page cache). Later uses are hits. Nothing is evicted: the operating system's page
// cache decides.
#pragma once

#include <cstdint>
#include <vector>

#include "experts/cache.h"

namespace rocket {

class ExpertUsage {
 public:
  ExpertUsage(int32_t layers, int32_t experts)
      : experts_(experts),
        counters_(static_cast<size_t>(layers)),
        used_(static_cast<size_t>(layers) * static_cast<size_t>(experts)),
        stamp_(static_cast<size_t>(experts)) {}

  // ids: the choices of all rows of a step in one layer; -1 is skipped.
  void count(int32_t layer, const int32_t* ids, int64_t n) {
    CacheCounters& counters = counters_[static_cast<size_t>(layer)];
    ++step_;
    for (int64_t i = 0; i < n; ++i) {
      if (ids[i] < 0 || stamp_[static_cast<size_t>(ids[i])] == step_) continue;
      stamp_[static_cast<size_t>(ids[i])] = step_;
      const size_t slot =
          static_cast<size_t>(layer) * static_cast<size_t>(experts_) + static_cast<size_t>(ids[i]);
      if (used_[slot]) {
        ++counters.hits;
      } else {
        used_[slot] = true;
        ++counters.misses;
      }
    }
  }

  const std::vector<CacheCounters>& layer_counters() const { return counters_; }

 private:
  int32_t experts_;
  std::vector<CacheCounters> counters_;
  std::vector<bool> used_;
  std::vector<int64_t> stamp_;
  int64_t step_ = 0;
};

}  // namespace rocket
