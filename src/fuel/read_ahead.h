// Asks the system for what will be read next from files, while what comes before it is read. One thread that reads and works
// in turn, or several that wait for each other, else leave a disk without work again and again.
#pragma once

#include <cstdint>
#include <vector>

#include "fuel/safetensors.h"

namespace rocket {

class ReadAhead {
 public:
  struct Range {
    const SafetensorsFile* file = nullptr;  // null: these bytes are not asked for
    uint64_t offset = 0;
    int64_t bytes = 0;
  };

  // In the order in which they will be read.
  explicit ReadAhead(std::vector<Range> ranges);

  // So many bytes of the ranges are read, in all, or about to be.
  void reach(int64_t bytes);

 private:
  static constexpr int64_t kAhead = int64_t{256} << 20, kStep = int64_t{8} << 20;

  std::vector<Range> ranges_;
  size_t at_ = 0;      // the range that is asked for
  int64_t asked_ = 0;  // bytes of all ranges
};

}  // namespace rocket
