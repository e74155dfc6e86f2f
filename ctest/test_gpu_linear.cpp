// CUDA linear and head_linear: values against the CPU's, bits against themselves.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "gpu_check.h"
#include "stored_weight.h"

namespace {

using namespace rocket;
using check::DeviceArray;
using check::StoredWeight;

// A stored weight on the device, as far past an aligned address as wanted.
struct DeviceWeight {
  DeviceWeight(check::Gpu& gpu, const StoredWeight& s, int64_t shift)
      : data(gpu, shifted(s.data, shift)), scale(gpu, shifted(s.scale, shift)), w(s.w) {
    w.data = data.data() + shift;
    w.block_scale = s.w.block_scale ? scale.data() + shift : nullptr;
  }
  // The weight's bytes begin at 1 in `from`.
  static std::vector<uint8_t> shifted(const std::vector<uint8_t>& from, int64_t shift) {
    std::vector<uint8_t> to(static_cast<size_t>(shift), 0xEE);
    to.insert(to.end(), from.begin() + std::min<int64_t>(1, static_cast<int64_t>(from.size())), from.end());
    return to;
  }
  DeviceArray<uint8_t> data, scale;
  Weight w;
};

// x in two BF16 terms is right to 2^-17 of itself, and so are F32 weights; the product of second terms, 2^-16 of the whole, is
// left out there. One product is off by that at most; errors of many add as a random walk just as the products do.
// Tensor cores cut the sum of each 16 products instead of rounding it, always towards zero: 2^-24 of it on average, in / 16
// times for each pass, while it grows.
double tensor_limit(WeightFormat format, int64_t in) {
  const bool f32 = format == WeightFormat::kF32;
  return 2 * check::sum_limit(in) + (f32 ? 4 : 1) * 0x1p-17 +
         (f32 ? 1.5 : 1) * static_cast<double>(in) * 0x1p-27;
}

struct Case {
  std::vector<WeightFormat> format;
  std::vector<int64_t> out;
  int64_t in;
  int32_t rows;
  int64_t shift = 0, extra_x = 0, extra_y = 0;
  bool tensor_cores = false;
};

std::string title(const Case& c) {
  std::string s = c.tensor_cores ? "linear, tensor cores," : "linear";
  for (size_t i = 0; i < c.out.size(); ++i)
    s += std::string(" ") + check::format_name(c.format[i]) + " " + std::to_string(c.out[i]);
  return s + " x " + std::to_string(c.in) + ", " + std::to_string(c.rows) + " rows, shift " +
         std::to_string(c.shift);
}

// The result of each part for rows [first, first + rows) of x.
std::vector<std::vector<float>> run(check::Gpu& gpu, const Case& c,
                                    const std::vector<std::unique_ptr<DeviceWeight>>& weight,
                                    const DeviceArray<float>& x,
                                    const std::vector<std::unique_ptr<DeviceArray<float>>>& bias,
                                    int32_t first, int32_t rows) {
  LinearParams p;
  p.ldx = c.in + c.extra_x;
  p.x = x.data() + first * p.ldx;
  p.rows = rows;
  p.part_count = static_cast<int32_t>(c.out.size());
  std::vector<std::unique_ptr<DeviceArray<float>>> y;
  for (size_t i = 0; i < c.out.size(); ++i) {
    const int64_t ldy = c.out[i] + c.extra_y;
    y.push_back(std::make_unique<DeviceArray<float>>(gpu, (rows - 1) * ldy + c.out[i]));
    p.part[i] = {weight[i]->w, y[i]->data(), ldy, bias[i] ? bias[i]->data() : nullptr};
  }
  const size_t used = gpu.scratch.used();
  gpu.exec.tensor_cores = c.tensor_cores;
  gpu.ops.linear(p, gpu.exec);
  gpu.exec.tensor_cores = false;
  check::expect(gpu.scratch.used() == used, title(c) + ": scratch is given back");
  std::vector<std::vector<float>> dense(c.out.size());
  for (size_t i = 0; i < c.out.size(); ++i) {
    const std::vector<float> found = y[i]->get();
    y[i]->check(title(c));
    const int64_t ldy = c.out[i] + c.extra_y;
    bool untouched = true;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t o = 0; o < ldy && r * ldy + o < static_cast<int64_t>(found.size()); ++o) {
        const float v = found[static_cast<size_t>(r * ldy + o)];
        if (o < c.out[i]) {
          dense[i].push_back(v);
        } else {
          untouched = untouched && std::isnan(v);
        }
      }
    }
    check::expect(untouched, title(c) + ": wrote between rows");
  }
  return dense;
}

