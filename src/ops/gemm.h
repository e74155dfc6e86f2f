// Products of float rows with stored weights, shared by linear.cpp and experts.cpp.
//
// Order of the sum over `in`, the same in every path, for any number of rows:
//   NVFP4   x is taken in blocks of sixteen, as integers of 24 bits with a power of two as the block's scale
//   (see
//           nvfp4_dot.h). A block's sum of products is exact; rounded to float and times both scales it is
//           fused into lane `block mod 16`, in ascending blocks. The global scale multiplies the total.
//   others  columns in segments of 1024: lane i of sixteen takes columns i, i+16, … of the segment with fused
//   multiply-add; a
//           weight enters as float(value * scale). Segments' lanes are added in ascending order.
// The lanes add as in vec.h sum(). A row's tail is filled up with zeros, which add nothing.
#pragma once

#include "base/error.h"
#include "ops/vec.h"
#include "ops/weight.h"

namespace rocket::ROCKET_ISA {

constexpr int kTile = 4;            // outputs that are worked on together
constexpr int64_t kSegment = 1024;  // columns whose lanes are summed on their own

ROCKET_INLINE int64_t min_i64(int64_t a, int64_t b) {
  return a < b ? a : b;
}
ROCKET_INLINE int64_t round_up(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

// Row r of an input or output is number index[r] of a table of rows, or number r.
struct RowsIn {
  const float* base = nullptr;
  int64_t ld = 0;
  const int32_t* index = nullptr;  // may be null
};

struct RowsOut {
  float* base = nullptr;  // where the first output of row 0 goes
  int64_t ld = 0;
  const int32_t* index = nullptr;  // may be null
  const float* scale = nullptr;    // a factor for each row of the table; may be null
  const float* bias = nullptr;     // added, from the first output on; may be null
};

ROCKET_INLINE const float* row_of(const RowsIn& x, int64_t r) {
  return x.base + (x.index ? x.index[r] : r) * x.ld;
}

// Outputs [begin, end) of w for rows: y[r][o - begin]. x is in the format's order: NVFP4 wants rows as
// fixed_row() leaves them, the other formats rows as they are.
void matmul(const Weight& w, int64_t begin, int64_t end, int64_t rows, const RowsIn& x, const RowsOut& y);

// Rows for NVFP4: floats that a row of `in` takes (a multiple of 16; place it on a multiple of 64 bytes), a
// whole row
// (`in` a multiple of 16), and sixteen values as one block of a row whose last blocks have been cleared.
ROCKET_INLINE int64_t fixed_floats(int64_t in) {
  return (in + 255) / 256 * 224;
}
void fixed_row(const float* x, int64_t in, float* to);
void fixed_block(const float* x, int64_t block, float* to);
void fixed_clear_tail(int64_t in, float* to);

// What a thread should at least have to do in nanoseconds, and about how many a weight takes for `rows` rows:
// enough to keep small products on one thread, which is all that these are for.
constexpr double kWorthwhile = 2000;
ROCKET_INLINE double weight_ns(WeightFormat format, int64_t rows) {
  const double read = format == WeightFormat::kF32 ? 0.12 : format == WeightFormat::kNVFP4 ? 0.02 : 0.06;
  return read + static_cast<double>(rows) * 0.02;
}
ROCKET_INLINE int64_t grain_of(double item_ns) {
  return item_ns >= kWorthwhile ? 1 : static_cast<int64_t>(kWorthwhile / item_ns) + 1;
}
constexpr double kFixedBlockNs = 10;  // of fixed_block()

// Refuses shapes that a format cannot have.
ROCKET_INLINE void check_weight(const char* op, const Weight& w) {
  if (w.out <= 0) fail_op(op, "outputs of a weight, at least", 1, w.out);
  if (w.in <= 0) fail_op(op, "inputs of a weight, at least", 1, w.in);
  if (w.format == WeightFormat::kNVFP4 && w.in % 16)
    fail_op(op, "remainder of an NVFP4 weight's inputs by 16", 0, w.in % 16);
  if (w.format == WeightFormat::kMXFP8 && w.in % 32)
    fail_op(op, "remainder of an MXFP8 weight's inputs by 32", 0, w.in % 32);
}

}  // namespace rocket::ROCKET_ISA
