// linear and head_linear against double precision, and their bits against themselves.
#include <algorithm>
#include <functional>
#include <limits>

#include "base/error.h"
#include "stored_weight.h"

using namespace rocket;
using check::StoredWeight;

namespace {

std::string title(const std::string& isa, WeightFormat format, int64_t rows, int64_t out, int64_t in) {
  return isa + " " + check::format_name(format) + " " + std::to_string(rows) + " x " + std::to_string(out) +
         " x " + std::to_string(in);
}

// Every row alone, in its own call.
std::vector<float> row_by_row(const OpTable& ops, Exec& exec, const Weight& w, const std::vector<float>& x,
                              int64_t rows) {
  std::vector<float> y(rows * w.out);
  for (int64_t r = 0; r < rows; ++r) {
    LinearParams p;
    p.x = x.data() + r * w.in;
    p.ldx = w.in;
    p.rows = 1;
    p.part_count = 1;
    p.part[0] = {w, y.data() + r * w.out, w.out, nullptr};
    ops.linear(p, exec);
  }
  return y;
}

std::vector<float> all_rows(const OpTable& ops, Exec& exec, const Weight& w, const std::vector<float>& x,
                            int64_t rows) {
  check::Guarded<float> y(rows * w.out);
  LinearParams p;
  p.x = x.data();
  p.ldx = w.in;
  p.rows = static_cast<int32_t>(rows);
  p.part_count = 1;
  p.part[0] = {w, y.data(), w.out, nullptr};
  ops.linear(p, exec);
  y.check("linear");
  return std::vector<float>(y.data(), y.data() + y.size());
}

// Figures that other engines publish for the error of the same component.
double published(WeightFormat format) {
  if (format == WeightFormat::kBF16) return 1.67e-07;
  return format == WeightFormat::kNVFP4 ? 2.27e-03 : 0;
}

void values_and_bits() {
  struct Shape {
    int64_t out, in;
  };
  // Inner sizes below, at and past 16, 128, 256 and the chunks that kernels work in; odd numbers of outputs.
  const Shape shapes[] = {{1, 1},     {3, 15},   {17, 16},  {5, 48},    {37, 100}, {9, 128},
                          {130, 272}, {61, 512}, {7, 1033}, {33, 1056}, {10, 2592}};
  const int64_t row_counts[] = {2, 3, 4, 5, 7, 8, 9, 13, 16, 31, 64, 150};
  for (const Shape& shape : shapes) {
    for (WeightFormat format : check::kFormats) {
      const int64_t unit = check::block_columns(format);
      const int64_t in = (shape.in + unit - 1) / unit * unit;
      const StoredWeight s = check::random_weight(format, shape.out, in);
      const std::vector<float> x = check::normal(150 * in);
      const std::vector<double> expected = check::product(s, x.data(), in, 150);
      std::vector<float> fused[2];
      for (const std::string& isa : check::isas()) {
        const OpTable& ops = cpu_ops(isa.c_str());
        check::Bench bench(2);
        const std::vector<float> single = row_by_row(ops, bench.exec, s.w, x, 150);
        check::close(title(isa, format, 1, shape.out, in), single.data(), expected.data(), 150 * shape.out,
                     check::sum_limit(in), published(format));
        for (int64_t rows : row_counts) {
          const std::vector<float> many = all_rows(ops, bench.exec, s.w, x, rows);
          check::same_bits("rows alone or together: " + title(isa, format, rows, shape.out, in), many.data(),
                           single.data(), rows * shape.out);
        }
        if (isa == "avx2") fused[0] = single;
        if (isa == "avx512") fused[1] = single;
      }
      if (!fused[0].empty() && !fused[1].empty())
        check::same_bits("avx2 and avx512: " + title("", format, 1, shape.out, in), fused[0].data(),
                         fused[1].data(), 150 * shape.out);
    }
  }
}

// Rows of uneven values: outliers, magnitudes far from 1, zeros. The error is held against what a row's
// largest values and the weights could make of it, which is what rounding goes by.
void uneven_rows() {
  const int64_t in = 608, out = 40, rows = 12;
  for (WeightFormat format : check::kFormats) {
    const StoredWeight s = check::random_weight(format, out, in);
    std::vector<float> x = check::normal(rows * in);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < in; ++i) {
        float& v = x[r * in + i];
        if (r < 4) v *= std::exp(3.0f * check::normal(1)[0]);
        if (r == 4) v *= 1e25f;
        if (r == 5) v *= 1e-30f;
        if (r == 6) v = i % 2 ? 0.0f : v;
        if (r == 7) v = i / 16 % 3 ? 0.0f : v;
        if (r == 8) v = i == 333 ? 1.9999999f : 0.0f;
        if (r == 9) v = i == 600 ? -3e38f / 8192 : 0.0f;
        if (r == 10) v = 0.0f;
        if (r == 11) v = i % 37 == 5 ? v * 4096 : v;
      }
    }
    const std::vector<double> expected = check::product(s, x.data(), in, rows);
    for (const std::string& isa : check::isas()) {
      check::Bench bench(1);
      const OpTable& ops = cpu_ops(isa.c_str());
      const std::vector<float> alone = row_by_row(ops, bench.exec, s.w, x, rows),
                               together = all_rows(ops, bench.exec, s.w, x, rows);
      check::same_bits(isa + " " + check::format_name(format) + " uneven rows alone or together",
                       alone.data(), together.data(), rows * out);
      for (int64_t r = 0; r < rows; ++r) {
        check::close(isa + " " + check::format_name(format) + " uneven row " + std::to_string(r),
                     alone.data() + r * out, expected.data() + r * out, out, check::sum_limit(in));
      }
    }
  }
}