void compare(check::Gpu& gpu, const Case& c, bool alone) {
  if (!gpu.takes_case()) return;
  const int64_t ldx = c.in + c.extra_x;
  const std::vector<float> x = check::normal(c.rows * ldx);
  const DeviceArray<float> dx(gpu, x);
  std::vector<StoredWeight> stored;
  std::vector<std::unique_ptr<DeviceWeight>> weight;
  std::vector<std::vector<float>> bias;
  std::vector<std::unique_ptr<DeviceArray<float>>> dbias;
  for (size_t i = 0; i < c.out.size(); ++i) {
    stored.push_back(check::random_weight(c.format[i], c.out[i], c.in, 0.3));
    weight.push_back(std::make_unique<DeviceWeight>(gpu, stored[i], c.shift));
    bias.push_back(i % 2 ? check::normal(c.out[i]) : std::vector<float>{});
    dbias.push_back(i % 2 ? std::make_unique<DeviceArray<float>>(gpu, bias[i]) : nullptr);
  }
  const auto found = run(gpu, c, weight, dx, dbias, 0, c.rows);

  LinearParams p;
  p.x = x.data();
  p.ldx = ldx;
  p.rows = c.rows;
  p.part_count = static_cast<int32_t>(c.out.size());
  std::vector<std::vector<float>> expected;
  for (size_t i = 0; i < c.out.size(); ++i) {
    expected.emplace_back(static_cast<size_t>(c.rows * c.out[i]));
    p.part[i] = {stored[i].w, expected[i].data(), c.out[i], i % 2 ? bias[i].data() : nullptr};
  }
  cpu_ops().linear(p, gpu.cpu.exec);
  for (size_t i = 0; i < c.out.size(); ++i) {
    // Both sides are float32 sums, each within sum_limit() of the exact one.
    const double limit = c.tensor_cores ? tensor_limit(c.format[i], c.in) : 2 * check::sum_limit(c.in);
    check::close(title(c) + ", part " + std::to_string(i), found[i].data(), expected[i].data(),
                 c.rows * c.out[i], limit);
  }
  if (!alone) return;
  const std::vector<int32_t> rows_together =
      gpu.small() ? std::vector<int32_t>{5} : std::vector<int32_t>{1, 2, 3, 5, 8, 16};
  for (const int32_t together : rows_together) {
    for (int32_t first = 0; first < c.rows; first += together) {
      const int32_t rows = std::min(together, c.rows - first);
      const auto part = run(gpu, c, weight, dx, dbias, first, rows);
      for (size_t i = 0; i < c.out.size(); ++i)
        check::same_bits(title(c) + ", " + std::to_string(rows) + " rows from " + std::to_string(first),
                         part[i].data(), found[i].data() + first * c.out[i], rows * c.out[i]);
    }
  }
}

int64_t whole(WeightFormat format, int64_t in) {
  const int64_t unit = check::block_columns(format);
  return (in + unit - 1) / unit * unit;
}

