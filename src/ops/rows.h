// Rows of a step as ops see them.
#pragma once

#include <cstdint>

#include "ops/host_device.h"

namespace rocket {

// A run of consecutive rows of one stream within a step, positions ascending by one.
struct Segment {
  int32_t first_row;  // index of the run's first row in the step
  int32_t rows;       // > 0; on a device 0 fills up the array, with first_row = all rows of the step
  int64_t position;   // the stream's position (tokens before it) of the first row
};

// One part of several recurrent blocks: item i lies `offset` floats into block[i]. Tests false where there are none;
// an item may be null on its own.
struct BlockParts {
  float* const* block = nullptr;
  int64_t offset = 0;

  ROCKET_HOST_DEVICE explicit operator bool() const { return block != nullptr; }
  ROCKET_HOST_DEVICE float* operator[](int64_t i) const { return block[i] ? block[i] + offset : nullptr; }
};

}  // namespace rocket
