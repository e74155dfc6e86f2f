// The router against double precision: exact ids, weights, groups, ties.
#include <algorithm>
#include <numeric>

#include "ops_check.h"

namespace {

using namespace rocket;
using check::expect;

struct Case {
  int32_t rows, experts, topk;
  int32_t groups = 1, topk_group = 1;
  bool norm = true;
};

struct Result {
  std::vector<int32_t> id;
  std::vector<float> weight;
};

Result run(const Case& c, const std::vector<float>& logit, int64_t ld, const std::vector<float>& bias,
           int threads, const std::string& what) {
  check::Guarded<int32_t> id(c.rows * c.topk);
  check::Guarded<float> weight(c.rows * c.topk);
  RouterParams p;
  p.logit = logit.data();
  p.ld = ld;
  p.bias = bias.data();
  p.rows = c.rows;
  p.experts = c.experts;
  p.topk = c.topk;
  p.groups = c.groups;
  p.topk_group = c.topk_group;
  p.norm_topk_prob = c.norm;
  p.scaling = 2.5f;
  p.id = id.data();
  p.weight = weight.data();
  check::Bench bench(threads);
  cpu_ops().router(p, bench.exec);
  id.check(what + " id");
  weight.check(what + " weight");
  return {{id.data(), id.data() + id.size()}, {weight.data(), weight.data() + weight.size()}};
}

template <typename T>
std::vector<int32_t> best(const std::vector<T>& value, int32_t k) {
  std::vector<int32_t> order(value.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return value[a] > value[b]; });
  order.resize(k);
  std::sort(order.begin(), order.end());
  return order;
}

// Ids of one row in double precision. `margin` becomes the distance between the worst choice taken and the
// best left out, over experts and groups: where it is within rounding, an exact tie in float32 is no fault.
std::vector<int32_t> choose(const Case& c, const float* logit, const std::vector<float>& bias,
                            double& margin) {
  std::vector<double> choice(c.experts);
  for (int32_t e = 0; e < c.experts; ++e) choice[e] = check::sigmoid(logit[e]) + bias[e];
  const auto gap = [&margin](std::vector<double> v, int32_t k) {
    if (k >= static_cast<int32_t>(v.size())) return;
    std::sort(v.rbegin(), v.rend());
    margin = std::min(margin, v[k - 1] - v[k]);
  };
  if (c.groups > 1) {
    const int32_t size = c.experts / c.groups;
    std::vector<double> score(c.groups);
    for (int32_t g = 0; g < c.groups; ++g) {
      std::vector<double> own(choice.begin() + g * size, choice.begin() + (g + 1) * size);
      std::sort(own.rbegin(), own.rend());
      score[g] = own[0] + (size > 1 ? own[1] : 0);
    }
    gap(score, c.topk_group);
    const std::vector<int32_t> open = best(score, c.topk_group);
    for (int32_t e = 0; e < c.experts; ++e) {
      if (std::find(open.begin(), open.end(), e / size) == open.end()) choice[e] = -INFINITY;
    }
  }
  gap(choice, c.topk);
  return best(choice, c.topk);
}