void exact(check::Gpu& gpu) {
  struct Shape {
    int64_t out, in;
  };
  // Inner sizes below, at and past steps (256) and slices (1024), many slices, several phases; odd outputs.
  const Shape shapes[] = {{1, 1},     {3, 15},     {17, 16},   {5, 48},      {37, 100},
                          {9, 128},   {130, 256},  {61, 264},  {7, 1033},    {33, 1056},
                          {10, 1544}, {300, 2048}, {6, 3080},  {1030, 128},  {24, 4096},
                          {13, 8200}, {19, 12288}, {5, 16384}, {4100, 1024}, {2100, 520}};
  for (const Shape& s : shapes) {
    if (gpu.small() && s.out * s.in > 400000) continue;
    for (const WeightFormat format : check::kFormats) {
      for (const int64_t shift : {0, 1}) {
        if (shift == 1 && s.out * s.in > 100000)
          continue;  // the byte by byte path, slow and the same for all sizes
        compare(gpu, {{format}, {s.out}, whole(format, s.in), 17, shift}, s.out * s.in < 300000);
      }
    }
  }
  for (const int32_t rows : {1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 64}) {
    for (const WeightFormat format : check::kFormats)
      compare(gpu, {{format}, {77}, 1312, rows, 0, rows % 5, rows % 3}, rows == 64);
  }
}

void parts(check::Gpu& gpu) {
  const WeightFormat B = WeightFormat::kBF16, F = WeightFormat::kF32, N = WeightFormat::kNVFP4,
                     K = WeightFormat::kFP8Block, M = WeightFormat::kMXFP8;
  for (const bool tensor : {false, true}) {
    for (const int32_t rows : {1, 2, 6, 16, 33}) {
      compare(gpu, {{B, B, B, B, B, B}, {512, 512, 512, 128, 127, 6}, 1024, rows, 0, 4, 2, tensor}, false);
      compare(gpu, {{B, F, N, K, M, N, B}, {48, 1, 129, 33, 65, 7, 250}, 544, rows, 0, 3, 1, tensor}, false);
      compare(gpu, {{B, F, N, K, M, N, B}, {48, 1, 129, 33, 65, 7, 250}, 544, rows, 2, 0, 0, tensor}, false);
      compare(gpu,
              {{B, B, B, B, B, B, B, B, B, B}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, 257, rows, 0, 0, 5, tensor},
              false);
    }
  }
}

// BF16 by tensor cores at float32's precision: inputs at and past a block (128), eight and sixteen slices, last ones that
// are short; groups (of 16 outputs) so few or inputs so wide that blocks share them; rows of x that are not aligned; so
// many outputs that sums take shared memory in rounds.
void wide(check::Gpu& gpu) {
  const WeightFormat B = WeightFormat::kBF16;
  for (const int64_t in : {248, 256, 328, 1024, 1096, 4096, 4104}) {
    for (const int64_t out : {1, 16, 363, gpu.small() ? 70 : 1072})
      compare(gpu, {{B}, {out}, in, 17, 0, 4 * (in % 3), 1}, true);
  }
  for (const int64_t in : {8456, 9224, 12288, 17416}) {
    if (gpu.small()) break;
    for (const int64_t extra : {0, 1}) compare(gpu, {{B, B, B}, {600, 3, 402}, in, 17, 0, extra, 2}, true);
  }
  if (gpu.small()) return;
  compare(gpu, {{B, B}, {43000, 9}, 904, 16}, true);
  compare(gpu, {{B}, {14000}, 4104, 16}, true);
}

