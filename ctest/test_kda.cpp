// KDA against double precision: convolution and its tail, gates, recurrence with state and checkpoints, gated
// norm.
#include <algorithm>

#include "ops_check.h"

namespace {

using namespace rocket;
using Doubles = std::vector<double>;
using Floats = std::vector<float>;

// Rows of several streams as steps: each step takes the next rows of some streams.
struct Plan {
  int32_t streams;
  int32_t rows;   // of each stream
  int32_t chunk;  // rows a step takes of a stream: > 0 fixed, 0 random, -1 all
  int threads;
};

struct StepRows {
  std::vector<Segment> segment;
  std::vector<int32_t> stream;  // [segments]
  std::vector<int64_t> source;  // [rows] row of the whole input: stream * rows + position
};

std::vector<StepRows> steps(const Plan& plan) {
  std::vector<std::vector<int32_t>> cut;
  size_t most = 0;
  for (int32_t s = 0; s < plan.streams; ++s) {
    cut.push_back(check::cuts(plan.rows, plan.chunk));
    most = std::max(most, cut.back().size());
  }
  std::vector<StepRows> all;
  for (size_t i = 0; i + 1 < most; ++i) {
    StepRows step;
    for (int32_t s = 0; s < plan.streams; ++s) {
      if (i + 1 >= cut[s].size()) continue;
      const int32_t from = cut[s][i], to = cut[s][i + 1];
      step.segment.push_back({static_cast<int32_t>(step.source.size()), to - from, from});
      step.stream.push_back(s);
      for (int32_t r = from; r < to; ++r) step.source.push_back(static_cast<int64_t>(s) * plan.rows + r);
    }
    all.push_back(step);
  }
  return all;
}

Floats gather(const Floats& from, const std::vector<int64_t>& row, int64_t width) {
  Floats out;
  for (const int64_t r : row) out.insert(out.end(), from.begin() + r * width, from.begin() + (r + 1) * width);
  return out;
}

// --- convolution ---

struct ConvCase {
  int32_t streams, rows, channels, taps;
};

struct ConvResult {
  Floats y, tail, checkpoint;  // [streams * rows, C], [streams, taps-1, C], [streams * rows, taps-1, C]
};

ConvResult run_conv(const OpTable& ops, const ConvCase& c, const Plan& plan, const Floats& x, const Floats& w,
                    const Floats& tail, const std::string& what) {
  const int64_t width = c.channels, tail_size = (c.taps - 1) * width, ldx = width + 3, ldy = width + 1;
  ConvResult out{Floats(x.size()), tail, Floats(c.streams * c.rows * tail_size)};
  check::Bench bench(plan.threads);
  for (const StepRows& step : steps(plan)) {
    const int64_t rows = static_cast<int64_t>(step.source.size());
    Floats in(rows * ldx, NAN);
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(in.data() + r * ldx, x.data() + step.source[r] * width, width * sizeof(float));
    }
    check::Guarded<float> y(rows * ldy), saved(rows * tail_size);
    std::vector<float*> tails, checkpoints;
    for (const int32_t s : step.stream) tails.push_back(out.tail.data() + s * tail_size);
    for (int64_t r = 0; r < rows; ++r)
      checkpoints.push_back(r % 3 == 2 ? nullptr : saved.data() + r * tail_size);
    KdaConvParams p;
    p.x = in.data();
    p.ldx = ldx;
    p.weight = w.data();
    p.channels = c.channels;
    p.taps = c.taps;
    p.rows = static_cast<int32_t>(rows);
    p.segment = step.segment.data();
    p.segments = static_cast<int32_t>(step.segment.size());
    p.tail = {tails.data(), 0};
    p.checkpoint = {checkpoints.data(), 0};
    p.y = y.data();
    p.ldy = ldy;
    ops.kda_conv(p, bench.exec);
    y.check(what);
    saved.check(what + " checkpoints");
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(out.y.data() + step.source[r] * width, y.data() + r * ldy, width * sizeof(float));
      check::expect(std::isnan(y[r * ldy + width]), what + ": wrote between its rows");
      float* to = out.checkpoint.data() + step.source[r] * tail_size;
      if (checkpoints[r]) {
        std::memcpy(to, checkpoints[r], tail_size * sizeof(float));
      } else {
        std::fill(to, to + tail_size, NAN);
        check::expect(std::isnan(saved[r * tail_size]), what + ": a checkpoint that nobody asked for");
      }
    }
  }
  return out;
}

