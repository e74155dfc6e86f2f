// swiglu, expert_ffn and expert_sum against double precision, and their bits against themselves.
#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "stored_weight.h"

using namespace rocket;
using check::StoredWeight;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

double reference_swiglu(double gate, double up, double limit) {
  const double g = std::isnan(gate) ? gate : std::min(gate, limit);
  const double u = std::isnan(up) ? up : std::max(-limit, std::min(up, limit));
  return g / (1.0 + std::exp(-g)) * u;
}

void swiglu_values() {
  const int32_t rows = 5;
  for (int32_t dim : {1, 15, 16, 33, 512}) {
    for (float limit : {10.0f, 0.5f, kInf}) {
      const int64_t ld = dim + 3, ldy = dim + 1;
      std::vector<float> gate = check::normal(rows * ld, 6.0), up = check::normal(rows * ld, 8.0);
      const float special[] = {-200.0f, 200.0f, -0.0f, -88.0f, -104.0f, 1e-30f, 1e30f};
      for (int i = 0; i < 7 && i < dim; ++i) gate[i] = special[i], up[ld + i] = special[i];
      std::vector<double> expected;
      for (int32_t r = 0; r < rows; ++r) {
        for (int32_t i = 0; i < dim; ++i)
          expected.push_back(reference_swiglu(gate[r * ld + i], up[r * ld + i], limit));
      }
      for (const std::string& isa : check::isas()) {
        check::Bench bench(2);
        check::Guarded<float> y(rows * ldy);
        SwigluParams p{gate.data(), up.data(), ld, rows, dim, limit, y.data(), ldy};
        cpu_ops(isa.c_str()).swiglu(p, bench.exec);
        const std::string what =
            isa + " swiglu, dim " + std::to_string(dim) + ", limit " + std::to_string(limit);
        y.check(what);
        std::vector<float> dense;
        for (int32_t r = 0; r < rows; ++r)
          dense.insert(dense.end(), y.data() + r * ldy, y.data() + r * ldy + dim);
        // A handful of roundings and an exp good to 2 units in the last place, on the largest value.
        check::close(what, dense.data(), expected.data(), rows * dim, 8 * std::ldexp(1.0, -24), 2.47e-03);

        std::vector<float> in_place = gate;
        p.gate = p.y = in_place.data();
        p.ldy = ld;
        cpu_ops(isa.c_str()).swiglu(p, bench.exec);
        for (int32_t r = 0; r < rows; ++r)
          check::same_bits(what + " in place", in_place.data() + r * ld, dense.data() + r * dim, dim);
      }
    }
  }
}

// A NaN that went in must come out: the clamp may not turn it into a limit.
void swiglu_nan() {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float gate[4] = {nan, 1.0f, nan, 2.0f}, up[4] = {1.0f, nan, nan, 2.0f};
  double expected[4];
  for (int i = 0; i < 4; ++i) expected[i] = reference_swiglu(gate[i], up[i], 10.0);
  for (const std::string& isa : check::isas()) {
    check::Bench bench(1);
    float y[4];
    cpu_ops(isa.c_str()).swiglu({gate, up, 4, 1, 4, 10.0f, y, 4}, bench.exec);
    check::close(isa + " swiglu of NaN", y, expected, 4, 8 * std::ldexp(1.0, -24));
  }
}

struct Model {
  int32_t hidden, inner, experts;
  std::vector<StoredWeight> gate, up, down;
  std::vector<ExpertWeights> table;

  // Experts of all the formats that the sizes allow, in turn, or of one.
  Model(int32_t hidden, int32_t inner, int32_t experts, const std::vector<WeightFormat>& formats)
      : hidden(hidden), inner(inner), experts(experts) {
    for (int32_t e = 0; e < experts; ++e) {
      const WeightFormat f = formats[e % formats.size()];
      gate.push_back(check::random_weight(f, inner, hidden, 0.1));
      up.push_back(check::random_weight(f, inner, hidden, 0.2));
      down.push_back(check::random_weight(f, hidden, inner, 0.1));
      table.push_back({gate[e].w, up[e].w, down[e].w});
    }
  }
};

struct Routing {
  std::vector<int32_t> id;
  std::vector<float> weight;
};

// Ascending distinct experts a row; every so often -1 (held elsewhere) in place of some.
Routing random_routing(int64_t rows, int32_t topk, int32_t experts, bool holes) {
  Routing routing;
  routing.id = check::routed_ids(rows, topk, experts, holes);
  routing.weight = check::normal(rows * topk);
  return routing;
}