// Rows of all magnitudes side by side. Each is as exact as if it were alone, and infinity and NaN stay in their rows.
void magnitudes(check::Gpu& gpu) {
  const WeightFormat B = WeightFormat::kBF16;
  for (const int64_t in : {64, 520, 4096}) {
    if (gpu.small() && in != 520) continue;
    const int64_t out = 45;
    const StoredWeight stored = check::random_weight(B, out, in, 0.3);
    std::vector<std::unique_ptr<DeviceWeight>> weight;
    weight.push_back(std::make_unique<DeviceWeight>(gpu, stored, 0));
    const std::vector<std::unique_ptr<DeviceArray<float>>> none(1);
    enum {
      kNormal,
      kInfinite,
      kBoth,
      kNan,
      kZero,
      kLarge,
      kLargest,
      kSmall,
      kTiny,
      kSpread,
      kNegative,
      kRows
    };
    std::vector<float> x = check::normal(kRows * in);
    const auto row = [&](int r) { return x.data() + r * in; };
    row(kInfinite)[in / 3] = INFINITY;
    row(kBoth)[1] = INFINITY, row(kBoth)[in - 1] = -INFINITY;
    row(kNan)[in / 2] = NAN;
    for (int64_t i = 0; i < in; ++i) {
      row(kZero)[i] = row(kLargest)[i] = row(kNegative)[i] = 0.0f;
      row(kLarge)[i] *= 0x1p119f;
      row(kSmall)[i] *= 0x1p-105f;  // the least terms are subnormal
      row(kTiny)[i] *= 0x1p-130f;   // values are subnormal
      row(kSpread)[i] = std::ldexp(row(kSpread)[i], static_cast<int>(check::uniform_int(-12, 12)));
    }
    row(kLargest)[in - 3] = std::numeric_limits<float>::max();
    row(kNegative)[5] = -std::numeric_limits<float>::max();
    const DeviceArray<float> dx(gpu, x);
    const Case c{{B}, {out}, in, kRows};
    const std::vector<float> found = run(gpu, c, weight, dx, none, 0, kRows)[0];
    std::vector<double> exact = check::product(stored, x.data(), in, kRows);
    for (double& v : exact) {
      if (std::fabs(v) > std::numeric_limits<float>::max()) v = std::copysign(INFINITY, v);
    }
    for (int r = 0; r < kRows; ++r) {
      const std::string what = title(c) + ", magnitudes of row " + std::to_string(r);
      const float* mine = found.data() + r * out;
      const double* right = exact.data() + r * out;
      if (r == kTiny) {
        // Terms keep x to 2^-133, float32 its sums to 2^-149.
        bool close = true;
        for (int64_t o = 0; o < out; ++o) {
          double bound = 0;
          for (int64_t i = 0; i < in; ++i)
            bound += std::fabs(stored.value[static_cast<size_t>(o * in + i)]) * 0x1p-133 + 0x1p-149;
          close = close && std::fabs(mine[o] - right[o]) <= bound;
        }
        check::expect(close, what);
      } else {
        check::close(what, mine, right, out, 2 * check::sum_limit(in));
      }
      for (const int32_t together : {1, 2, 3, 5, 8}) {
        if (gpu.small() && together != 3) continue;
        const int32_t first = std::min<int32_t>(r, kRows - together);
        const std::vector<float> part = run(gpu, c, weight, dx, none, first, together)[0];
        bool same = true;
        for (int64_t o = 0; o < out; ++o) {
          const float a = part[static_cast<size_t>((r - first) * out + o)], b = mine[o];
          same = same && (std::memcmp(&a, &b, sizeof(a)) == 0 || (std::isnan(a) && std::isnan(b)));
        }
        check::expect(same, what + ": the same bits among " + std::to_string(together));
      }
    }
  }
}

void tensor_cores(check::Gpu& gpu) {
  struct Shape {
    int64_t out, in;
  };
  for (const Shape& s : {Shape{1, 1}, Shape{9, 40}, Shape{65, 64}, Shape{130, 96}, Shape{128, 1024},
                         Shape{300, 1000}, Shape{2500, 544}, Shape{4200, 200}}) {
    for (const WeightFormat format : check::kFormats) {
      for (const int32_t rows : {9, 64, 65, 300}) {
        compare(gpu, {{format}, {s.out}, whole(format, s.in), rows, 0, 1, 0, true}, false);
        if (rows == 65 && s.out < 1000)
          compare(gpu, {{format}, {s.out}, whole(format, s.in), rows, 1, 0, 3, true}, false);
      }
    }
  }
}

