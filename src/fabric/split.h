// Which rank owns which routed expert.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace rocket {

struct ExpertSplit {
  int32_t ranks = 1;
  int32_t experts = 0;         // a layer
  std::vector<int32_t> owner;  // [MoE layers, experts]; empty: one rank owns all

  int32_t owner_of(int32_t layer, int32_t expert) const {
    return owner.empty() ? 0
                         : owner[static_cast<size_t>(layer) * static_cast<size_t>(experts) +
                                 static_cast<size_t>(expert)];
  }
  // Experts of a layer that a rank owns.
  int32_t owned(int32_t layer, int32_t rank) const {
    if (owner.empty()) return rank == 0 ? experts : 0;
    const auto first = owner.begin() + static_cast<ptrdiff_t>(layer) * experts;
    return static_cast<int32_t>(std::count(first, first + experts, rank));
  }
};

}  // namespace rocket