// One code or scale that is not a number, anywhere in a row, makes that output NaN for every row of x and no
// other.
void nan_anywhere() {
  const int64_t in = 1120, out = 9, rows = 6;
  for (WeightFormat format : {WeightFormat::kNVFP4, WeightFormat::kFP8Block, WeightFormat::kMXFP8}) {
    for (int64_t column : {int64_t{0}, int64_t{250}, int64_t{511}, int64_t{1023}, int64_t{1024}, in - 1}) {
      const int64_t output = column % out;
      StoredWeight s = check::random_weight(format, out, in);
      const std::vector<float> x = check::normal(rows * in);
      for (const std::string& isa : check::isas()) {
        check::Bench bench(1);
        const OpTable& ops = cpu_ops(isa.c_str());
        const std::vector<float> before = all_rows(ops, bench.exec, s.w, x, rows);
        uint8_t& code = format == WeightFormat::kNVFP4 ? s.scales()[(output * in + column) / 16]
                                                       : s.bytes()[output * in + column];
        const uint8_t kept = code;
        code = column % 2 ? 0xff : 0x7f;
        for (int64_t n : {int64_t{1}, int64_t{2}, int64_t{4}, rows}) {
          const std::vector<float> after = all_rows(ops, bench.exec, s.w, x, n);
          bool right = true;
          for (int64_t i = 0; i < n * out; ++i)
            right = right && (i % out == output ? std::isnan(after[i]) : after[i] == before[i]);
          check::expect(right, title(isa, format, n, out, in) + ": NaN in column " + std::to_string(column));
        }
        code = kept;
      }
    }
  }
}

// Values of x that are not numbers reach every output of their row and no other row.
void nan_in_x() {
  const int64_t in = 288, out = 5, rows = 6;
  for (WeightFormat format : check::kFormats) {
    const StoredWeight s = check::random_weight(format, out, in);
    for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      std::vector<float> x = check::normal(rows * in);
      for (const std::string& isa : check::isas()) {
        check::Bench bench(1);
        const OpTable& ops = cpu_ops(isa.c_str());
        const std::vector<float> before = all_rows(ops, bench.exec, s.w, x, rows);
        std::vector<float> spoilt = x;
        spoilt[2 * in + 271] = bad;
        const std::vector<float> after = all_rows(ops, bench.exec, s.w, spoilt, rows);
        bool right = true;
        for (int64_t i = 0; i < rows * out; ++i)
          right = right && (i / out == 2 ? !std::isfinite(after[i]) : after[i] == before[i]);
        check::expect(right, title(isa, format, rows, out, in) + ": a value of x that is not a number");
      }
    }
  }
}

