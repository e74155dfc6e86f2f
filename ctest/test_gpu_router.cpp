// CUDA router against the CPU's: ids, weights, the count of distinct experts; and the choices of one of several ranks.
#include <algorithm>
#include <set>

#include "gpu_check.h"
#include "ops_check.h"

namespace {

using namespace rocket;

struct Case {
  int32_t rows, experts, topk;
  int32_t groups = 1, topk_group = 1;
  bool norm = true;
};

struct Result {
  std::vector<int32_t> id;
  std::vector<float> weight;
  int64_t distinct = 0;
};

RouterParams params(const Case& c, int64_t ld) {
  RouterParams p;
  p.ld = ld;
  p.rows = c.rows;
  p.experts = c.experts;
  p.topk = c.topk;
  p.groups = c.groups;
  p.topk_group = c.topk_group;
  p.norm_topk_prob = c.norm;
  p.scaling = 2.5f;
  return p;
}

constexpr int64_t kCounted = 1000;  // what the counter holds before

Result run(check::Gpu& gpu, const Case& c, const std::vector<float>& logit, int64_t ld,
           const std::vector<float>& bias, const std::string& what, bool count = true) {
  check::DeviceArray<float> d_logit(gpu, logit), d_bias(gpu, bias), weight(gpu, c.rows * c.topk);
  check::DeviceArray<int32_t> id(gpu, c.rows * c.topk);
  check::DeviceArray<int64_t> distinct(gpu, std::vector<int64_t>{kCounted});
  RouterParams p = params(c, ld);
  p.logit = d_logit.data();
  p.bias = d_bias.data();
  p.id = id.data();
  p.weight = weight.data();
  p.distinct = count ? distinct.data() : nullptr;
  gpu.ops.router(p, gpu.exec);
  const Result result = {id.get(), weight.get(), distinct.get()[0] - kCounted};
  id.check(what + " id");
  weight.check(what + " weight");
  distinct.check(what + " distinct");
  return result;
}

// Of several ranks each tells its own choices from the others', and counts no others.
void check_owners(check::Gpu& gpu, const Case& c, const std::vector<float>& logit, int64_t ld,
                  const std::vector<float>& bias, const Result& found, const std::string& what) {
  constexpr int32_t kRanks = 3;
  std::vector<int32_t> owner;
  for (int32_t e = 0; e < c.experts; ++e)
    owner.push_back(std::uniform_int_distribution<int32_t>(0, kRanks - 1)(check::rng()));
  const check::DeviceArray<float> d_logit(gpu, logit), d_bias(gpu, bias);
  const check::DeviceArray<int32_t> d_owner(gpu, owner);
  const int64_t n = int64_t{c.rows} * c.topk;
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    const check::DeviceArray<float> weight(gpu, n);
    const check::DeviceArray<int32_t> id(gpu, n), own(gpu, n);
    const check::DeviceArray<int64_t> distinct(gpu, std::vector<int64_t>{kCounted});
    RouterParams p = params(c, ld);
    p.logit = d_logit.data();
    p.bias = d_bias.data();
    p.id = id.data();
    p.weight = weight.data();
    p.distinct = distinct.data();
    p.owner = d_owner.data();
    p.rank = rank;
    p.own = own.data();
    gpu.ops.router(p, gpu.exec);
    std::vector<int32_t> expected;
    std::set<int32_t> mine;
    for (const int32_t e : found.id) {
      const bool is_own = owner[static_cast<size_t>(e)] == rank;
      expected.push_back(is_own ? e : -1);
      if (is_own) mine.insert(e);
    }
    check::equal(what + ", owners: ids", id.get().data(), found.id.data(), n);
    check::same_bits(what + ", owners: weights", weight.get().data(), found.weight.data(), n);
    check::equal(what + ", owners: own choices", own.get().data(), expected.data(), n);
    check::expect(distinct.get()[0] - kCounted == static_cast<int64_t>(mine.size()),
                  what + ", owners: distinct own experts");
    own.check(what + " own");
  }
}

Result on_cpu(check::Gpu& gpu, const Case& c, const std::vector<float>& logit, int64_t ld,
              const std::vector<float>& bias) {
  Result result;
  result.id.resize(static_cast<size_t>(c.rows * c.topk));
  result.weight.resize(result.id.size());
  RouterParams p = params(c, ld);
  p.logit = logit.data();
  p.bias = bias.data();
  p.id = result.id.data();
  p.weight = result.weight.data();
  p.distinct = &result.distinct;
  cpu_ops().router(p, gpu.cpu.exec);
  return result;
}

std::string describe(const Case& c) {
  return "router rows " + std::to_string(c.rows) + " experts " + std::to_string(c.experts) + " topk " +
         std::to_string(c.topk) + " groups " + std::to_string(c.groups) + (c.norm ? "" : " no norm");
}

// Where ids differ, the choices must tie within the rounding of two sigmoids and additions.
bool ties(const float* logit, const std::vector<float>& bias, const int32_t* a, const int32_t* b,
          int32_t topk) {
  const auto choice = [&](int32_t e) { return check::sigmoid(logit[e]) + bias[static_cast<size_t>(e)]; };
  std::vector<double> of_a, of_b;
  for (int32_t j = 0; j < topk; ++j) of_a.push_back(choice(a[j])), of_b.push_back(choice(b[j]));
  std::sort(of_a.begin(), of_a.end());
  std::sort(of_b.begin(), of_b.end());
  for (size_t j = 0; j < of_a.size(); ++j) {
    if (!(std::fabs(of_a[j] - of_b[j]) <= 8 * check::kUnit)) return false;
  }
  return true;
}

