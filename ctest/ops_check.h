// What the tests of single ops share: instruction sets to run on, error limits, paged rows, segments.
#pragma once

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "ops/pages.h"
#include "ops/rows.h"

namespace check {

constexpr double kUnit = 0x1p-24;  // largest relative error of one float32 rounding

// Limit for a result that `steps` float32 roundings in a row led to. They are independent, so their sum grows
// with the square root of their number; a rounding's standard deviation is below kUnit / sqrt(3), and 4 kUnit
// is seven of these.
inline double rounding(double steps) {
  return 4 * kUnit * std::sqrt(steps);
}

// Roundings in a row in a sum of n terms over 16 lanes: one a step of a lane, and the tree.
inline double lane_steps(int64_t n) {
  return static_cast<double>(n) / 16 + 4;
}

inline double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

// Runs f(ops, name) on each instruction set that this CPU has.
template <typename F>
void on_each_isa(F f) {
  for (const std::string& isa : isas()) {
    rng().seed(20260917);
    f(rocket::cpu_ops(isa.c_str()), isa + " ");
  }
}

// Pages of one stream, each a guarded allocation of its own, so that rows of two pages are never neighbours.
class Pages {
 public:
  Pages(int64_t rows, int32_t page_rows, int32_t width) : page_rows_(page_rows), width_(width) {
    for (int64_t p = 0; p < (rows + page_rows - 1) / page_rows; ++p) {
      data_.push_back(std::make_unique<Guarded<float>>(static_cast<int64_t>(page_rows) * width));
      page_.push_back(data_.back()->data());
    }
  }
  rocket::PagedRows view() { return {page_.data(), 0, page_rows_, width_}; }
  float* row(int64_t i) { return view().row(i); }
  void fill(const std::vector<float>& rows) {
    for (int64_t i = 0; i < static_cast<int64_t>(rows.size()) / width_; ++i) {
      std::memcpy(row(i), rows.data() + i * width_, width_ * sizeof(float));
    }
  }
  std::vector<float> read(int64_t rows) {
    std::vector<float> out(rows * width_);
    for (int64_t i = 0; i < rows; ++i) std::memcpy(out.data() + i * width_, row(i), width_ * sizeof(float));
    return out;
  }
  void check(const std::string& what) {
    for (auto& page : data_) page->check(what);
  }

 private:
  int32_t page_rows_, width_;
  std::vector<std::unique_ptr<Guarded<float>>> data_;
  std::vector<float*> page_;
};

// The pages of several streams as an op takes them.
class Tables {
 public:
  void push_back(const rocket::PagedRows& rows) {
    table_.push_back(rows.page);
    page_rows_ = rows.page_rows;
    width_ = rows.width;
  }
  rocket::PagedParts view() const { return {table_.data(), 0, page_rows_, width_, false}; }

 private:
  std::vector<float* const*> table_;
  int32_t page_rows_ = 1, width_ = 0;
};

// Cuts rows into chunks of `chunk` rows (0 = of random lengths 1 … 9, -1 = all at once): first rows of the
// chunks, then `rows`.
inline std::vector<int32_t> cuts(int32_t rows, int32_t chunk) {
  std::vector<int32_t> at{0};
  while (at.back() < rows) {
    const auto step = chunk > 0 ? chunk : chunk < 0 ? rows : static_cast<int32_t>(uniform_int(1, 9));
    at.push_back(std::min(rows, at.back() + step));
  }
  return at;
}

}  // namespace check
