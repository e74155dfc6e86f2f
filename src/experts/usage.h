// Which experts a run has used, where experts are read in place from the mapped checkpoint.
//
// Counted for each distinct expert of a layer in a step. The first use of an expert is a miss: its bytes come
// from the file (or the page cache). Later uses are hits. Nothing is evicted: the operating system's page
// cache decides.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/engine.h"

namespace rocket {

class ExpertUsage {
 public:
  ExpertUsage(int32_t layers, int32_t experts, int64_t slot_bytes)
      : experts_(experts),
        slot_bytes_(slot_bytes),
        used_(static_cast<size_t>(layers) * static_cast<size_t>(experts)),
        stamp_(static_cast<size_t>(experts)) {}

  // ids: the choices of all rows of a step in one layer; -1 is skipped.
  void count(int32_t layer, const int32_t* ids, int64_t n, EngineStats& stats) {
    ++step_;
    for (int64_t i = 0; i < n; ++i) {
      if (ids[i] < 0 || stamp_[static_cast<size_t>(ids[i])] == step_) continue;
      stamp_[static_cast<size_t>(ids[i])] = step_;
      const size_t slot =
          static_cast<size_t>(layer) * static_cast<size_t>(experts_) + static_cast<size_t>(ids[i]);
      if (used_[slot]) {
        ++stats.expert_hits;
      } else {
        used_[slot] = true;
        ++stats.expert_misses;
        stats.streamed_bytes += slot_bytes_;
      }
    }
  }

 private:
  int32_t experts_;
  int64_t slot_bytes_;
  std::vector<bool> used_;
  std::vector<int64_t> stamp_;
  int64_t step_ = 0;
};

}  // namespace rocket