// Several weights of mixed formats in a call, strides, bias, one to three threads.
void parts_strides_threads() {
  const int64_t in = 544, ldx = in + 3, max_rows = 70;
  const int64_t outs[] = {48, 1, 129, 33, 65, 7};
  const WeightFormat formats[] = {WeightFormat::kBF16,     WeightFormat::kF32,   WeightFormat::kNVFP4,
                                  WeightFormat::kFP8Block, WeightFormat::kMXFP8, WeightFormat::kNVFP4};
  constexpr int kParts = 6;
  std::vector<StoredWeight> weights;
  std::vector<std::vector<float>> bias;
  for (int i = 0; i < kParts; ++i) {
    weights.push_back(check::random_weight(formats[i], outs[i], in, 0.1));
    bias.push_back(check::normal(outs[i]));
  }
  const std::vector<float> x = check::normal(max_rows * ldx);
  for (const std::string& isa : check::isas()) {
    std::vector<std::vector<float>> first(kParts);  // of one thread, most rows
    for (int threads : {1, 2, 3}) {
      check::Bench bench(threads);
      for (int64_t rows : {max_rows, int64_t{1}, int64_t{2}, int64_t{6}, int64_t{17}}) {
        LinearParams p;
        p.x = x.data();
        p.ldx = ldx;
        p.rows = static_cast<int32_t>(rows);
        p.part_count = kParts;
        std::vector<check::Guarded<float>> y;
        for (int i = 0; i < kParts; ++i) y.emplace_back(rows * (outs[i] + i));
        for (int i = 0; i < kParts; ++i)
          p.part[i] = {weights[i].w, y[i].data(), outs[i] + i, i % 2 ? bias[i].data() : nullptr};
        cpu_ops(isa.c_str()).linear(p, bench.exec);
        for (int i = 0; i < kParts; ++i) {
          const std::string what = isa + " part " + std::to_string(i) + ", " + std::to_string(rows) +
                                   " rows, " + std::to_string(threads) + " threads";
          y[i].check(what);
          std::vector<double> expected = check::product(weights[i], x.data(), ldx, rows);
          std::vector<float> dense(rows * outs[i]);
          bool gap_untouched = true;
          for (int64_t r = 0; r < rows; ++r) {
            for (int64_t o = 0; o < outs[i]; ++o) {
              dense[r * outs[i] + o] = y[i][r * (outs[i] + i) + o];
              if (i % 2) expected[r * outs[i] + o] += static_cast<double>(bias[i][o]);
            }
            for (int64_t o = outs[i]; o < outs[i] + i; ++o)
              gap_untouched = gap_untouched && std::isnan(y[i][r * (outs[i] + i) + o]);
          }
          check::expect(gap_untouched, what + ": wrote between rows");
          if (threads == 1 && rows == max_rows) {
            check::close(what, dense.data(), expected.data(), rows * outs[i], check::sum_limit(in));
            first[i] = dense;
          }
          check::same_bits(what, dense.data(), first[i].data(), rows * outs[i]);
        }
        check::expect(bench.scratch.used() == 0, isa + ": scratch is given back");
      }
    }
  }
}

// Row s holds all sixteen codes under scale byte s; unit vectors pick one column each, so results are exact.
void nvfp4_codes() {
  StoredWeight s(WeightFormat::kNVFP4, 256, 16);
  for (int scale = 0; scale < 256; ++scale) {
    for (int k = 0; k < 8; ++k) s.bytes()[scale * 8 + k] = static_cast<uint8_t>(2 * k | (2 * k + 1) << 4);
    s.scales()[scale] = static_cast<uint8_t>(scale);
  }
  s.w.global_scale = 0.25f;
  std::vector<float> x(16 * 16, 0.0f);
  for (int i = 0; i < 16; ++i) x[i * 16 + i] = 1.0f;
  std::vector<double> expected(16 * 256);
  for (int i = 0; i < 16; ++i) {
    for (int scale = 0; scale < 256; ++scale)
      expected[i * 256 + scale] = check::e2m1_value(i) * check::e4m3_value(scale) * 0.25;
  }
  for (const std::string& isa : check::isas()) {
    check::Bench bench(1);
    const OpTable& ops = cpu_ops(isa.c_str());
    const std::vector<float> alone = row_by_row(ops, bench.exec, s.w, x, 16),
                             together = all_rows(ops, bench.exec, s.w, x, 16);
    check::close(isa + " NVFP4: 16 codes x 256 scales, a row alone", alone.data(), expected.data(), 16 * 256,
                 0);
    check::close(isa + " NVFP4: 16 codes x 256 scales, 16 rows", together.data(), expected.data(), 16 * 256,
                 0);
  }
}