void check_case(const Case& c) {
  const std::string what = "router rows " + std::to_string(c.rows) + " experts " + std::to_string(c.experts) +
                           " topk " + std::to_string(c.topk) + " groups " + std::to_string(c.groups) +
                           (c.norm ? "" : " no norm");
  const int64_t ld = c.experts + 3;
  std::vector<float> logit(c.rows * ld, NAN);
  for (int32_t r = 0; r < c.rows; ++r) {
    const std::vector<float> row = check::normal(c.experts, 1.5);
    std::copy(row.begin(), row.end(), logit.begin() + r * ld);
  }
  const std::vector<float> bias = check::normal(c.experts, 0.1);
  const Result found = run(c, logit, ld, bias, 2, what);
  std::vector<double> weight;
  int64_t near_ties = 0;
  for (int32_t r = 0; r < c.rows; ++r) {
    double margin = INFINITY;
    std::vector<int32_t> id = choose(c, logit.data() + r * ld, bias, margin);
    if (margin < 8 * check::kUnit) {
      ++near_ties;
      id.assign(found.id.begin() + r * c.topk, found.id.begin() + (r + 1) * c.topk);
    }
    check::equal(what + ": ids, ascending", found.id.data() + r * c.topk, id.data(), c.topk);
    double total = 1e-20;
    for (const int32_t e : id) total += check::sigmoid(logit[r * ld + e]);
    for (const int32_t e : id)
      weight.push_back(check::sigmoid(logit[r * ld + e]) / (c.norm ? total : 1) * 2.5);
  }
  std::printf("      %s: ids compared on %lld rows, %lld too close to tell in float32\n", what.c_str(),
              static_cast<long long>(c.rows - near_ties), static_cast<long long>(near_ties));
  expect(near_ties * 50 <= c.rows, what + ": almost every row can be told");
  // exp, addition, division; the sum of topk scores; division and scaling.
  check::close(what + ": weights", found.weight.data(), weight.data(), weight.size(), check::rounding(6),
               8.46e-08);
  for (int threads = 1; threads <= 3; ++threads) {
    Case one = c;
    one.rows = 1;
    for (int32_t r = 0; r < c.rows; ++r) {
      const std::vector<float> row(logit.begin() + r * ld, logit.begin() + (r + 1) * ld);
      const Result alone = run(one, row, ld, bias, threads, what);
      check::equal(what + ", alone: ids", alone.id.data(), found.id.data() + r * c.topk, c.topk);
      check::same_bits(what + ", alone: weights", alone.weight.data(), found.weight.data() + r * c.topk,
                       c.topk);
    }
  }
}

void expect_ids(const std::string& what, const Result& found, const std::vector<int32_t>& id) {
  expect(found.id == id, what);
}

void check_ties() {
  const std::vector<float> flat(16, 0.25f), none(16, 0.0f);
  expect_ids("all equal: the lowest ids", run({1, 16, 4}, flat, 16, none, 1, "ties"), {0, 1, 2, 3});
  // All groups equal: the lowest groups, then the lowest ids within them.
  expect_ids("equal groups", run({1, 16, 4, 4, 2}, flat, 16, none, 1, "ties"), {0, 1, 2, 3});
  std::vector<float> bias = none;
  bias[13] = bias[15] = 1.0f;
  // Group 3 leads; groups 0 to 2 tie for second place and the lowest joins; inside it the lowest ids.
  expect_ids("a tie between groups", run({1, 16, 4, 4, 2}, flat, 16, bias, 1, "ties"), {0, 1, 13, 15});
  // A group with one high expert loses to a group with two middling ones: the two best count.
  bias = none;
  bias[0] = 0.5f;
  bias[4] = bias[5] = 0.4f;
  expect_ids("the sum of two", run({1, 16, 2, 4, 1}, flat, 16, bias, 1, "ties"), {4, 5});
  // The bias chooses but does not weigh.
  const Result found = run({1, 16, 2, 1, 1, false}, flat, 16, bias, 1, "bias");
  const double expected = check::sigmoid(0.25) * 2.5;
  expect(std::fabs(found.weight[0] - expected) < 1e-6, "weights come without the bias");
  // A NaN logit is the last choice.
  std::vector<float> broken = flat;
  broken[0] = NAN;
  expect_ids("NaN last", run({1, 16, 2}, broken, 16, none, 1, "NaN"), {1, 2});
  // Scores that underflow to zero: normalised weights stay finite.
  const std::vector<float> low(16, -200.0f);
  for (const float w : run({1, 16, 4}, low, 16, none, 1, "underflow").weight)
    expect(w == 0.0f, "no score, no weight");
}

}  // namespace

int main() {
  for (const Case& c : {Case{64, 288, 8}, Case{1, 288, 8}, Case{33, 64, 8}, Case{16, 256, 8, 8, 4},
                        Case{7, 60, 6, 5, 2}, Case{5, 512, 64}, Case{64, 16, 2, 1, 1, false},
                        Case{3, 4096, 32, 16, 4}, Case{9, 8, 8}, Case{4, 12, 3, 12, 3}}) {
    check_case(c);
  }
  check_ties();
  std::printf("      ids compared exactly (published: exact)\n");
  return check::finish("router");
}
