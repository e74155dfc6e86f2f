// Paged rows of a stream: page p holds rows [p*page_rows, (p+1)*page_rows) of a part, from `offset` floats into the
// page on, each `width` wide.
#pragma once

#include <cstdint>

#include "ops/host_device.h"

namespace rocket {

struct PagedRows {
  float* const* page = nullptr;  // [pages]
  int64_t offset = 0;            // floats from the start of a page
  int32_t page_rows = 0;
  int32_t width = 0;  // elements a row

  ROCKET_HOST_DEVICE float* row(int64_t index) const {
    return page[index / page_rows] + offset + (index % page_rows) * width;
  }
  // The same where rows are stored as bfloat16.
  ROCKET_HOST_DEVICE uint16_t* row_bf16(int64_t index) const {
    return reinterpret_cast<uint16_t*>(page[index / page_rows] + offset) + (index % page_rows) * width;
  }
};

// One part of several streams.
struct PagedParts {
  float* const* const* table = nullptr;  // [segments] page tables
  int64_t offset = 0;
  int32_t page_rows = 0;
  int32_t width = 0;
  bool bf16 = false;  // else float32; the CPU's ops take float32 only

  ROCKET_HOST_DEVICE PagedRows operator[](int64_t segment) const {
    return {table[segment], offset, page_rows, width};
  }
};

}  // namespace rocket