// Products of many rows, again and again, their weights and scratch at other addresses each time: the bits are the same.
void again(check::Gpu& gpu) {
  for (const WeightFormat format : {WeightFormat::kBF16, WeightFormat::kNVFP4}) {
    for (const int64_t in : {64, 256, 1024, 4096}) {
      for (const int64_t out : {24, 256, 2048}) {
        for (const int32_t rows : {9, 40, 200}) {
          if (gpu.small() && (in != 256 || rows != 40)) continue;
          const Case c{{format, format}, {out, out + 8}, in, rows, 0, 0, 0, true};
          const DeviceArray<float> x(gpu, check::normal(rows * in));
          const StoredWeight stored[] = {check::random_weight(format, out, in, 0.3),
                                         check::random_weight(format, out + 8, in, 0.3)};
          const std::vector<std::unique_ptr<DeviceArray<float>>> none(2);
          std::vector<std::vector<float>> first;
          for (int i = 0; i < (gpu.small() ? 2 : 9); ++i) {
            std::vector<std::unique_ptr<DeviceWeight>> weight;
            for (const StoredWeight& s : stored)
              weight.push_back(std::make_unique<DeviceWeight>(gpu, s, 16 * i));
            ArenaScope scope(gpu.scratch);
            if (i > 0) gpu.scratch.take_bytes(static_cast<size_t>(64 * i));
            const auto found = run(gpu, c, weight, x, none, 0, rows);
            if (first.empty()) first = found;
            for (size_t part = 0; part < 2; ++part) {
              check::same_bits(title(c) + ", place " + std::to_string(i), found[part].data(),
                               first[part].data(), rows * c.out[part]);
            }
          }
        }
      }
    }
  }
}

// Unit rows pick one column each: every code under every scale comes out exactly, NaN codes as NaN in their sums only.
void codes(check::Gpu& gpu) {
  StoredWeight four(WeightFormat::kNVFP4, 256, 16), eight(WeightFormat::kMXFP8, 200, 256);
  for (int scale = 0; scale < 256; ++scale) {
    for (int k = 0; k < 8; ++k) four.bytes()[scale * 8 + k] = static_cast<uint8_t>(2 * k | (2 * k + 1) << 4);
    four.scales()[scale] = static_cast<uint8_t>(scale);
  }
  four.w.global_scale = 0.25f;
  for (int s = 0; s < 200; ++s) {
    for (int c = 0; c < 256; ++c)
      eight.bytes()[s * 256 + c] = static_cast<uint8_t>((c & 0x7f) == 0x7f ? 0 : c);
    for (int b = 0; b < 8; ++b) eight.scales()[s * 8 + b] = static_cast<uint8_t>(s + 30);
  }
  eight.bytes()[7 * 256 + 3] = 0x7f;
  for (StoredWeight* s : {&four, &eight}) {
    s->decode();
    const int64_t in = s->w.in;
    std::vector<float> x(static_cast<size_t>(in * in), 0.0f);
    for (int64_t i = 0; i < in; ++i) x[static_cast<size_t>(i * in + i)] = 1.0f;
    std::vector<double> expected = check::product(*s, x.data(), in, in);
    const DeviceArray<float> dx(gpu, x);
    std::vector<std::unique_ptr<DeviceWeight>> weight;
    weight.push_back(std::make_unique<DeviceWeight>(gpu, *s, 0));
    std::vector<std::unique_ptr<DeviceArray<float>>> none(1);
    for (const bool tensor : {false, true}) {
      const Case c{{s->w.format}, {s->w.out}, in, static_cast<int32_t>(in), 0, 0, 0, tensor};
      check::close(title(c) + ": all codes", run(gpu, c, weight, dx, none, 0, c.rows)[0].data(),
                   expected.data(), in * s->w.out, 0);
    }
  }
}