void check_conv(const OpTable& ops, const std::string& isa, const ConvCase& c) {
  const std::string what = isa + "conv rows " + std::to_string(c.rows) + " C " + std::to_string(c.channels) +
                           " taps " + std::to_string(c.taps);
  const int64_t width = c.channels, keep = c.taps - 1;
  const Floats x = check::normal(c.streams * c.rows * width), w = check::normal(c.taps * width);
  const Floats tail = check::normal(c.streams * keep * width);
  const ConvResult found = run_conv(ops, c, {c.streams, c.rows, -1, 2}, x, w, tail, what);

  // u(s, t): the raw row t of a stream, its tail before t = 0.
  const auto u = [&](int64_t s, int64_t t, int64_t ch) {
    return t >= 0 ? x[(s * c.rows + t) * width + ch] : tail[(s * keep + t + keep) * width + ch];
  };
  Doubles y;
  Floats after, saved;
  for (int64_t s = 0; s < c.streams; ++s) {
    for (int64_t t = 0; t < c.rows; ++t) {
      for (int64_t ch = 0; ch < width; ++ch) {
        double sum = 0;
        for (int64_t j = 0; j < c.taps; ++j)
          sum += static_cast<double>(w[j * width + ch]) * u(s, t - keep + j, ch);
        y.push_back(sum * check::sigmoid(sum));
      }
      for (int64_t j = 0; j < keep; ++j) {
        for (int64_t ch = 0; ch < width; ++ch) saved.push_back(u(s, t + 1 - keep + j, ch));
      }
    }
    after.insert(after.end(), saved.end() - keep * width, saved.end());
  }
  // One rounding a tap, then exp (two units, scaled by its argument of up to about 6), addition and division.
  check::close(what + ", silu", found.y.data(), y.data(), y.size(), check::rounding(c.taps + 8));
  check::equal(what + ": tail", found.tail.data(), after.data(), after.size());

  for (const Plan& plan :
       {Plan{c.streams, c.rows, 1, 1}, Plan{c.streams, c.rows, 2, 3}, Plan{c.streams, c.rows, 3, 2},
        Plan{c.streams, c.rows, 7, 2}, Plan{c.streams, c.rows, 0, 3}}) {
    const ConvResult other = run_conv(ops, c, plan, x, w, tail, what);
    check::same_bits(what + " in chunks: y", other.y.data(), found.y.data(), found.y.size());
    check::same_bits(what + " in chunks: tail", other.tail.data(), found.tail.data(), found.tail.size());
    int64_t compared = 0;
    for (size_t i = 0; i < saved.size(); ++i) {
      if (std::isnan(other.checkpoint[i])) continue;
      ++compared;
      if (other.checkpoint[i] != saved[i]) check::expect(false, what + ": checkpoint");
    }
    check::expect(compared > 0, what + ": checkpoints were compared");
  }
}

// --- gates ---

