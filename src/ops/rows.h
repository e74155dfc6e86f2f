// Rows of a step as ops see them.
#pragma once

#include <cstdint>

namespace rocket {

// A run of consecutive rows of one stream within a step, positions ascending by one.
struct Segment {
  int32_t first_row;  // index of the run's first row in the step
  int32_t rows;       // > 0
  int64_t position;   // the stream's position (tokens before it) of the first row
};

}  // namespace rocket