std::vector<double> reference_ffn(const Model& m, const std::vector<float>& x, int64_t ldx, int64_t rows,
                                  int32_t topk, const Routing& routing, double limit) {
  std::vector<double> out(rows * topk * m.hidden, 0.0);
  for (int64_t pair = 0; pair < rows * topk; ++pair) {
    const int32_t e = routing.id[pair];
    if (e < 0) continue;
    const float* row = x.data() + pair / topk * ldx;
    const std::vector<double> gate = check::product(m.gate[e], row, 0, 1),
                              up = check::product(m.up[e], row, 0, 1);
    std::vector<double> act(m.inner);
    for (int32_t i = 0; i < m.inner; ++i) act[i] = reference_swiglu(gate[i], up[i], limit);
    for (int32_t o = 0; o < m.hidden; ++o) {
      double sum = 0;
      for (int32_t i = 0; i < m.inner; ++i)
        sum += act[i] * m.down[e].value[static_cast<int64_t>(o) * m.inner + i];
      out[pair * m.hidden + o] = sum * static_cast<double>(routing.weight[pair]);
    }
  }
  return out;
}

std::vector<float> run_ffn(const OpTable& ops, const Model& m, const float* x, int64_t ldx, int64_t rows,
                           int32_t topk, const int32_t* id, const float* weight, float limit, int threads,
                           const std::string& what) {
  check::Bench bench(threads, expert_ffn_scratch_bytes(rows, topk, m.experts, m.hidden, m.inner));
  check::Guarded<float> out(rows * topk * m.hidden);
  const ExpertFfnParams p{x,
                          ldx,
                          static_cast<int32_t>(rows),
                          topk,
                          id,
                          weight,
                          m.table.data(),
                          m.experts,
                          m.hidden,
                          m.inner,
                          limit,
                          out.data()};
  ops.expert_ffn(p, bench.exec);
  out.check(what);
  check::expect(bench.scratch.used() == 0, what + ": scratch is given back");
  check::expect(static_cast<int64_t>(bench.scratch.peak()) <=
                    expert_ffn_scratch_bytes(rows, topk, m.experts, m.hidden, m.inner),
                what + ": scratch within what the header says");
  return std::vector<float>(out.data(), out.data() + out.size());
}

// The same through linear and swiglu, one pair at a time: must give the same bits.
std::vector<float> composed_ffn(const OpTable& ops, const Model& m, const float* x, int64_t ldx, int64_t rows,
                                int32_t topk, const Routing& routing, float limit) {
  check::Bench bench(1);
  std::vector<float> out(rows * topk * m.hidden, 0.0f), gate(m.inner), up(m.inner);
  for (int64_t pair = 0; pair < rows * topk; ++pair) {
    const int32_t e = routing.id[pair];
    if (e < 0) continue;
    LinearParams p;
    p.x = x + pair / topk * ldx;
    p.ldx = ldx;
    p.rows = 1;
    p.part_count = 2;
    p.part[0] = {m.table[e].gate, gate.data(), m.inner, nullptr};
    p.part[1] = {m.table[e].up, up.data(), m.inner, nullptr};
    ops.linear(p, bench.exec);
    ops.swiglu({gate.data(), up.data(), m.inner, 1, m.inner, limit, gate.data(), m.inner}, bench.exec);
    float* y = out.data() + pair * m.hidden;
    p.x = gate.data();
    p.ldx = m.inner;
    p.part_count = 1;
    p.part[0] = {m.table[e].down, y, m.hidden, nullptr};
    ops.linear(p, bench.exec);
    for (int32_t o = 0; o < m.hidden; ++o) y[o] *= routing.weight[pair];
  }
  return out;
}