void check_gates(const OpTable& ops, const std::string& isa, int32_t rows, int32_t heads, int32_t dim,
                 bool bounded) {
  const std::string what = isa + "gate " + (bounded ? "bounded" : "softplus") + " rows " +
                           std::to_string(rows) + " heads " + std::to_string(heads) + " D " +
                           std::to_string(dim);
  const int64_t width = static_cast<int64_t>(heads) * dim;
  Floats f = check::normal(rows * width, 4.0), bias = check::normal(width);
  const Floats b = check::normal(rows * heads, 2.0), a_log = check::normal(heads);
  f[0] = 60.0f;  // softplus takes its argument as it is
  f[width - 1] = -110.0f;
  check::Guarded<float> g(rows * width), beta(rows * heads);
  KdaGatesParams p;
  p.f = f.data();
  p.b = b.data();
  p.dt_bias = bias.data();
  p.a_log = a_log.data();
  p.bounded = bounded;
  p.lower_bound = -5.0f;
  p.rows = rows;
  p.heads = heads;
  p.head_dim = dim;
  p.g = g.data();
  p.beta = beta.data();
  check::Bench bench(2);
  ops.kda_gates(p, bench.exec);
  g.check(what);
  beta.check(what);
  Doubles expected, strength;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < width; ++i) {
      const double a = std::exp(static_cast<double>(a_log[i / dim]));
      const double z = static_cast<double>(f[r * width + i]) + bias[i];
      expected.push_back(bounded ? -5.0 * check::sigmoid(a * z)
                                 : -a * (z > 20 ? z : std::log1p(std::exp(z))));
    }
    for (int64_t h = 0; h < heads; ++h) strength.push_back(check::sigmoid(b[r * heads + h]));
  }
  // Bounded: the largest slope of sigmoid is 1/4, where its argument is small; its absolute error there, from
  // exp(A_log), a sum and a product, is below that of exp itself. Softplus: relative errors of exp, log1p and
  // a product.
  check::close(what, g.data(), expected.data(), expected.size(), check::rounding(bounded ? 6 : 4));
  check::close(what + ": beta", beta.data(), strength.data(), strength.size(), check::rounding(4));

  for (int threads = 1; threads <= 3; ++threads) {
    check::Bench other(threads);
    Floats in_place = f, in_place_b = b;
    for (int64_t r = 0; r < rows; ++r) {
      KdaGatesParams one = p;
      one.f = one.g = in_place.data() + r * width;
      one.b = one.beta = in_place_b.data() + r * heads;
      one.f = one.g;
      one.rows = 1;
      ops.kda_gates(one, other.exec);
    }
    check::same_bits(what + ", row by row in place", in_place.data(), g.data(), g.size());
    check::same_bits(what + ": beta, row by row in place", in_place_b.data(), beta.data(), beta.size());
  }
}

// --- recurrence ---

struct RecurrenceCase {
  int32_t streams, rows, heads, dim;
};

struct RecurrenceInputs {
  Floats q, k, v, g, beta, state;
};

RecurrenceInputs recurrence_inputs(const RecurrenceCase& c) {
  const int64_t n = static_cast<int64_t>(c.streams) * c.rows * c.heads;
  RecurrenceInputs in{check::normal(n * c.dim),
                      check::normal(n * c.dim),
                      check::normal(n * c.dim),
                      check::normal(n * c.dim),
                      check::normal(n),
                      check::normal(static_cast<int64_t>(c.streams) * c.heads * c.dim * c.dim, 0.3)};
  // Log-decays between -5 and 0, most of them near 0 as in a model that remembers.
  for (float& g : in.g) g = static_cast<float>(-5 * check::sigmoid(2.0 * g - 4.0));
  for (float& b : in.beta) b = static_cast<float>(check::sigmoid(b));
  return in;
}

struct RecurrenceResult {
  Floats o, state, checkpoint;
};

