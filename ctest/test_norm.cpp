// RMSNorm and LayerNorm against double precision.
#include "ops_check.h"

namespace {

using namespace rocket;

struct Case {
  int32_t rows, dim;
  bool layer;
  int64_t extra;    // floats between rows beyond dim
  double mean = 0;  // of the inputs
};

std::vector<double> reference(const Case& c, const std::vector<float>& x, int64_t ld,
                              const std::vector<float>& w, const std::vector<float>& b, double eps) {
  std::vector<double> y;
  for (int32_t r = 0; r < c.rows; ++r) {
    const float* row = x.data() + r * ld;
    double mean = 0, squares = 0;
    if (c.layer) {
      for (int32_t i = 0; i < c.dim; ++i) mean += row[i];
      mean /= c.dim;
    }
    for (int32_t i = 0; i < c.dim; ++i) squares += (row[i] - mean) * (row[i] - mean);
    const double scale = 1 / std::sqrt(squares / c.dim + eps);
    for (int32_t i = 0; i < c.dim; ++i) y.push_back((row[i] - mean) * scale * w[i] + (c.layer ? b[i] : 0));
  }
  return y;
}

void run(const OpTable& ops, const std::string& isa, const Case& c) {
  const std::string what = isa + (c.layer ? "LayerNorm" : "RMSNorm") + " rows " + std::to_string(c.rows) +
                           " dim " + std::to_string(c.dim) + (c.mean != 0 ? " far mean" : "");
  const int64_t ld = c.dim + c.extra;
  std::vector<float> x = check::normal(c.rows * ld);
  for (float& v : x) v += static_cast<float>(c.mean);
  const std::vector<float> w = check::normal(c.dim), b = check::normal(c.dim);
  NormParams params;
  NormPart& p = params.part[0];
  params.rows = c.rows;
  p.x = x.data();
  p.ldx = p.ldy = ld;
  p.dim = c.dim;
  p.weight = w.data();
  p.bias = c.layer ? b.data() : nullptr;
  p.eps = 1e-5f;
  check::Guarded<float> y(c.rows * ld);
  p.y = y.data();
  check::Bench bench(2);
  ops.norm(params, bench.exec);
  y.check(what);

  std::vector<float> found;
  for (int32_t r = 0; r < c.rows; ++r) {
    for (int64_t i = 0; i < ld; ++i) {
      if (i < c.dim) {
        found.push_back(y[r * ld + i]);
      } else {
        check::expect(std::isnan(y[r * ld + i]), what + ": wrote between its rows");
      }
    }
  }
  const std::vector<double> expected = reference(c, x, ld, w, b, p.eps);
  // The sum of squares (its error halved by the root), then about five roundings. Values around a far mean
  // have lost that many bits before the op sees them; subtracting a mean that is rounded at its own size
  // costs mean * kUnit.
  const double limit =
      check::rounding(check::lane_steps(c.dim) / 4 + 5) + 4 * std::fabs(c.mean) * check::kUnit;
  check::close(what, found.data(), expected.data(), static_cast<int64_t>(found.size()), limit);

  for (int threads = 1; threads <= 3; ++threads) {
    check::Bench other(threads);
    check::Guarded<float> z(c.rows * ld);
    for (int32_t r = 0; r < c.rows; ++r) {
      NormParams one = params;
      one.part[0].x = x.data() + r * ld;
      one.part[0].y = z.data() + r * ld;
      one.rows = 1;
      ops.norm(one, other.exec);
    }
    check::same_bits(what + ", row by row", z.data(), y.data(), z.size());
    // In place, beside the other kind of norm.
    std::vector<float> in_place = x, beside = x;
    NormParams both = params;
    both.part_count = 2;
    both.part[1] = p;
    both.part[0].x = both.part[0].y = in_place.data();
    both.part[1].x = both.part[1].y = beside.data();
    both.part[1].bias = c.layer ? nullptr : b.data();
    ops.norm(both, other.exec);
    for (int32_t r = 0; r < c.rows; ++r) {
      check::same_bits(what + ", in place", in_place.data() + r * ld, y.data() + r * ld, c.dim);
    }
  }
}

void nan_stays_in_its_row(const OpTable& ops, const std::string& isa) {
  constexpr int32_t kDim = 40;
  std::vector<float> x = check::normal(3 * kDim), w(kDim, 1.0f), y(3 * kDim);
  x[kDim + 39] = NAN;
  NormParams params;
  NormPart& p = params.part[0];
  params.rows = 3;
  p.x = x.data();
  p.y = y.data();
  p.ldx = p.ldy = p.dim = kDim;
  p.weight = w.data();
  check::Bench bench(2);
  ops.norm(params, bench.exec);
  for (int32_t i = 0; i < 3 * kDim; ++i) {
    check::expect(std::isnan(y[i]) == (i / kDim == 1),
                  isa + "a NaN spoils its own row, all of it, and no other");
  }
}

}  // namespace

int main() {
  check::on_each_isa([](const OpTable& ops, const std::string& isa) {
    for (const bool layer : {false, true}) {
      for (const Case& c :
           {Case{1, 1024, layer, 0}, Case{64, 256, layer, 5}, Case{7, 4096, layer, 0},
            Case{33, 100, layer, 3}, Case{5, 16, layer, 0}, Case{2, 7, layer, 1}, Case{3, 129, layer, 16}}) {
        run(ops, isa, c);
      }
    }
    run(ops, isa, {9, 128, true, 0, 1000.0});
    nan_stays_in_its_row(ops, isa);
  });
  return check::finish("norm");
}
