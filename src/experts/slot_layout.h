// How an expert lies in a slot: gate, up and down's data, then their block scales, each part aligned to 256 bytes.
// Slots have one layout wherever they are, so that an expert moves between them as one piece. Global scales are no
// part of a slot: they stay in the table of experts.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "ops/experts.h"

namespace rocket {

struct SlotLayout {
  // Of gate, up and down: where its data and block scales start in the slot, and their bytes (0: none).
  std::array<int64_t, 3> data_at{}, data_bytes{};
  std::array<int64_t, 3> scale_at{}, scale_bytes{};
  int64_t bytes = 0;  // of all parts, aligned

  int64_t stored_bytes() const;  // without padding
};

// Of an expert with these formats and shapes.
SlotLayout slot_layout(const ExpertWeights& expert);

// Points the expert's weights into a slot; null: nowhere.
void place_in_slot(const SlotLayout& layout, void* slot, ExpertWeights* expert);

}  // namespace rocket