RecurrenceResult run_recurrence(const OpTable& ops, const RecurrenceCase& c, const Plan& plan,
                                const RecurrenceInputs& in, const std::string& what) {
  const int64_t width = static_cast<int64_t>(c.heads) * c.dim, ld = width + 5;
  const int64_t size = width * c.dim;
  RecurrenceResult out{Floats(in.q.size()), in.state, Floats(c.streams * c.rows * size, NAN)};
  for (const StepRows& step : steps(plan)) {
    check::Bench bench(plan.threads);
    const int64_t rows = static_cast<int64_t>(step.source.size());
    const auto spread = [&](const Floats& from) {
      Floats wide(rows * ld, NAN);
      for (int64_t r = 0; r < rows; ++r) {
        std::memcpy(wide.data() + r * ld, from.data() + step.source[r] * width, width * sizeof(float));
      }
      return wide;
    };
    const Floats q = spread(in.q), k = spread(in.k), v = spread(in.v);
    const Floats g = gather(in.g, step.source, width), beta = gather(in.beta, step.source, c.heads);
    check::Guarded<float> o(rows * width), saved(rows * size);
    std::vector<float*> states, checkpoints;
    for (const int32_t s : step.stream) states.push_back(out.state.data() + s * size);
    for (int64_t r = 0; r < rows; ++r)
      checkpoints.push_back(step.source[r] % 2 ? saved.data() + r * size : nullptr);
    KdaRecurrenceParams p;
    p.q = q.data();
    p.k = k.data();
    p.v = v.data();
    p.ldqkv = ld;
    p.g = g.data();
    p.beta = beta.data();
    p.rows = static_cast<int32_t>(rows);
    p.heads = c.heads;
    p.head_dim = c.dim;
    p.segment = step.segment.data();
    p.segments = static_cast<int32_t>(step.segment.size());
    p.state = {states.data(), 0};
    p.checkpoint = {checkpoints.data(), 0};
    p.o = o.data();
    ops.kda_recurrence(p, bench.exec);
    o.check(what);
    saved.check(what + " checkpoints");
    check::expect(bench.scratch.used() == 0, what + ": gives its scratch back");
    const auto stated = static_cast<size_t>(4 * kda_recurrence_scratch_floats(rows, c.heads, c.dim));
    check::expect(bench.scratch.peak() <= stated, what + ": scratch as stated");
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(out.o.data() + step.source[r] * width, o.data() + r * width, width * sizeof(float));
      if (checkpoints[r]) {
        std::memcpy(out.checkpoint.data() + step.source[r] * size, checkpoints[r], size * sizeof(float));
      } else {
        check::expect(std::isnan(saved[r * size]), what + ": a checkpoint that nobody asked for");
      }
    }
  }
  return out;
}

struct RecurrenceReference {
  Doubles o, state, checkpoint;
};

RecurrenceReference recurrence_reference(const RecurrenceCase& c, const RecurrenceInputs& in) {
  const int64_t n = c.dim, width = c.heads * n;
  RecurrenceReference ref{Doubles(in.q.size()), Doubles(in.state.begin(), in.state.end()), {}};
  for (int64_t s = 0; s < c.streams; ++s) {
    for (int64_t t = 0; t < c.rows; ++t) {
      const int64_t row = s * c.rows + t;
      for (int64_t h = 0; h < c.heads; ++h) {
        double* state = ref.state.data() + (s * c.heads + h) * n * n;
        const int64_t at = row * width + h * n;
        Doubles q(n), k(n);
        double qq = 1e-6, kk = 1e-6;
        for (int64_t i = 0; i < n; ++i) {
          qq += static_cast<double>(in.q[at + i]) * in.q[at + i];
          kk += static_cast<double>(in.k[at + i]) * in.k[at + i];
        }
        for (int64_t i = 0; i < n; ++i) {
          q[i] = in.q[at + i] / std::sqrt(qq) / std::sqrt(static_cast<double>(n));
          k[i] = in.k[at + i] / std::sqrt(kk);
          for (int64_t j = 0; j < n; ++j) state[i * n + j] *= std::exp(static_cast<double>(in.g[at + i]));
        }
        for (int64_t j = 0; j < n; ++j) {
          double seen = 0, read = 0;
          for (int64_t i = 0; i < n; ++i) seen += state[i * n + j] * k[i];
          const double d = in.beta[row * c.heads + h] * (in.v[at + j] - seen);
          for (int64_t i = 0; i < n; ++i) {
            state[i * n + j] += k[i] * d;
            read += state[i * n + j] * q[i];
          }
          ref.o[at + j] = read;
        }
      }
      const double* now = ref.state.data() + s * width * n;
      ref.checkpoint.insert(ref.checkpoint.end(), now, now + width * n);
    }
  }
  return ref;
}