void ffn_case(const std::string& name, const Model& m, int64_t rows, int32_t topk, float limit, bool holes,
              double seed_figure) {
  const int64_t ldx = m.hidden + 5;
  const std::vector<float> x = check::normal(rows * ldx);
  const Routing routing = random_routing(rows, topk, m.experts, holes);
  const std::vector<double> expected = reference_ffn(m, x, ldx, rows, topk, routing, limit);
  const int64_t n = rows * topk * m.hidden;
  std::vector<float> fused[2];
  for (const std::string& isa : check::isas()) {
    const OpTable& ops = cpu_ops(isa.c_str());
    const std::string what = isa + " " + name + " " + std::to_string(rows) + " rows, top " +
                             std::to_string(topk) + " of " + std::to_string(m.experts);
    const std::vector<float> out =
        run_ffn(ops, m, x.data(), ldx, rows, topk, routing.id.data(), routing.weight.data(), limit, 2, what);
    // Three sums in a row and exp: their limits add; SwiGLU passes an error of gate on to act with a factor
    // of about 1.1 of |gate| <= limit, and of up with at most |silu(gate)|, both within twice the scale of
    // act.
    check::close(what, out.data(), expected.data(), n,
                 4 * check::sum_limit(m.hidden) + check::sum_limit(m.inner), seed_figure);
    check::same_bits(what + ": linear and swiglu apart", out.data(),
                     composed_ffn(ops, m, x.data(), ldx, rows, topk, routing, limit).data(), n);
    for (int64_t pair = 0; pair < rows * topk; ++pair) {
      if (routing.id[pair] >= 0) continue;
      for (int32_t o = 0; o < m.hidden; ++o) {
        const float v = out[pair * m.hidden + o];
        if (v != 0 || std::signbit(v)) check::expect(false, what + ": the row of an absent expert is not +0");
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      const std::vector<float> alone =
          run_ffn(ops, m, x.data() + r * ldx, ldx, 1, topk, routing.id.data() + r * topk,
                  routing.weight.data() + r * topk, limit, 1 + static_cast<int>(r % 3), what);
      check::same_bits(what + ": row " + std::to_string(r) + " alone", alone.data(),
                       out.data() + r * topk * m.hidden, topk * m.hidden);
    }
    for (int threads : {1, 3}) {
      const std::vector<float> other = run_ffn(ops, m, x.data(), ldx, rows, topk, routing.id.data(),
                                               routing.weight.data(), limit, threads, what);
      check::same_bits(what + ": " + std::to_string(threads) + " threads", other.data(), out.data(), n);
    }
    if (isa == "avx2") fused[0] = out;
    if (isa == "avx512") fused[1] = out;
  }
  if (!fused[0].empty() && !fused[1].empty())
    check::same_bits(name + ": avx2 and avx512", fused[0].data(), fused[1].data(), n);
}

// Experts in waves: each call computes its own pairs and leaves the others' alone.
void kept_rows() {
  const Model m(96, 64, 6, {WeightFormat::kNVFP4, WeightFormat::kBF16});
  const int64_t rows = 9, n = rows * 3 * m.hidden;
  const std::vector<float> x = check::normal(rows * m.hidden);
  const Routing routing = random_routing(rows, 3, m.experts, false);
  for (const std::string& isa : check::isas()) {
    const OpTable& ops = cpu_ops(isa.c_str());
    const std::string what = isa + " expert_ffn in waves";
    const std::vector<float> whole = run_ffn(ops, m, x.data(), m.hidden, rows, 3, routing.id.data(),
                                             routing.weight.data(), 10.0f, 2, what);
    check::Bench bench(2, expert_ffn_scratch_bytes(rows, 3, m.experts, m.hidden, m.inner));
    check::Guarded<float> out(n);
    for (int32_t wave = 0; wave < 3; ++wave) {
      std::vector<int32_t> id = routing.id;
      for (int32_t& e : id) e = e % 3 == wave ? e : -1;
      ExpertFfnParams p{x.data(),
                        m.hidden,
                        static_cast<int32_t>(rows),
                        3,
                        id.data(),
                        routing.weight.data(),
                        m.table.data(),
                        m.experts,
                        m.hidden,
                        m.inner,
                        10.0f,
                        out.data()};
      p.keep_absent = true;
      ops.expert_ffn(p, bench.exec);
    }
    out.check(what);
    check::same_bits(what, out.data(), whole.data(), n);
  }
}

void ffn_values() {
  const std::vector<WeightFormat> every(check::kFormats, check::kFormats + 5);
  for (WeightFormat format : check::kFormats) {
    const Model m(96, 64, 6, {format});
    const std::string name = std::string("expert_ffn ") + check::format_name(format);
    const double figure = format == WeightFormat::kNVFP4 ? 2.27e-03 : 0;
    ffn_case(name, m, 1, 4, 10.0f, false, figure);
    ffn_case(name, m, 3, 2, 0.25f, true, figure);
    ffn_case(name, m, 41, 3, kInf, true, figure);
  }
  const Model odd(37, 19, 5, {WeightFormat::kF32, WeightFormat::kBF16});
  ffn_case("expert_ffn odd sizes", odd, 1, 5, 10.0f, false, 0);
  ffn_case("expert_ffn odd sizes", odd, 23, 3, 10.0f, true, 0);
  const Model mixed(288, 160, 9, every);
  ffn_case("expert_ffn mixed formats", mixed, 1, 8, 10.0f, true, 0);
  ffn_case("expert_ffn mixed formats", mixed, 67, 8, 10.0f, true, 0);
  // Wider than a chunk of columns.
  const Model wide(1312, 544, 2, {WeightFormat::kNVFP4, WeightFormat::kBF16});
  ffn_case("expert_ffn wide", wide, 9, 2, 10.0f, false, 0);
  // More channels than gate and up hold for one row.
  const Model deep(32, 4176, 2, {WeightFormat::kNVFP4, WeightFormat::kF32});
  ffn_case("expert_ffn deep", deep, 2, 1, 10.0f, false, 0);
}

// All rows choose the same expert; most experts have no row; every id is -1; no rows.
void ffn_edges() {
  const Model m(64, 48, 40, {WeightFormat::kNVFP4});
  const int64_t rows = 300;
  const std::vector<float> x = check::normal(rows * m.hidden);
  Routing routing;
  routing.id.assign(rows, 17);
  routing.weight = check::normal(rows);
  const std::vector<double> expected = reference_ffn(m, x, m.hidden, rows, 1, routing, 10.0);
  for (const std::string& isa : check::isas()) {
    const OpTable& ops = cpu_ops(isa.c_str());
    const std::vector<float> out =
        run_ffn(ops, m, x.data(), m.hidden, rows, 1, routing.id.data(), routing.weight.data(), 10.0f, 2, isa);
    check::close(isa + " expert_ffn, one expert for all rows", out.data(), expected.data(), rows * m.hidden,
                 4 * check::sum_limit(m.hidden) + check::sum_limit(m.inner));
    const std::vector<int32_t> absent(rows, -1);
    const std::vector<float> zero =
        run_ffn(ops, m, x.data(), m.hidden, rows, 1, absent.data(), routing.weight.data(), 10.0f, 2, isa);
    check::equal(isa + " expert_ffn, no expert here", zero.data(),
                 std::vector<float>(zero.size(), 0.0f).data(), static_cast<int64_t>(zero.size()));
    check::Bench bench(1);
    ops.expert_ffn(ExpertFfnParams{}, bench.exec);
  }
}

void sums() {
  for (int32_t topk : {1, 2, 8}) {
    for (int32_t hidden : {1, 16, 77}) {
      const int32_t rows = 6;
      std::vector<float> out = check::normal(static_cast<int64_t>(rows) * topk * hidden),
                         shared = check::normal(rows * hidden);
      // Large terms that cancel: another order gives other bits.
      for (int32_t r = 0; r < rows && topk > 1; ++r)
        out[r * topk * hidden] = 1e8f, out[(r * topk + topk - 1) * hidden] = -1e8f;
      for (bool with_shared : {true, false}) {
        std::vector<float> expected(rows * hidden);
        for (int32_t r = 0; r < rows; ++r) {
          for (int32_t o = 0; o < hidden; ++o) {
            float s = out[r * topk * hidden + o];
            for (int32_t j = 1; j < topk; ++j) s += out[(r * topk + j) * hidden + o];
            expected[r * hidden + o] = with_shared ? s + shared[r * hidden + o] : s;
          }
        }
        for (const std::string& isa : check::isas()) {
          check::Bench bench(2);
          const std::string what =
              isa + " expert_sum, top " + std::to_string(topk) + ", hidden " + std::to_string(hidden);
          check::Guarded<float> y(rows * hidden);
          ExpertSumParams p{out.data(), with_shared ? shared.data() : nullptr, rows, topk, hidden, y.data()};
          cpu_ops(isa.c_str()).expert_sum(p, bench.exec);
          y.check(what);
          check::same_bits(what, y.data(), expected.data(), rows * hidden);
          if (!with_shared) continue;
          std::vector<float> in_place = shared;
          p.shared = p.y = in_place.data();
          cpu_ops(isa.c_str()).expert_sum(p, bench.exec);
          check::same_bits(what + " in place", in_place.data(), expected.data(), rows * hidden);
        }
      }
    }
  }
  check::Bench bench(1);
  cpu_ops().expert_sum(ExpertSumParams{}, bench.exec);
  cpu_ops().swiglu(SwigluParams{}, bench.exec);
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
  Model m(32, 16, 2, {WeightFormat::kBF16});
  check::Bench bench(1);
  std::vector<float> x(32, 1.0f), out(64);
  const float weight[2] = {1, 1};
  int32_t id[2] = {0, 2};
  ExpertFfnParams p{x.data(), 32, 1, 2, id, weight, m.table.data(), 2, 32, 16, 10.0f, out.data()};
  const auto call = [&] { cpu_ops().expert_ffn(p, bench.exec); };
  expect_error("expert id past the table", call, "found 2");
  id[1] = -2;
  expect_error("expert id below -1", call, "found -2");
  id[1] = 1;
  m.table[1].down.in = 8;
  expect_error("inner size of down", call, "expected 16, found 8");
  m.table[1].down.in = 16;
  m.table[1].up.in = 16;
  expect_error("hidden size of up", call, "expected 32, found 16");
}

}  // namespace

int main() {
  swiglu_values();
  swiglu_nan();
  ffn_values();
  kept_rows();
  ffn_edges();
  sums();
  refusals();
  return check::finish("experts");
}