void check_case(check::Gpu& gpu, const Case& c) {
  if (!gpu.takes_case()) return;
  const std::string what = describe(c);
  const int64_t ld = c.experts + 3;
  const std::vector<float> logit = check::normal(c.rows * ld, 1.5), bias = check::normal(c.experts, 0.1);
  const Result found = run(gpu, c, logit, ld, bias, what), expected = on_cpu(gpu, c, logit, ld, bias);
  int64_t tied = 0;
  const std::set<int32_t> distinct(found.id.begin(), found.id.end());
  std::vector<float> weight, expected_weight;  // of rows with the same ids
  for (int32_t r = 0; r < c.rows; ++r) {
    const int32_t *a = found.id.data() + r * c.topk, *b = expected.id.data() + r * c.topk;
    if (!std::equal(a, a + c.topk, b)) {
      ++tied;
      check::expect(c.groups == 1 && ties(logit.data() + r * ld, bias, a, b, c.topk),
                    what + ": other ids in row " + std::to_string(r));
      continue;
    }
    for (int32_t j = r * c.topk; j < (r + 1) * c.topk; ++j) {
      weight.push_back(found.weight[static_cast<size_t>(j)]);
      expected_weight.push_back(expected.weight[static_cast<size_t>(j)]);
    }
  }
  // exp, addition, division; the sum of topk scores; division and scaling; on both sides.
  check::close(what + ": weights", weight.data(), expected_weight.data(), static_cast<int64_t>(weight.size()),
               2 * check::rounding(6));
  check::expect(tied * 50 <= c.rows, what + ": almost every row can be told");
  check::expect(found.distinct == static_cast<int64_t>(distinct.size()), what + ": distinct experts");
  check_owners(gpu, c, logit, ld, bias, found, what);
  Case one = c;
  one.rows = 1;
  for (int32_t r = 0; r < c.rows; r += c.rows > 16 ? 5 : 1) {
    const std::vector<float> row(logit.begin() + r * ld, logit.begin() + (r + 1) * ld);
    const Result alone = run(gpu, one, row, ld, bias, what, false);
    check::equal(what + ", alone: ids", alone.id.data(), found.id.data() + r * c.topk, c.topk);
    check::same_bits(what + ", alone: weights", alone.weight.data(), found.weight.data() + r * c.topk,
                     c.topk);
    check::expect(alone.distinct == 0, what + ": no counter, no count");
  }
}

// Choices with exact ties, and those that no comparison orders, go as on the CPU.
void check_order(check::Gpu& gpu, const Case& c, std::vector<float> logit, const std::vector<float>& bias,
                 const std::string& name) {
  if (!gpu.takes_case()) return;
  const std::string what = describe(c) + " " + name;
  const Result found = run(gpu, c, logit, c.experts, bias, what),
               expected = on_cpu(gpu, c, logit, c.experts, bias);
  check::equal(what, found.id.data(), expected.id.data(), static_cast<int64_t>(expected.id.size()));
  check::close(what + ": weights", found.weight.data(), expected.weight.data(),
               static_cast<int64_t>(expected.weight.size()), 2 * check::rounding(6));
}

void check_ties(check::Gpu& gpu) {
  for (const Case& c : {Case{2, 16, 4}, Case{1, 16, 4, 4, 2}, Case{3, 288, 8}, Case{1, 64, 40, 8, 3},
                        Case{1, 12, 3, 12, 3}, Case{1, 300, 9, 100, 60}}) {
    const size_t n = static_cast<size_t>(c.experts);
    std::vector<float> logit(static_cast<size_t>(c.rows) * n, 0.25f), bias(n, 0.0f);
    check_order(gpu, c, logit, bias, "all equal");
    for (size_t e = 0; e < n; ++e) bias[e] = static_cast<float>(e % 3) * 0.5f;
    check_order(gpu, c, logit, bias, "steps");
    for (size_t e = 0; e < n; e += 2) logit[e] = NAN;
    check_order(gpu, c, logit, bias, "NaN");
    std::fill(logit.begin(), logit.end(), NAN);
    check_order(gpu, c, logit, bias, "nothing but NaN");
    std::fill(logit.begin(), logit.end(), -200.0f);
    std::fill(bias.begin(), bias.end(), 0.0f);
    for (size_t e = 0; e < n; e += 3) bias[e] = -0.0f;
    check_order(gpu, c, logit, bias, "scores that vanish, zeros of both signs");
    std::fill(bias.begin(), bias.end(), -INFINITY);
    bias[n / 2] = INFINITY;
    check_order(gpu, c, logit, bias, "infinite");
  }
}

void all(check::Gpu& gpu) {
  for (const Case& c :
       {Case{1, 288, 8}, Case{8, 288, 8}, Case{16, 288, 8}, Case{64, 288, 8}, Case{517, 288, 8},
        Case{33, 64, 8}, Case{16, 256, 8, 8, 4}, Case{40, 256, 8, 8, 4}, Case{7, 60, 6, 5, 2},
        Case{5, 512, 64}, Case{64, 16, 2, 1, 1, false}, Case{3, 4096, 32, 16, 4}, Case{19, 4096, 33},
        Case{9, 8, 8}, Case{4, 12, 3, 12, 3}, Case{1, 1, 1}}) {
    check_case(gpu, c);
  }
  check_ties(gpu);
  gpu.ops.router(RouterParams{}, gpu.exec);
}

}  // namespace

int main() {
  return check::run_on_gpu("gpu_router", all);
}
