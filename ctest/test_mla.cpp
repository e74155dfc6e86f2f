// Sparse latent attention against double precision, over pages, with lists of any length.
#include <algorithm>

#include "ops_check.h"

namespace {

using namespace rocket;
using check::expect;
using check::Pages;
using Doubles = std::vector<double>;
using Floats = std::vector<float>;

struct Case {
  int32_t streams, rows;  // rows of each stream
  int32_t heads, width, value_dim;
  int32_t context;    // tokens before the first row
  int32_t most;       // tokens that a list has at most
  double spread = 1;  // of the queries; large: one token takes almost everything
};

struct Inputs {
  std::vector<std::unique_ptr<Pages>> pages;
  std::vector<Floats> latent;               // [streams][context + rows, width]
  Floats q;                                 // [streams * rows, heads, width]
  std::vector<std::vector<int32_t>> token;  // [streams * rows]
};

Inputs inputs(const Case& c) {
  Inputs in;
  const int64_t n = static_cast<int64_t>(c.streams) * c.rows;
  in.q = check::normal(n * c.heads * c.width, c.spread);
  for (int32_t s = 0; s < c.streams; ++s) {
    in.latent.push_back(check::normal(static_cast<int64_t>(c.context + c.rows) * c.width));
    in.pages.push_back(std::make_unique<Pages>(c.context + c.rows, 5, c.width));
    in.pages.back()->fill(in.latent.back());
  }
  for (int64_t r = 0; r < n; ++r) {
    const int32_t visible = c.context + static_cast<int32_t>(r % c.rows) + 1;
    std::vector<int32_t> all(visible);
    for (int32_t t = 0; t < visible; ++t) all[t] = t;
    std::shuffle(all.begin(), all.end(), check::rng());
    // The lists of the first rows are empty, one token, and as long as can be.
    const int32_t limit = std::min(visible, c.most);
    all.resize(r == 1 ? 0 : r == 2 ? 1 : r == 0 ? limit : check::uniform_int(1, limit));
    std::sort(all.begin(), all.end());
    in.token.push_back(all);
  }
  return in;
}

// One call for rows [first, first + count) of every stream, into o [streams * rows, heads, value_dim].
void attend(const OpTable& ops, const Case& c, Inputs& in, int32_t first, int32_t count, int threads,
            Floats& o, const std::string& what) {
  const int64_t rows = static_cast<int64_t>(c.streams) * count, ldtoken = c.most + 3;
  const int64_t q_size = static_cast<int64_t>(c.heads) * c.width,
                o_size = static_cast<int64_t>(c.heads) * c.value_dim;
  const int64_t ldq = q_size + 7, ldo = o_size + 2;
  Floats q(rows * ldq, NAN);
  std::vector<int32_t> token(rows * ldtoken, -1), counts;
  std::vector<Segment> segment;
  check::Tables views;
  for (int32_t s = 0; s < c.streams; ++s) {
    segment.push_back({s * count, count, c.context + first});
    views.push_back(in.pages[s]->view());
    for (int32_t r = 0; r < count; ++r) {
      const int64_t row = s * count + r, from = s * c.rows + first + r;
      std::memcpy(q.data() + row * ldq, in.q.data() + from * q_size, q_size * sizeof(float));
      std::copy(in.token[from].begin(), in.token[from].end(), token.begin() + row * ldtoken);
      counts.push_back(static_cast<int32_t>(in.token[from].size()));
    }
  }
  check::Guarded<float> out(rows * ldo);
  SparseMlaParams p;
  p.q = q.data();
  p.ldq = ldq;
  p.rows = static_cast<int32_t>(rows);
  p.heads = c.heads;
  p.width = c.width;
  p.value_dim = c.value_dim;
  p.scale = 1 / std::sqrt(static_cast<float>(c.width));
  p.token = token.data();
  p.ldtoken = ldtoken;
  p.count = counts.data();
  p.segment = segment.data();
  p.segments = c.streams;
  p.cache = views.view();
  p.o = out.data();
  p.ldo = ldo;
  check::Bench bench(threads);
  ops.sparse_mla(p, bench.exec);
  out.check(what);
  const auto stated = static_cast<size_t>(4 * sparse_mla_scratch_floats(c.heads, c.most, threads));
  expect(bench.scratch.peak() <= stated && bench.scratch.used() == 0, what + ": scratch as stated");
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t to = row / count * c.rows + first + row % count;
    std::memcpy(o.data() + to * o_size, out.data() + row * ldo, o_size * sizeof(float));
    expect(std::isnan(out[row * ldo + o_size]), what + ": wrote between its rows");
  }
}

Doubles reference(const Case& c, const Inputs& in) {
  Doubles o;
  const double scale = 1 / std::sqrt(static_cast<double>(c.width));
  for (size_t row = 0; row < in.token.size(); ++row) {
    const Floats& latent = in.latent[row / c.rows];
    for (int64_t h = 0; h < c.heads; ++h) {
      const float* q = in.q.data() + (row * c.heads + h) * c.width;
      Doubles logit;
      double top = -INFINITY, total = 0;
      for (const int32_t t : in.token[row]) {
        double dot = 0;
        for (int64_t i = 0; i < c.width; ++i) dot += static_cast<double>(q[i]) * latent[t * c.width + i];
        logit.push_back(dot * scale);
        top = std::max(top, logit.back());
      }
      Doubles sum(c.value_dim);
      for (size_t i = 0; i < logit.size(); ++i) {
        const double e = std::exp(logit[i] - top);
        total += e;
        for (int64_t d = 0; d < c.value_dim; ++d) sum[d] += e * latent[in.token[row][i] * c.width + d];
      }
      for (const double s : sum) o.push_back(logit.empty() ? 0 : s / total);
    }
  }
  return o;
}