// Row s holds all 256 E4M3 codes under E8M0 scale s, up to the last scale with which every value fits a
// float32; a unit vector picks the code. 0 * NaN is NaN, so NaN codes and the NaN scale get a weight of their
// own.
void fp8_codes() {
  const int64_t scales = 247;
  StoredWeight mx(WeightFormat::kMXFP8, scales, 256), block(WeightFormat::kFP8Block, 5, 256);
  StoredWeight nan(WeightFormat::kMXFP8, 4, 32);
  for (int64_t s = 0; s < scales; ++s) {
    for (int c = 0; c < 256; ++c) mx.bytes()[s * 256 + c] = static_cast<uint8_t>((c & 0x7f) == 0x7f ? 0 : c);
    for (int b = 0; b < 8; ++b) mx.scales()[s * 8 + b] = static_cast<uint8_t>(s);
  }
  for (int64_t o = 0; o < 5; ++o) {
    for (int c = 0; c < 256; ++c)
      block.bytes()[o * 256 + c] = static_cast<uint8_t>((c & 0x7f) == 0x7f ? 0 : c);
  }
  const float multiplier[2] = {0.5f, -3.0f};
  std::memcpy(block.scales(), multiplier, sizeof multiplier);
  nan.bytes()[0 * 32 + 5] = 0x7f;
  nan.bytes()[1 * 32 + 31] = 0xff;
  for (int o = 0; o < 4; ++o) nan.scales()[o] = o == 3 ? 255 : 127;
  for (StoredWeight* s : {&mx, &block, &nan}) s->decode();
  for (const std::string& isa : check::isas()) {
    check::Bench bench(1);
    for (const StoredWeight* s : {&mx, &block, &nan}) {
      const int64_t in = s->w.in;
      std::vector<float> x(in * in, 0.0f);
      for (int64_t i = 0; i < in; ++i) x[i * in + i] = 1.0f;
      std::vector<float> expected(in * s->w.out);
      for (int64_t i = 0; i < in; ++i) {
        for (int64_t o = 0; o < s->w.out; ++o) {
          double sum = 0;
          for (int64_t k = 0; k < in; ++k) sum += x[i * in + k] * s->value[o * in + k];
          // Rounds to float once, also into subnormals and infinity.
          expected[i * s->w.out + o] = static_cast<float>(sum);
        }
      }
      const std::string what = isa + " " + check::format_name(s->w.format) + ": all codes, " +
                               std::to_string(s->w.out) + " scales";
      const OpTable& ops = cpu_ops(isa.c_str());
      check::close(what + ", a row alone", row_by_row(ops, bench.exec, s->w, x, in).data(), expected.data(),
                   in * s->w.out, 0);
      check::close(what + ", all rows", all_rows(ops, bench.exec, s->w, x, in).data(), expected.data(),
                   in * s->w.out, 0);
    }
  }
}

void head_products() {
  struct Case {
    int32_t heads, stride, offset, per_head;
    int64_t in;
  };
  const Case cases[] = {
      {4, 80, 0, 48, 64}, {4, 80, 48, 32, 64}, {3, 21, 4, 17, 77}, {1, 1, 0, 1, 1}, {2, 300, 40, 260, 530}};
  for (const Case& c : cases) {
    for (WeightFormat format : {WeightFormat::kF32, WeightFormat::kBF16}) {
      const StoredWeight s = check::random_weight(format, static_cast<int64_t>(c.heads) * c.stride, c.in);
      for (bool transposed : {false, true}) {
        const int64_t from = transposed ? c.per_head : c.in, to = transposed ? c.in : c.per_head;
        const int64_t hx = from + 1, ldx = c.heads * hx + 2, hy = to + 3, ldy = c.heads * hy + 5,
                      max_rows = 37;
        const std::vector<float> x = check::normal(max_rows * ldx);
        std::vector<double> expected(max_rows * c.heads * to, 0.0);
        for (int64_t r = 0; r < max_rows; ++r) {
          for (int64_t h = 0; h < c.heads; ++h) {
            for (int64_t i = 0; i < c.per_head; ++i) {
              const double* row = s.value.data() + (h * c.stride + c.offset + i) * c.in;
              const float* xr = x.data() + r * ldx + h * hx;
              double* yr = expected.data() + (r * c.heads + h) * to;
              for (int64_t j = 0; j < c.in; ++j) {
                if (transposed)
                  yr[j] += static_cast<double>(xr[i]) * row[j];
                else
                  yr[i] += static_cast<double>(xr[j]) * row[j];
              }
            }
          }
        }
        std::vector<float> fused[2];
        for (const std::string& isa : check::isas()) {
          std::vector<float> first;
          for (int threads : {2, 1, 3}) {
            check::Bench bench(threads);
            for (int64_t rows :
                 {max_rows, int64_t{1}, int64_t{2}, int64_t{3}, int64_t{5}, int64_t{8}, int64_t{17}}) {
              check::Guarded<float> y((rows - 1) * ldy + c.heads * hy);
              HeadLinearParams p{s.w,
                                 c.heads,
                                 c.stride,
                                 c.offset,
                                 c.per_head,
                                 transposed,
                                 x.data(),
                                 ldx,
                                 hx,
                                 y.data(),
                                 ldy,
                                 hy,
                                 static_cast<int32_t>(rows)};
              cpu_ops(isa.c_str()).head_linear(p, bench.exec);
              const std::string what = isa + " head_linear" + (transposed ? " transposed " : " ") +
                                       check::format_name(format) + " " + std::to_string(rows) + " rows, " +
                                       std::to_string(c.heads) + " heads, " + std::to_string(c.per_head) +
                                       " of " + std::to_string(c.stride) + " x " + std::to_string(c.in);
              y.check(what);
              std::vector<float> dense;
              bool gap_untouched = true;
              for (int64_t r = 0; r < rows; ++r) {
                for (int64_t h = 0; h < c.heads; ++h) {
                  for (int64_t k = 0; k < to; ++k) dense.push_back(y[r * ldy + h * hy + k]);
                  for (int64_t k = to; k < hy; ++k)
                    gap_untouched = gap_untouched && std::isnan(y[r * ldy + h * hy + k]);
                }
              }
              check::expect(gap_untouched, what + ": wrote between heads");
              if (first.empty()) {
                first = dense;
                check::close(what, dense.data(), expected.data(), rows * c.heads * to,
                             check::sum_limit(from, transposed ? 1 : 16));
              }
              check::same_bits(what + ", " + std::to_string(threads) + " threads", dense.data(), first.data(),
                               rows * c.heads * to);
            }
          }
          if (isa == "avx2") fused[0] = first;
          if (isa == "avx512") fused[1] = first;
        }
        if (!fused[0].empty() && !fused[1].empty())
          check::same_bits("head_linear: avx2 and avx512", fused[0].data(), fused[1].data(),
                           static_cast<int64_t>(fused[0].size()));
      }
    }
  }
}