void check_recurrence(const OpTable& ops, const std::string& isa, const RecurrenceCase& c) {
  const std::string what = isa + "recurrence streams " + std::to_string(c.streams) + " rows " +
                           std::to_string(c.rows) + " heads " + std::to_string(c.heads) + " D " +
                           std::to_string(c.dim);
  const RecurrenceInputs in = recurrence_inputs(c);
  const RecurrenceResult found = run_recurrence(ops, c, {c.streams, c.rows, -1, 2}, in, what);
  const RecurrenceReference ref = recurrence_reference(c, in);
  // A state element takes three roundings a row, most of them forgotten again by the decay and the delta
  // rule; what a row reads and writes back is a sum over Dk, one rounding a term.
  const double limit = check::rounding(c.dim + 3.0 * std::min(c.rows, 64));
  check::close(what + ": readout", found.o.data(), ref.o.data(), found.o.size(), limit, 2.82e-03);
  check::close(what + ": state", found.state.data(), ref.state.data(), found.state.size(), limit);
  Floats saved;
  Doubles expected;
  for (size_t i = 0; i < ref.checkpoint.size(); ++i) {
    if (std::isnan(found.checkpoint[i])) continue;
    saved.push_back(found.checkpoint[i]);
    expected.push_back(ref.checkpoint[i]);
  }
  if (c.rows > 1) {
    check::expect(!saved.empty(), what + ": checkpoints were written");
    check::close(what + ": checkpoints", saved.data(), expected.data(), saved.size(), limit);
  }
  for (const Plan& plan :
       {Plan{c.streams, c.rows, 1, 1}, Plan{c.streams, c.rows, 3, 3}, Plan{c.streams, c.rows, 7, 2},
        Plan{c.streams, c.rows, 0, 2}, Plan{c.streams, c.rows, -1, 1}}) {
    const RecurrenceResult other = run_recurrence(ops, c, plan, in, what);
    check::same_bits(what + " in chunks: o", other.o.data(), found.o.data(), found.o.size());
    check::same_bits(what + " in chunks: state", other.state.data(), found.state.data(), found.state.size());
    check::same_bits(what + " in chunks: checkpoints", other.checkpoint.data(), found.checkpoint.data(),
                     found.checkpoint.size());
  }
}

// With an empty state, beta = 1 and v = 1 the state's columns after one row are the normalised key itself.
void check_l2norm(const OpTable& ops, const std::string& isa) {
  const RecurrenceCase c{1, 1, 3, 128};
  RecurrenceInputs in = recurrence_inputs(c);
  std::fill(in.state.begin(), in.state.end(), 0.0f);
  std::fill(in.beta.begin(), in.beta.end(), 1.0f);
  std::fill(in.v.begin(), in.v.end(), 1.0f);
  const RecurrenceResult found = run_recurrence(ops, c, {1, 1, -1, 1}, in, isa + "l2norm");
  Floats k;
  Doubles expected;
  for (int64_t i = 0; i < c.heads * c.dim; ++i) {
    k.push_back(found.state[i * c.dim]);
    double squares = 1e-6;
    for (int64_t j = i / c.dim * c.dim; j < (i / c.dim + 1) * c.dim; ++j)
      squares += static_cast<double>(in.k[j]) * in.k[j];
    expected.push_back(in.k[i] / std::sqrt(squares));
  }
  // The sum of squares, halved by the root, then root and division. (Published: 0, against float32 in the
  // same order.)
  check::close(isa + "l2norm", k.data(), expected.data(), k.size(),
               check::rounding(check::lane_steps(c.dim) / 4 + 2));
}

void nan_stays_in_its_stream(const OpTable& ops, const std::string& isa) {
  const RecurrenceCase c{3, 6, 2, 16};
  RecurrenceInputs in = recurrence_inputs(c);
  in.v[(1 * c.rows + 2) * 32 + 5] = NAN;  // stream 1, row 2, head 0, column 5
  const RecurrenceResult found = run_recurrence(ops, c, {3, 6, -1, 2}, in, isa + "NaN");
  for (int64_t i = 0; i < static_cast<int64_t>(found.o.size()); ++i) {
    const bool hit = i / 32 >= c.rows + 2 && i / 32 < 2 * c.rows && i % 32 == 5;
    check::expect(std::isnan(found.o[i]) == hit,
                  isa + "a NaN value spoils its column of its stream from its row on");
  }
}

