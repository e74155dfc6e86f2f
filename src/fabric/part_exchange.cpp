#include "fabric/part_exchange.h"

#include <cstring>
#include <vector>

#include "base/error.h"

namespace rocket {

int64_t PartExchange::buffer_floats(int32_t ranks, int64_t rows, int64_t columns) {
  return ranks > 1 ? ranks * (kStampFloats + rows * columns) : 0;
}

void PartExchange::begin_step() {
  ++step_;
  place_ = 0;
}

void PartExchange::check(int32_t rank, const Stamp& found, const Stamp& expected,
                         const std::string& what) const {
  if (found == expected) return;
  const auto shown = [](const Stamp& s) {
    return "place " + std::to_string(s.place) + " of step " + std::to_string(s.step) + ", " +
           std::to_string(s.rows) + " rows of " + std::to_string(s.columns);
  };
  throw DeviceError("boosters: out of step: rank " + std::to_string(fabric_.rank()) + " expected " + what +
                        ", " + shown(expected) + ", from rank " + std::to_string(rank) + ", found " +
                        shown(found),
                    "start the same build of Rocket with the same fuel on all ranks");
}

void PartExchange::swap_blocks(int64_t rows, int64_t columns, float* buffer, const std::string& what) {
  const int32_t me = fabric_.rank(), ranks = fabric_.ranks();
  const int64_t count = rows * columns, bytes = (kStampFloats + count) * static_cast<int64_t>(sizeof(float));
  const auto block = [&](int32_t r) { return part(buffer, r, count) - kStampFloats; };
  std::vector<RowBlock> blocks;  // they are no rows of experts, of which the figures tell
  for (int32_t r = 0; r < ranks; ++r) {
    if (r != me) blocks.push_back({r, 0, block(r), bytes});
  }
  fabric_.receive_rows(blocks, what + " in step " + std::to_string(step_));
  const Stamp stamp{step_, ++place_, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns)};
  std::memcpy(block(me), &stamp, sizeof stamp);
  fabric_.send_rows({me, 0, block(me), bytes});
  fabric_.wait_rows();
  for (int32_t r = 0; r < ranks; ++r) {
    Stamp found{};
    std::memcpy(&found, block(r), sizeof found);
    check(r, found, stamp, what);
  }
}

void PartExchange::swap(const float* mine, int64_t rows, int64_t columns, float* buffer,
                        const std::string& what) {
  const int64_t count = rows * columns;
  std::memcpy(part(buffer, fabric_.rank(), count), mine, static_cast<size_t>(count) * sizeof(float));
  swap_blocks(rows, columns, buffer, what);
}

void PartExchange::sum(float* x, int64_t rows, int64_t columns, float* buffer, const std::string& what) {
  swap(x, rows, columns, buffer, what);
  const int64_t count = rows * columns;
  for (int32_t r = 0; r < fabric_.ranks(); ++r) {
    const float* const from = part(buffer, r, count);
    if (r == 0) {
      std::memcpy(x, from, static_cast<size_t>(count) * sizeof(float));
    } else {
      for (int64_t i = 0; i < count; ++i) x[i] += from[i];
    }
  }
}

void PartExchange::join(const float* mine, int64_t rows, int64_t columns, float* all, float* buffer,
                        const std::string& what) {
  swap(mine, rows, columns, buffer, what);
  const int32_t ranks = fabric_.ranks();
  for (int32_t r = 0; r < ranks; ++r) {
    const float* const from = part(buffer, r, rows * columns);
    for (int64_t row = 0; row < rows; ++row) {
      std::memcpy(all + (row * ranks + r) * columns, from + row * columns,
                  static_cast<size_t>(columns) * sizeof(float));
    }
  }
}

}  // namespace rocket
