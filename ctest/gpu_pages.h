// Paged rows of streams and their segments on a device, for tests and benchmarks of ops that use them.
#pragma once

#include "gpu_check.h"
#include "ops_check.h"

namespace check {

// Pages of one stream, each a guarded allocation of its own; the part begins `offset` floats into a page.
class GpuPages {
 public:
  GpuPages(Gpu& gpu, int64_t rows, int32_t page_rows, int32_t width, bool bf16 = false, int64_t offset = 0)
      : page_rows_(page_rows), width_(width), bf16_(bf16), offset_(offset) {
    const int64_t elements = int64_t{page_rows} * width, floats = bf16 ? (elements + 1) / 2 : elements;
    std::vector<float*> pages;
    for (int64_t p = 0; p < (rows + page_rows - 1) / page_rows; ++p) {
      data_.push_back(std::make_unique<DeviceArray<float>>(gpu, offset + floats));
      pages.push_back(data_.back()->data());
    }
    table_ = std::make_unique<DeviceArray<float*>>(gpu, pages);
  }
  float* const* table() const { return table_->data(); }

  // Rows from the first on; float32 values are rounded where the pages hold bfloat16.
  void fill(const std::vector<float>& rows) {
    const int64_t n = static_cast<int64_t>(rows.size()) / width_;
    for (int64_t first = 0; first < n; first += page_rows_) {
      std::vector<float> page = data_[static_cast<size_t>(first / page_rows_)]->get();
      for (int64_t r = first; r < n && r < first + page_rows_; ++r) {
        for (int64_t i = 0; i < width_; ++i) {
          const float x = rows[static_cast<size_t>(r * width_ + i)];
          const int64_t at = (r - first) * width_ + i;
          if (bf16_) {
            reinterpret_cast<uint16_t*>(page.data() + offset_)[at] = rocket::f32_to_bf16(x);
          } else {
            page[static_cast<size_t>(offset_ + at)] = x;
          }
        }
      }
      data_[static_cast<size_t>(first / page_rows_)]->set(page);
    }
  }
  std::vector<float> read(int64_t rows) const {
    std::vector<float> out;
    for (int64_t first = 0; first < rows; first += page_rows_) {
      const std::vector<float> page = data_[static_cast<size_t>(first / page_rows_)]->get();
      const auto* half = reinterpret_cast<const uint16_t*>(page.data() + offset_);
      for (int64_t i = 0; i < std::min<int64_t>(page_rows_, rows - first) * width_; ++i) {
        out.push_back(bf16_ ? rocket::bf16_to_f32(half[i]) : page[static_cast<size_t>(offset_ + i)]);
      }
    }
    return out;
  }
  void check(const std::string& what) const {
    for (const auto& page : data_) {
      page->check(what);
      const std::vector<float> values = page->get();
      for (int64_t i = 0; i < offset_; ++i) {
        expect(std::isnan(values[static_cast<size_t>(i)]), what + ": wrote before its part of a page");
      }
    }
  }

 private:
  int64_t page_rows_, width_;
  bool bf16_;
  int64_t offset_;
  std::vector<std::unique_ptr<DeviceArray<float>>> data_;
  std::unique_ptr<DeviceArray<float*>> table_;
};

// The pages and segments of several streams as an op takes them: as many entries as the step has rows, with empty ones
// at the end.
class GpuSegments {
 public:
  GpuSegments(Gpu& gpu, std::vector<rocket::Segment> segment, std::vector<float* const*> tables, int32_t rows)
      : count_(std::max<int32_t>(rows, static_cast<int32_t>(segment.size()))) {
    segment.resize(static_cast<size_t>(count_), rocket::Segment{rows, 0, 0});
    tables.resize(static_cast<size_t>(count_), nullptr);
    segment_ = std::make_unique<DeviceArray<rocket::Segment>>(gpu, segment);
    table_ = std::make_unique<DeviceArray<float* const*>>(gpu, tables);
  }
  const rocket::Segment* data() const { return segment_->data(); }
  int32_t count() const { return count_; }
  rocket::PagedParts pages(int32_t page_rows, int32_t width, bool bf16 = false, int64_t offset = 0) const {
    return {table_->data(), offset, page_rows, width, bf16};
  }

 private:
  int32_t count_;
  std::unique_ptr<DeviceArray<rocket::Segment>> segment_;
  std::unique_ptr<DeviceArray<float* const*>> table_;
};

inline std::vector<float> rounded_to_bf16(std::vector<float> values) {
  for (float& x : values) x = rocket::bf16_to_f32(rocket::f32_to_bf16(x));
  return values;
}

}  // namespace check
