// Hyper-connections against double precision: mix logits, Sinkhorn, collapse, expand, head mean.
#include <algorithm>

#include "ops_check.h"

namespace {

using namespace rocket;
using Doubles = std::vector<double>;

struct Case {
  int32_t rows, streams, hidden;
  bool bf16 = false;
  int shift = 0;         // bytes that fn lies off its alignment
  float comb_scale = 1;  // large: logits that Sinkhorn balances slowly
};

struct Inputs {
  std::vector<float> x, base, scale, norm_weight, fn;
  std::vector<uint8_t> stored;
  HyperPreParams p;
};

Inputs inputs(const Case& c) {
  Inputs in;
  const int64_t flat = static_cast<int64_t>(c.streams) * c.hidden, outputs = c.streams * (c.streams + 2);
  in.x = check::normal(c.rows * flat, 3.0);
  in.fn = check::normal(outputs * flat, 1 / std::sqrt(static_cast<double>(flat)));
  in.base = check::normal(outputs, 0.5);
  in.scale = {0.7f, 1.3f, c.comb_scale};
  in.norm_weight = check::normal(c.hidden);
  in.stored.resize(in.fn.size() * 4 + 8);
  for (size_t i = 0; i < in.fn.size(); ++i) {
    const uint16_t half = f32_to_bf16(in.fn[i]);
    if (c.bf16) in.fn[i] = bf16_to_f32(half);
    if (c.bf16)
      std::memcpy(in.stored.data() + c.shift + 2 * i, &half, 2);
    else
      std::memcpy(in.stored.data() + c.shift + 4 * i, &in.fn[i], 4);
  }
  HyperPreParams& p = in.p;
  p.x = in.x.data();
  p.rows = c.rows;
  p.streams = c.streams;
  p.hidden = c.hidden;
  p.fn = Weight{c.bf16 ? WeightFormat::kBF16 : WeightFormat::kF32, outputs, flat, in.stored.data() + c.shift};
  p.base = in.base.data();
  p.scale = in.scale.data();
  p.norm_weight = in.norm_weight.data();
  return in;
}

struct Outputs {
  Outputs(const Case& c, HyperPreParams p, const OpTable& ops, check::Bench& bench, const std::string& what)
      : y(static_cast<int64_t>(c.rows) * c.hidden),
        post(c.rows * c.streams),
        comb(c.rows * c.streams * c.streams),
        mix(c.rows * c.streams * (c.streams + 2)) {
    point(p);
    ops.hyper_pre(p, bench.exec);
    guards(what);
  }
  explicit Outputs(const Case& c)
      : y(static_cast<int64_t>(c.rows) * c.hidden),
        post(c.rows * c.streams),
        comb(c.rows * c.streams * c.streams),
        mix(c.rows * c.streams * (c.streams + 2)) {}
  void point(HyperPreParams& p) {
    p.y = y.data();
    p.post = post.data();
    p.comb = comb.data();
    p.mix = mix.data();
  }
  void guards(const std::string& what) {
    y.check(what + " y");
    post.check(what + " post");
    comb.check(what + " comb");
    mix.check(what + " mix");
  }
  check::Guarded<float> y, post, comb, mix;
};

void sinkhorn(double* m, int n, double eps, int iters) {
  const auto rows = [&] {
    for (int i = 0; i < n; ++i) {
      double s = eps;
      for (int j = 0; j < n; ++j) s += m[i * n + j];
      for (int j = 0; j < n; ++j) m[i * n + j] /= s;
    }
  };
  const auto columns = [&] {
    for (int j = 0; j < n; ++j) {
      double s = eps;
      for (int i = 0; i < n; ++i) s += m[i * n + j];
      for (int i = 0; i < n; ++i) m[i * n + j] /= s;
    }
  };
  for (int it = 0; it < iters; ++it) {
    if (it > 0) rows();
    columns();
  }
}

Doubles mix_reference(const Inputs& in) {
  const HyperPreParams& p = in.p;
  const int64_t flat = static_cast<int64_t>(p.streams) * p.hidden;
  Doubles mix;
  for (int32_t r = 0; r < p.rows; ++r) {
    const float* x = p.x + r * flat;
    double squares = 0;
    for (int64_t i = 0; i < flat; ++i) squares += static_cast<double>(x[i]) * x[i];
    const double scale = 1 / std::sqrt(squares / flat + p.rms_eps);
    for (int64_t o = 0; o < p.fn.out; ++o) {
      double w = 0;
      for (int64_t i = 0; i < flat; ++i) w += x[i] * scale * in.fn[o * flat + i];
      mix.push_back(w);
    }
  }
  return mix;
}

struct Reference {
  Doubles y, post, comb;
  double largest = 0;  // argument of sigmoid or exp
};

// From the mix logits that the op itself found, so that each part is held to its own rounding.
Reference reference(const Inputs& in, const float* mix) {
  const HyperPreParams& p = in.p;
  const int n = p.streams;
  const int64_t flat = static_cast<int64_t>(n) * p.hidden;
  Reference ref;
  for (int32_t r = 0; r < p.rows; ++r) {
    const float* x = p.x + r * flat;
    const Doubles w(mix + r * p.fn.out, mix + (r + 1) * p.fn.out);
    Doubles pre(n), comb(n * n);
    for (int64_t o = 0; o < p.fn.out; ++o) {
      ref.largest = std::max(ref.largest, std::fabs(p.scale[o < n       ? 0
                                                            : o < 2 * n ? 1
                                                                        : 2] *
                                                        w[o] +
                                                    p.base[o]));
    }
    for (int i = 0; i < n; ++i) {
      pre[i] = check::sigmoid(p.scale[0] * w[i] + p.base[i]) + p.hc_eps;
      ref.post.push_back(2 * check::sigmoid(p.scale[1] * w[n + i] + p.base[n + i]));
      double total = 0;
      for (int j = 0; j < n; ++j) {
        const int at = 2 * n + i * n + j;
        total += comb[i * n + j] = std::exp(p.scale[2] * w[at] + p.base[at]);
      }
      for (int j = 0; j < n; ++j) comb[i * n + j] = comb[i * n + j] / total + p.hc_eps;
    }
    sinkhorn(comb.data(), n, p.hc_eps, p.sinkhorn_iters);
    Doubles c(p.hidden);
    double power = 0;
    for (int32_t h = 0; h < p.hidden; ++h) {
      for (int i = 0; i < n; ++i) c[h] += pre[i] * x[i * p.hidden + h];
      power += c[h] * c[h];
    }
    for (int32_t h = 0; h < p.hidden; ++h) {
      ref.y.push_back(c[h] / std::sqrt(power / p.hidden + p.rms_eps) * p.norm_weight[h]);
    }
    ref.comb.insert(ref.comb.end(), comb.begin(), comb.end());
  }
  return ref;
}

// Largest distance of a row or column sum from 1.
template <typename T>
double stray(const T* comb, int64_t matrices, int n) {
  double worst = 0;
  for (int64_t m = 0; m < matrices; ++m) {
    for (int i = 0; i < n; ++i) {
      double row = 0, column = 0;
      for (int j = 0; j < n; ++j) {
        row += comb[(m * n + i) * n + j];
        column += comb[(m * n + j) * n + i];
      }
      worst = std::max({worst, std::fabs(row - 1), std::fabs(column - 1)});
    }
  }
  return worst;
}

void check_pre(const OpTable& ops, const std::string& isa, const Case& c) {
  const std::string what = isa + "pre rows " + std::to_string(c.rows) + " N " + std::to_string(c.streams) +
                           " H " + std::to_string(c.hidden) + (c.bf16 ? " bf16" : "") +
                           (c.comb_scale > 2     ? " peaked"
                            : c.comb_scale < 0.5 ? " tame"
                                                 : "");
  Inputs in = inputs(c);
  check::Bench bench(2);
  Outputs out(c, in.p, ops, bench, what);
  const Doubles logits = mix_reference(in);
  const Reference ref = reference(in, out.mix.data());
  // A sum over the flattened axis, in blocks of at least 2048 (at most 16 of them).
  const int64_t flat = static_cast<int64_t>(c.streams) * c.hidden;
  check::close(what + ": mix logits", out.mix.data(), logits.data(), out.mix.size(),
               check::rounding(check::lane_steps(std::min<int64_t>(flat, 2048)) + 16), 8.35e-07);
  // An argument z of sigmoid or exp is off by up to z kUnit; exp and the division of the softmax add about
  // six roundings. Each half-step of Sinkhorn divides by what it has just summed, so errors do not pile up: N
  // additions, a division.
  const double argument = ref.largest * check::kUnit, late = argument + check::rounding(c.streams + 8);
  check::close(what + ": post", out.post.data(), ref.post.data(), out.post.size(), late);
  check::close(what + ": comb", out.comb.data(), ref.comb.data(), out.comb.size(), late, 3.14e-07);
  check::close(what + ": normed input", out.y.data(), ref.y.data(), out.y.size(),
               argument + check::rounding(check::lane_steps(c.hidden) / 4 + c.streams + 12));

  // Dividing by (sum + eps) leaves sums of sum / (sum + eps), that is 1 - eps: the distance from 1 is eps and
  // what float32 adds, plus what twenty rounds have not yet balanced where logits differ much; the double
  // reference shows that.
  const double apart = stray(out.comb.data(), c.rows, c.streams),
               exact = stray(ref.comb.data(), c.rows, c.streams);
  std::printf("      %-58s %.2e  in double %.2e  (published: 9.9e-07)\n",
              (what + ": sums differ from 1 by").c_str(), apart, exact);
  check::expect(apart <= exact + late, what + ": as doubly stochastic as in double");
  if (c.comb_scale < 0.5) check::expect(apart <= in.p.hc_eps + late, what + ": doubly stochastic");
}

void check_bits(const OpTable& ops, const std::string& isa, const Case& c) {
  const std::string what = isa + "pre rows " + std::to_string(c.rows) + " N " + std::to_string(c.streams) +
                           " H " + std::to_string(c.hidden) + ", bits";
  Inputs in = inputs(c);
  check::Bench bench(2);
  Outputs whole(c, in.p, ops, bench, what);
  for (const int32_t chunk : {1, 3, 7, 0}) {
    check::Bench other(1 + chunk % 3);
    Outputs parts(c);
    const std::vector<int32_t> cut = check::cuts(c.rows, chunk);
    for (size_t i = 0; i + 1 < cut.size(); ++i) {
      HyperPreParams p = in.p;
      parts.point(p);
      const int64_t r = cut[i], n = c.streams;
      p.rows = cut[i + 1] - cut[i];
      p.x += r * n * c.hidden;
      p.y += r * c.hidden;
      p.post += r * n;
      p.comb += r * n * n;
      p.mix = nullptr;
      ops.hyper_pre(p, other.exec);
    }
    check::same_bits(what + " y", parts.y.data(), whole.y.data(), whole.y.size());
    check::same_bits(what + " post", parts.post.data(), whole.post.data(), whole.post.size());
    check::same_bits(what + " comb", parts.comb.data(), whole.comb.data(), whole.comb.size());
  }
}

void check_post(const OpTable& ops, const std::string& isa, const Case& c) {
  const std::string what = isa + "post rows " + std::to_string(c.rows) + " N " + std::to_string(c.streams) +
                           " H " + std::to_string(c.hidden);
  const int n = c.streams;
  const int64_t flat = static_cast<int64_t>(n) * c.hidden;
  const std::vector<float> old = check::normal(c.rows * flat), block = check::normal(c.rows * c.hidden);
  const std::vector<float> post = check::normal(c.rows * n), comb = check::normal(c.rows * n * n);
  check::Guarded<float> x(c.rows * flat);
  std::memcpy(x.data(), old.data(), old.size() * sizeof(float));
  HyperPostParams p;
  p.x = p.y = x.data();
  p.block = block.data();
  p.post = post.data();
  p.comb = comb.data();
  p.rows = c.rows;
  p.streams = n;
  p.hidden = c.hidden;
  check::Bench bench(3);
  ops.hyper_post(p, bench.exec);
  x.check(what);
  Doubles expected;
  for (int32_t r = 0; r < c.rows; ++r) {
    for (int j = 0; j < n; ++j) {
      for (int32_t h = 0; h < c.hidden; ++h) {
        double s = static_cast<double>(post[r * n + j]) * block[r * c.hidden + h];
        for (int m = 0; m < n; ++m) {
          s += static_cast<double>(comb[(r * n + m) * n + j]) * old[r * flat + m * c.hidden + h];
        }
        expected.push_back(s);
      }
    }
  }
  check::close(what, x.data(), expected.data(), x.size(), check::rounding(n + 1));  // one rounding a term
  for (int threads = 1; threads <= 3; ++threads) {
    check::Bench other(threads);
    std::vector<float> again = old;
    for (int32_t r = 0; r < c.rows; ++r) {
      HyperPostParams one = p;
      one.x = one.y = again.data() + r * flat;
      one.block += r * c.hidden;
      one.post += r * n;
      one.comb += r * n * n;
      one.rows = 1;
      ops.hyper_post(one, other.exec);
    }
    check::same_bits(what + ", row by row", again.data(), x.data(), x.size());
  }
}

// hyper_pre with the block before, against one after the other.
void check_both(const OpTable& ops, const std::string& isa, const Case& c) {
  const std::string what = isa + "post and pre rows " + std::to_string(c.rows) + " N " +
                           std::to_string(c.streams) + " H " + std::to_string(c.hidden);
  Inputs in = inputs(c);
  const std::vector<float> block = check::normal(c.rows * c.hidden);
  const std::vector<float> post = check::normal(c.rows * c.streams);
  const std::vector<float> comb = check::normal(c.rows * c.streams * c.streams);
  const auto start = [&](Outputs& out, HyperPreParams& p) {
    std::copy(post.begin(), post.end(), out.post.data());
    std::copy(comb.begin(), comb.end(), out.comb.data());
    out.point(p);
    p.block = block.data();
  };
  check::Bench bench(2);
  Outputs apart(c), both(c);
  check::Guarded<float> next(static_cast<int64_t>(in.x.size()));
  HyperPreParams p = in.p;
  start(both, p);
  p.next = next.data();
  ops.hyper_pre(p, bench.exec);
  both.guards(what);
  next.check(what + " next");

  std::vector<float> x = in.x;
  p = in.p;
  p.x = p.next = x.data();
  start(apart, p);
  ops.hyper_post(post_before(p), bench.exec);
  p.block = nullptr;
  ops.hyper_pre(p, bench.exec);
  check::same_bits(what + ": x'", next.data(), x.data(), next.size());
  check::same_bits(what + ": y", both.y.data(), apart.y.data(), apart.y.size());
  check::same_bits(what + ": post", both.post.data(), apart.post.data(), apart.post.size());
  check::same_bits(what + ": comb", both.comb.data(), apart.comb.data(), apart.comb.size());
}

void check_head(const OpTable& ops, const std::string& isa, const Case& c) {
  const std::string what = isa + "head rows " + std::to_string(c.rows) + " N " + std::to_string(c.streams) +
                           " H " + std::to_string(c.hidden);
  const int64_t flat = static_cast<int64_t>(c.streams) * c.hidden;
  const std::vector<float> x = check::normal(c.rows * flat), w = check::normal(c.hidden);
  std::vector<int32_t> index;
  for (int32_t r = c.rows - 1; r >= 0; r -= 2) index.push_back(r);
  check::Guarded<float> y(index.size() * c.hidden);
  HyperHeadParams p;
  p.x = x.data();
  p.row_index = index.data();
  p.rows = static_cast<int32_t>(index.size());
  p.streams = c.streams;
  p.hidden = c.hidden;
  p.norm_weight = w.data();
  p.y = y.data();
  check::Bench bench(2);
  ops.hyper_head(p, bench.exec);
  y.check(what);
  Doubles expected;
  for (const int32_t r : index) {
    Doubles m(c.hidden);
    double squares = 0;
    for (int32_t h = 0; h < c.hidden; ++h) {
      for (int n = 0; n < c.streams; ++n) m[h] += x[r * flat + n * c.hidden + h];
      m[h] /= c.streams;
      squares += m[h] * m[h];
    }
    for (int32_t h = 0; h < c.hidden; ++h)
      expected.push_back(m[h] / std::sqrt(squares / c.hidden + p.rms_eps) * w[h]);
  }
  check::close(what, y.data(), expected.data(), y.size(),
               check::rounding(check::lane_steps(c.hidden) / 4 + 2 * c.streams + 5));
}

void nan_stays_in_its_row(const OpTable& ops, const std::string& isa) {
  const Case c{6, 4, 64};
  Inputs in = inputs(c);
  in.x[3 * 256 + 100] = NAN;
  check::Bench bench(2);
  Outputs out(c, in.p, ops, bench, isa + "NaN");
  for (int64_t i = 0; i < out.y.size(); ++i) {
    check::expect(std::isnan(out.y[i]) == (i / 64 == 3), isa + "a NaN spoils its own row and no other");
  }
  for (int64_t i = 0; i < out.comb.size(); ++i)
    check::expect(std::isnan(out.comb[i]) == (i / 16 == 3), isa + "NaN in comb");
}

}  // namespace

int main() {
  check::on_each_isa([](const OpTable& ops, const std::string& isa) {
    for (const Case& c :
         {Case{1, 4, 1024}, Case{3, 4, 256, true, 1}, Case{64, 4, 100, false, 3}, Case{5, 4, 4096, true},
          Case{19, 3, 37, true}, Case{2, 8, 640}, Case{4, 2, 7}, Case{1, 1, 48}, Case{33, 4, 64, false, 0, 8},
          Case{32, 4, 512, false, 0, 0.3f}, Case{16, 8, 128, true, 0, 0.3f}}) {
      check_pre(ops, isa, c);
    }
    for (const Case& c : {Case{37, 4, 1024}, Case{20, 4, 100, true}, Case{9, 3, 2048}})
      check_bits(ops, isa, c);
    for (const Case& c : {Case{1, 4, 4096}, Case{64, 4, 100}, Case{40, 4, 1024}, Case{7, 3, 37},
                          Case{2, 8, 1030}, Case{3, 1, 5}}) {
      check_post(ops, isa, c);
      check_both(ops, isa, c);
      check_head(ops, isa, c);
    }
    nan_stays_in_its_row(ops, isa);
  });
  return check::finish("hyper_connection");
}
