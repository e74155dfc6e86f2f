#include "fuel/read_ahead.h"

#include <algorithm>
#include <utility>

namespace rocket {

ReadAhead::ReadAhead(std::vector<Range> ranges) : ranges_(std::move(ranges)) {
  reach(0);
}

void ReadAhead::reach(int64_t bytes) {
  while (at_ < ranges_.size() && asked_ < bytes + kAhead) {
    Range& range = ranges_[at_];
    const int64_t step = range.file != nullptr ? std::min(kStep, range.bytes) : range.bytes;
    if (range.file != nullptr) range.file->will_read(range.offset, static_cast<uint64_t>(step));
    range.offset += static_cast<uint64_t>(step);
    range.bytes -= step;
    asked_ += step;
    if (range.bytes == 0) ++at_;
  }
}

}  // namespace rocket