void expect_error(const std::string& what, const std::function<void()>& call, const std::string& part) {
  std::string message = "no error";
  try {
    call();
  } catch (const Error& error) {
    message = error.what();
  }
  check::expect(message.find(part) != std::string::npos,
                what + ": expected an error that says \"" + part + "\", found: " + message);
}

void refusals() {
  const OpTable& ops = cpu_ops();
  check::Bench bench(1);
  std::vector<float> x(64, 1.0f), y(64);
  const StoredWeight a = check::random_weight(WeightFormat::kBF16, 4, 16),
                     b = check::random_weight(WeightFormat::kBF16, 4, 8);
  StoredWeight odd = check::random_weight(WeightFormat::kNVFP4, 4, 16);
  LinearParams p;
  p.x = x.data();
  p.ldx = 16;
  p.rows = 2;
  p.part_count = 2;
  p.part[0] = {a.w, y.data(), 4, nullptr};
  p.part[1] = {b.w, y.data() + 16, 4, nullptr};
  expect_error("parts of two inner sizes", [&] { ops.linear(p, bench.exec); }, "expected 16, found 8");
  p.part_count = 0;
  expect_error("no parts", [&] { ops.linear(p, bench.exec); }, "found 0");
  p.part_count = 1;
  p.ldx = 15;
  expect_error("rows of x overlap", [&] { ops.linear(p, bench.exec); }, "expected 16, found 15");
  p.ldx = 16;
  p.part[0].ldy = 3;
  expect_error("rows of y overlap", [&] { ops.linear(p, bench.exec); }, "expected 4, found 3");
  odd.w.in = 8;
  p.part[0] = {odd.w, y.data(), 4, nullptr};
  expect_error("half an NVFP4 block", [&] { ops.linear(p, bench.exec); }, "expected 0, found 8");
  odd.w.in = 16;
  HeadLinearParams h{odd.w, 1, 4, 0, 4, false, x.data(), 16, 16, y.data(), 4, 4, 1};
  expect_error("NVFP4 heads", [&] { ops.head_linear(h, bench.exec); }, "F32 or BF16");
  h.w = a.w;
  h.offset = 1;
  expect_error("head past its stride", [&] { ops.head_linear(h, bench.exec); }, "expected 4, found 5");

  // No rows: nothing is read or written.
  p.part[0] = {a.w, nullptr, 4, nullptr};
  p.x = nullptr;
  p.rows = 0;
  ops.linear(p, bench.exec);
  h.offset = 0;
  h.rows = 0;
  h.x = nullptr;
  h.y = nullptr;
  ops.head_linear(h, bench.exec);
}

}  // namespace

int main() {
  nvfp4_codes();
  fp8_codes();
  values_and_bits();
  uneven_rows();
  nan_anywhere();
  nan_in_x();
  parts_strides_threads();
  head_products();
  refusals();
  return check::finish("linear");
}
