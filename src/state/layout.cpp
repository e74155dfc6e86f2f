#include "state/layout.h"

#include <numeric>

namespace rocket {
namespace {

int64_t padded(int64_t floats) {
  return (floats + 15) / 16 * 16;
}

}  // namespace

int StateLayout::add_recurrent(const std::string& name, const std::vector<int64_t>& shape) {
  RecurrentPart part{name, shape, recurrent_floats_, 1};
  for (const int64_t size : shape) part.floats *= size;
  recurrent_floats_ += padded(part.floats);
  recurrent_.push_back(part);
  return static_cast<int>(recurrent_.size()) - 1;
}

int StateLayout::add_paged(const std::string& name, int32_t tokens_per_row, int32_t width, bool bf16) {
  paged_.push_back({name, tokens_per_row, width, bf16, 0, 0});
  return static_cast<int>(paged_.size()) - 1;
}

void StateLayout::finish() {
  int32_t multiple = 1;
  for (const PagedPart& part : paged_) multiple = std::lcm(multiple, part.tokens_per_row);
  page_tokens_ = (page_tokens_ + multiple - 1) / multiple * multiple;
  page_floats_ = 0;
  for (PagedPart& part : paged_) {
    part.page_rows = page_tokens_ / part.tokens_per_row;
    part.offset = page_floats_;
    page_floats_ += padded((part.page_rows * part.row_bytes() + 3) / 4);
  }
}

double StateLayout::token_bytes() const {
  double bytes = 0;
  for (const PagedPart& part : paged_) bytes += static_cast<double>(part.row_bytes()) / part.tokens_per_row;
  return bytes;
}

}  // namespace rocket