void check_case(const OpTable& ops, const std::string& isa, const Case& c) {
  const std::string what = isa + "mla rows " + std::to_string(c.streams * c.rows) + " heads " +
                           std::to_string(c.heads) + " width " + std::to_string(c.width) + "/" +
                           std::to_string(c.value_dim) + " tokens " + std::to_string(c.most) +
                           (c.spread > 1 ? " peaked" : "");
  Inputs in = inputs(c);
  Floats found(static_cast<int64_t>(c.streams) * c.rows * c.heads * c.value_dim);
  attend(ops, c, in, 0, c.rows, 2, found, what);
  const Doubles expected = reference(c, in);
  // The error of a logit (a sum over the width, of size up to five times its spread) is a relative error of
  // its weight; the sum over tokens adds a rounding each. Largest outputs come from short lists, so that they
  // are of the order of a latent.
  const double logit = 5 * c.spread * check::rounding(check::lane_steps(c.width));
  check::close(what, found.data(), expected.data(), found.size(),
               logit + check::rounding(std::min(c.most, 64) + 12));
  if (in.token.size() > 1) {
    bool zero = true;
    for (int64_t i = 0; i < c.heads * c.value_dim; ++i) zero = zero && found[c.heads * c.value_dim + i] == 0;
    expect(zero, what + ": an empty list gives zeros");
  }
  for (const int32_t chunk : {1, 3, 7, 0, -1}) {
    Floats other(found.size());
    const std::vector<int32_t> cut = check::cuts(c.rows, chunk);
    for (size_t i = 0; i + 1 < cut.size(); ++i) {
      attend(ops, c, in, cut[i], cut[i + 1] - cut[i], chunk < 0 ? 3 : 1 + chunk % 3, other, what);
    }
    check::same_bits(what + " in chunks", other.data(), found.data(), found.size());
  }
}

void check_append(const OpTable& ops, const std::string& isa) {
  constexpr int32_t kWidth = 37;
  const std::string what = isa + "latent_append";
  const std::vector<Segment> segment = {{0, 4, 3}, {4, 1, 0}, {5, 12, 9}};
  const int64_t ld = kWidth + 4;
  const Floats latent = check::normal(17 * ld);
  std::vector<std::unique_ptr<Pages>> pages;
  check::Tables views;
  for (const Segment& s : segment) {
    pages.push_back(std::make_unique<Pages>(s.position + s.rows + 1, 4, kWidth));
    views.push_back(pages.back()->view());
  }
  LatentAppendParams p;
  p.latent = latent.data();
  p.ld = ld;
  p.segment = segment.data();
  p.segments = 3;
  p.cache = views.view();
  p.rows = 17;
  check::Bench bench(2);
  ops.latent_append(p, bench.exec);
  for (size_t s = 0; s < segment.size(); ++s) {
    pages[s]->check(what);
    const Segment& g = segment[s];
    for (int64_t t = 0; t <= g.position + g.rows; ++t) {
      const float* row = pages[s]->row(t);
      if (t < g.position || t == g.position + g.rows) {
        expect(std::isnan(row[0]) && std::isnan(row[kWidth - 1]), what + ": touched another row");
      } else {
        check::same_bits(what, row, latent.data() + (g.first_row + t - g.position) * ld, kWidth);
      }
    }
  }
}

void nan_stays_in_its_head(const OpTable& ops, const std::string& isa) {
  const Case c{1, 4, 5, 32, 32, 20, 24};
  Inputs in = inputs(c);
  in.q[(3 * c.heads + 2) * c.width + 9] = NAN;
  Floats o(4 * 5 * 32);
  attend(ops, c, in, 0, 4, 2, o, isa + "NaN");
  for (int64_t i = 0; i < 4 * 5 * 32; ++i) {
    expect(std::isnan(o[i]) == (i / 32 == 3 * 5 + 2),
           isa + "a NaN query spoils its head of its row and no other");
  }
}

}  // namespace

int main() {
  check::on_each_isa([](const OpTable& ops, const std::string& isa) {
    for (const Case& c : {Case{1, 1, 8, 512, 512, 3000, 2051}, Case{1, 1, 64, 576, 512, 200, 100},
                          Case{2, 32, 3, 64, 64, 10, 40}, Case{3, 5, 5, 40, 24, 60, 33},
                          Case{1, 64, 4, 128, 128, 0, 64}, Case{2, 9, 6, 77, 70, 31, 32},
                          Case{1, 7, 1, 16, 16, 100, 97}, Case{2, 4, 8, 256, 256, 300, 200, 6}}) {
      check_case(ops, isa, c);
    }
    check_append(ops, isa);
    nan_stays_in_its_head(ops, isa);
  });
  return check::finish("mla");
}
