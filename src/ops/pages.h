// Paged rows of a stream: page p holds rows [p*page_rows, (p+1)*page_rows), each `width` floats.
#pragma once

#include <cstdint>

namespace rocket {

struct PagedRows {
  float* const* page = nullptr;  // [pages]
  int32_t page_rows = 0;
  int32_t width = 0;  // floats a row

  float* row(int64_t index) const { return page[index / page_rows] + (index % page_rows) * width; }
};

}  // namespace rocket
