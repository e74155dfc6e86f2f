// The sampler against exact probabilities, computed from the definition with a full sort.
#include <algorithm>
#include <numeric>

#include "ops_check.h"

namespace {

using namespace rocket;
using check::expect;

std::vector<int32_t> draw(const std::vector<float>& logits, int32_t rows, int32_t vocab,
                          const std::vector<SamplingParams>& s, const std::vector<uint64_t>& counter,
                          int threads = 2) {
  check::Guarded<int32_t> token(rows);
  SampleParams p;
  p.logits = logits.data();
  p.ld = static_cast<int64_t>(logits.size()) / rows;
  p.rows = rows;
  p.vocab = vocab;
  p.sampling = s.data();
  p.counter = counter.data();
  p.token = token.data();
  check::Bench bench(threads);
  cpu_ops().sample(p, bench.exec);
  token.check("sample");
  return {token.data(), token.data() + rows};
}

int32_t draw_one(const std::vector<float>& logits, const SamplingParams& s, uint64_t counter = 0) {
  return draw(logits, 1, static_cast<int32_t>(logits.size()), {s}, {counter})[0];
}

struct Kept {
  std::vector<int32_t> id;  // in descending probability
  std::vector<double> p;    // renormalised
};

Kept reference(const std::vector<float>& logits, const SamplingParams& s) {
  const auto n = static_cast<int32_t>(logits.size());
  std::vector<double> z(n), e(n);
  for (int32_t i = 0; i < n; ++i)
    z[i] = std::isnan(logits[i]) ? -INFINITY : static_cast<double>(logits[i]) / s.temperature;
  std::vector<int32_t> id(n);
  std::iota(id.begin(), id.end(), 0);
  std::stable_sort(id.begin(), id.end(), [&](int32_t a, int32_t b) { return z[a] > z[b]; });
  if (s.top_k > 0 && s.top_k < n) id.resize(s.top_k);
  const double top = z[id[0]];
  double total = 0;
  for (const int32_t i : id) total += e[i] = std::exp(z[i] - top);
  // Different logits may round to the same probability, which is a tie.
  std::sort(id.begin(), id.end());
  std::stable_sort(id.begin(), id.end(), [&](int32_t a, int32_t b) { return e[a] > e[b]; });
  std::vector<double> p;
  for (const int32_t i : id) p.push_back(e[i] / total);
  Kept kept;
  double mass = 0;
  for (size_t i = 0; i < id.size(); ++i) {
    if (p[i] < static_cast<double>(s.min_p) * p[0]) break;
    if (s.top_p < 1 && mass >= static_cast<double>(s.top_p)) break;
    kept.id.push_back(id[i]);
    kept.p.push_back(p[i]);
    mass += p[i];
  }
  for (double& x : kept.p) x /= mass;
  return kept;
}

void check_greedy() {
  const SamplingParams greedy;
  expect(draw_one({1, 3, 3, 2}, greedy) == 1, "greedy: the lowest id of a tie");
  expect(draw_one({NAN, -5, NAN, -4}, greedy) == 3, "greedy: NaN never wins");
  expect(draw_one({NAN, NAN}, greedy) == 0, "greedy: all NaN gives the lowest id");
  expect(draw_one({-INFINITY, NAN, -INFINITY}, greedy) == 0, "greedy: NaN counts as -inf");
  expect(draw_one({NAN, -INFINITY}, greedy) == 0, "greedy: NaN ties with -inf");
  expect(draw_one({-0.0f, 0.0f}, greedy) == 0, "greedy: zeros tie");
  expect(draw_one({1, INFINITY, 2}, greedy) == 1, "greedy: infinity wins");
  // Rows that lie apart, of which only the first `vocab` floats count.
  const std::vector<float> rows = {0, 2, 1, 9, 5, 4, 3, 9};
  expect(draw(rows, 2, 3, {greedy, greedy}, {0, 0}) == std::vector<int32_t>{1, 0}, "greedy: row by row");
}

// The walk over kept tokens in descending probability, with the sampler's own uniform numbers, is exactly
// reproducible.
void check_walk(const SamplingParams& base, const std::vector<float>& logits, const std::string& what) {
  int64_t wrong = 0;
  const Kept kept = reference(logits, base);
  for (uint64_t counter = 0; counter < 400; ++counter) {
    SamplingParams s = base;
    s.seed = counter % 7;
    const double u = sampling_uniform(s.seed, counter);
    size_t i = 0;
    double walked = kept.p[0];
    while (i + 1 < kept.p.size() && walked <= u) walked += kept.p[++i];
    const bool border = std::fabs(walked - u) < 1e-12 || (i > 0 && std::fabs(walked - kept.p[i] - u) < 1e-12);
    if (draw_one(logits, s, counter) != kept.id[i] && !border) ++wrong;
  }
  expect(wrong == 0, what + ": " + std::to_string(wrong) + " of 400 draws differ from the definition");
}

// Chi-square of draws against exact probabilities; cells below 5 expected draws are put together.
void check_distribution(const SamplingParams& base, const std::vector<float>& logits,
                        const std::string& what) {
  constexpr int32_t kDraws = 20000;
  const Kept kept = reference(logits, base);
  std::vector<SamplingParams> s(kDraws, base);
  std::vector<uint64_t> counter(kDraws);
  std::iota(counter.begin(), counter.end(), 1000);
  std::vector<float> rows;
  for (int32_t i = 0; i < kDraws; ++i) rows.insert(rows.end(), logits.begin(), logits.end());
  std::vector<int64_t> seen(logits.size());
  for (const int32_t t : draw(rows, kDraws, static_cast<int32_t>(logits.size()), s, counter)) ++seen[t];

  double chi = 0, rest = 0, rest_seen = 0;
  int cells = 0;
  int64_t inside = 0;
  for (size_t i = 0; i < kept.id.size(); ++i) {
    const double mean = kept.p[i] * kDraws, got = static_cast<double>(seen[kept.id[i]]);
    inside += seen[kept.id[i]];
    if (mean < 5) {
      rest += mean;
      rest_seen += got;
      continue;
    }
    chi += (got - mean) * (got - mean) / mean;
    ++cells;
  }
  if (rest >= 5) {
    chi += (rest_seen - rest) * (rest_seen - rest) / rest;
    ++cells;
  }
  expect(inside == kDraws, what + ": draws only what is kept");
  // Mean cells - 1, variance twice that; five standard deviations.
  const double degrees = std::max(cells - 1, 0), limit = degrees + 5 * std::sqrt(2 * degrees) + 1;
  std::printf("      %-40s chi-square %.1f with %.0f degrees of freedom, limit %.1f\n", what.c_str(), chi,
              degrees, limit);
  expect(chi <= limit, what + ": distribution");
}

void check_filters() {
  std::vector<float> logits = check::normal(500, 2.0);
  logits[17] = NAN;
  logits[18] = -INFINITY;
  logits[40] = logits[41] = logits[42] = 6.5f;  // ties in front
  struct Named {
    const char* name;
    SamplingParams s;
  };
  const Named cases[] = {
      {"temperature 1", {1.0f}},
      {"temperature 0.3", {0.3f}},
      {"temperature 2, top-k 40", {2.0f, 40}},
      {"top-k 1", {1.0f, 1}},
      {"top-k 2 of a tie of three", {1.0f, 2}},
      {"top-k above the vocabulary", {1.5f, 5000}},
      {"top-p 0.9", {1.0f, 0, 0.9f}},
      {"top-p 0.05", {1.0f, 0, 0.05f}},
      {"min-p 0.1", {1.0f, 0, 1.0f, 0.1f}},
      {"top-k 100, top-p 0.8, min-p 0.02", {1.2f, 100, 0.8f, 0.02f}},
      {"min-p 0.2 below top-p 0.99", {1.0f, 0, 0.99f, 0.2f}},
  };
  for (const Named& c : cases) {
    check_walk(c.s, logits, c.name);
    SamplingParams seeded = c.s;
    seeded.seed = 42;
    check_distribution(seeded, logits, c.name);
  }
  // A mass that top_p meets exactly is enough.
  check_walk({1.0f, 0, 0.5f}, {0.0f, 0.0f}, "one of two");
  check_walk({1.0f, 0, 0.75f}, {1.0f, 1.0f, 1.0f, 1.0f}, "three of four");
  // Flat logits reach far into the tail: the walk must sort on, piece by piece, and keep ids ascending within
  // ties.
  std::vector<float> flat(5000, 0.5f);
  check_walk({1.0f}, flat, "flat, 5000 tokens");
  check_walk({1.0f, 3000, 0.9f}, flat, "flat, 5000 tokens, top-k and top-p");
  check_walk({0.7f}, check::normal(20000, 0.5), "20000 tokens");
  check_walk({1e-30f}, logits, "a temperature that makes it greedy");
  check_walk({1e30f}, check::normal(300), "a temperature that makes it uniform");
  expect(draw_one({NAN, NAN, NAN}, {1.0f}) >= 0, "all NaN still gives a token");
  expect(draw_one({1.0f, INFINITY, 2.0f}, {1.0f}) == 1, "infinity is certain");
}

void check_seeds() {
  double sum = 0, low = 1, high = 0;
  for (uint64_t i = 0; i < 20000; ++i) {
    const double u = sampling_uniform(i % 100, i / 100);
    sum += u;
    low = std::min(low, u);
    high = std::max(high, u);
  }
  expect(low >= 0 && high < 1 && low < 0.001 && high > 0.999, "uniform numbers fill [0, 1)");
  // Standard deviation of the mean of 20,000: 0.2887 / sqrt(20000) = 0.002.
  expect(std::fabs(sum / 20000 - 0.5) < 0.01, "uniform numbers have mean 1/2");
  expect(sampling_uniform(1, 0) != sampling_uniform(0, 1), "seed and counter are not interchangeable");

  const std::vector<float> row = check::normal(1000);
  std::vector<float> rows;
  std::vector<SamplingParams> s;
  std::vector<uint64_t> counter;
  for (uint64_t i = 0; i < 33; ++i) {
    rows.insert(rows.end(), row.begin(), row.end());
    s.push_back({0.9f, i % 2 ? 50 : 0, 0.95f, 0.0f, i / 3});
    counter.push_back(i * 17 % 5);
  }
  const std::vector<int32_t> all = draw(rows, 33, 1000, s, counter, 3);
  for (int threads = 1; threads <= 3; ++threads) {
    expect(draw(rows, 33, 1000, s, counter, threads) == all, "the same draw for any number of threads");
  }
  for (int32_t i = 0; i < 33; ++i) expect(draw_one(row, s[i], counter[i]) == all[i], "the same draw alone");
}

}  // namespace

int main() {
  check_greedy();
  check_filters();
  check_seeds();
  return check::finish("sample");
}