// --- gated norm ---

void check_gated_norm(const OpTable& ops, const std::string& isa, int32_t rows, int32_t heads, int32_t dim) {
  const std::string what = isa + "gated norm rows " + std::to_string(rows) + " heads " +
                           std::to_string(heads) + " D " + std::to_string(dim);
  const int64_t n = static_cast<int64_t>(rows) * heads * dim;
  const Floats o = check::normal(n), gate = check::normal(n, 3.0), w = check::normal(dim);
  check::Guarded<float> y(n);
  GatedNormParams p;
  p.o = o.data();
  p.gate = gate.data();
  p.weight = w.data();
  p.rows = rows;
  p.heads = heads;
  p.head_dim = dim;
  p.y = y.data();
  check::Bench bench(2);
  ops.gated_norm(p, bench.exec);
  y.check(what);
  Doubles expected;
  for (int64_t i = 0; i < n; ++i) {
    double squares = 0;
    for (int64_t j = i / dim * dim; j < (i / dim + 1) * dim; ++j) squares += static_cast<double>(o[j]) * o[j];
    expected.push_back(o[i] / std::sqrt(squares / dim + p.eps) * w[i % dim] * check::sigmoid(gate[i]));
  }
  check::close(what, y.data(), expected.data(), n, check::rounding(check::lane_steps(dim) / 4 + 12));
  for (int threads = 1; threads <= 3; ++threads) {
    check::Bench other(threads);
    Floats in_place = o;
    for (int32_t r = 0; r < rows; ++r) {
      GatedNormParams one = p;
      one.y = in_place.data() + static_cast<int64_t>(r) * heads * dim;
      one.o = one.y;
      one.gate += static_cast<int64_t>(r) * heads * dim;
      one.rows = 1;
      ops.gated_norm(one, other.exec);
    }
    check::same_bits(what + ", row by row in place", in_place.data(), y.data(), n);
  }
}

}  // namespace

int main() {
  std::printf(
      "      published against float32 in the same order: conv + silu with state advance 0, forget gate and "
      "l2norm 0\n");
  check::on_each_isa([](const OpTable& ops, const std::string& isa) {
    for (const ConvCase& c : {ConvCase{1, 1, 384, 4}, ConvCase{3, 20, 3072, 4}, ConvCase{2, 64, 77, 4},
                              ConvCase{4, 5, 300, 2}, ConvCase{2, 11, 40, 8}, ConvCase{1, 2, 16, 3}}) {
      check_conv(ops, isa, c);
    }
    for (const bool bounded : {true, false}) {
      check_gates(ops, isa, 1, 8, 128, bounded);
      check_gates(ops, isa, 37, 3, 24, bounded);
      check_gates(ops, isa, 64, 2, 40, bounded);
    }
    for (const RecurrenceCase& c :
         {RecurrenceCase{1, 1, 8, 128}, RecurrenceCase{2, 64, 2, 128}, RecurrenceCase{3, 17, 3, 64},
          RecurrenceCase{2, 9, 5, 8}, RecurrenceCase{1, 33, 2, 40}, RecurrenceCase{4, 4, 3, 24},
          RecurrenceCase{1, 20, 1, 256}, RecurrenceCase{2, 12, 2, 200}}) {
      check_recurrence(ops, isa, c);
    }
    check_l2norm(ops, isa);
    nan_stays_in_its_stream(ops, isa);
    check_gated_norm(ops, isa, 1, 8, 128);
    check_gated_norm(ops, isa, 64, 8, 128);
    check_gated_norm(ops, isa, 64, 3, 40);
    check_gated_norm(ops, isa, 5, 2, 8);
  });
  return check::finish("kda");
}