void heads(check::Gpu& gpu) {
  struct Shape {
    int32_t heads, stride, offset, per_head;
    int64_t in;
  };
  for (const Shape& s : {Shape{4, 80, 0, 48, 64}, Shape{4, 80, 48, 32, 64}, Shape{3, 21, 4, 17, 77},
                         Shape{1, 1, 0, 1, 1}, Shape{2, 300, 40, 260, 530}, Shape{6, 512, 0, 256, 512},
                         Shape{6, 512, 256, 256, 512}, Shape{2, 1200, 100, 1100, 264}}) {
    for (const WeightFormat format : {WeightFormat::kF32, WeightFormat::kBF16}) {
      for (const bool transposed : {false, true}) {
        for (const int64_t extra : {1, 4}) {
          if (!gpu.takes_case()) continue;
          const int64_t shift = extra == 1 && s.heads < 5 ? 1 : 0;
          const StoredWeight stored = check::random_weight(format, int64_t{s.heads} * s.stride, s.in);
          const DeviceWeight weight(gpu, stored, shift);
          const int64_t from = transposed ? s.per_head : s.in, to = transposed ? s.in : s.per_head;
          const int32_t most = 70;
          HeadLinearParams p{stored.w, s.heads, s.stride, s.offset, s.per_head, transposed};
          p.hx = from + extra, p.ldx = s.heads * p.hx + 4, p.hy = to + 3, p.ldy = s.heads * p.hy + 5;
          const std::vector<float> x = check::normal(most * p.ldx);
          const DeviceArray<float> dx(gpu, x);
          std::vector<float> expected(static_cast<size_t>(most * p.ldy), NAN);
          p.x = x.data(), p.y = expected.data(), p.rows = most;
          cpu_ops().head_linear(p, gpu.cpu.exec);
          p.w = weight.w;
          std::vector<float> first;
          for (const bool tensor : {false, true}) {
            for (const int32_t rows : {most, 1, 2, 3, 4, 7, 8, 16, 33}) {
              const int64_t n = (rows - 1) * p.ldy + (s.heads - 1) * p.hy + to;
              DeviceArray<float> y(gpu, n);
              p.x = dx.data(), p.y = y.data(), p.rows = rows;
              gpu.exec.tensor_cores = tensor;
              gpu.ops.head_linear(p, gpu.exec);
              gpu.exec.tensor_cores = false;
              const std::string what = std::string("head_linear") + (tensor ? ", tensor cores," : "") +
                                       (transposed ? " transposed " : " ") + check::format_name(format) +
                                       " " + std::to_string(rows) + " rows, " + std::to_string(s.heads) +
                                       " heads, " + std::to_string(s.per_head) + " of " +
                                       std::to_string(s.stride) + " x " + std::to_string(s.in) + ", shift " +
                                       std::to_string(shift);
              y.check(what);
              const std::vector<float> found = y.get();
              // NaN between heads and rows on both sides: what is written there differs.
              check::close(what, found.data(), expected.data(), n,
                           tensor ? tensor_limit(format, from)
                                  : check::sum_limit(from, transposed ? 1 : 16) + check::sum_limit(from));
              if (tensor) continue;
              if (first.empty()) first = found;
              std::vector<float> a, b;
              for (int64_t i = 0; i < n; ++i) {
                if (std::isnan(expected[static_cast<size_t>(i)])) continue;
                a.push_back(found[static_cast<size_t>(i)]), b.push_back(first[static_cast<size_t>(i)]);
              }
              check::same_bits(what, a.data(), b.data(), static_cast<int64_t>(a.size()));
            }
          }
        }
      }
    }
  }
}

// Nothing is read or written for no rows, nor where workspace is measured; both give their scratch back.
void nothing(check::Gpu& gpu) {
  LinearParams p;
  p.part_count = 1;
  p.ldx = 64;
  p.part[0].w = {WeightFormat::kBF16, 8, 64, nullptr, nullptr, 1.0f};
  p.part[0].ldy = 8;
  gpu.ops.linear(p, gpu.exec);
  Exec measure = gpu.exec;
  Arena arena = Arena::measuring();
  measure.scratch = &arena;
  measure.measure = measure.tensor_cores = true;
  p.rows = 100;
  gpu.ops.linear(p, measure);
  check::expect(arena.used() == 0 && arena.peak() >= 100 * 64 * 2, "linear: measures its scratch");
  gpu.backend->wait();
}

void all(check::Gpu& gpu) {
  again(gpu);
  codes(gpu);
  exact(gpu);
  parts(gpu);
  wide(gpu);
  magnitudes(gpu);
  tensor_cores(gpu);
  heads(gpu);
  nothing(gpu);
}

}  // namespace

int main() {
  return check::run_on_gpu("gpu_linear", all);
}
