// topk_lowest_index against a stable sort, with every kind of tie.
#include <algorithm>
#include <limits>
#include <numeric>

#include "ops_check.h"

namespace {

using check::expect;
using rocket::topk_lowest_index;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// NaN below everything; -0 and +0 compare equal as floats do.
bool better(float a, float b) {
  return std::isnan(b) ? !std::isnan(a) : !std::isnan(a) && a > b;
}

std::vector<int32_t> reference(const std::vector<float>& score, int32_t k) {
  std::vector<int32_t> order(score.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return better(score[a], score[b]); });
  order.resize(std::min<size_t>(order.size(), std::max(k, 0)));
  std::sort(order.begin(), order.end());
  return order;
}

void run(const std::string& what, const std::vector<float>& score, int32_t k) {
  const auto n = static_cast<int32_t>(score.size());
  const std::vector<int32_t> expected = reference(score, k);
  check::Guarded<int32_t> out(expected.size());
  check::Guarded<uint64_t> keys(n);
  const int32_t count = topk_lowest_index(score.data(), n, k, keys.data(), out.data());
  const std::string name = what + " n " + std::to_string(n) + " k " + std::to_string(k);
  if (expect(count == static_cast<int32_t>(expected.size()), name + ": count")) {
    check::equal(name, out.data(), expected.data(), count);
  }
  out.check(name);
  keys.check(name + " keys");
}

std::vector<float> drawn_from(const std::vector<float>& values, int32_t n) {
  std::vector<float> score(n);
  for (float& s : score) s = values[check::uniform_int(0, static_cast<int64_t>(values.size()) - 1)];
  return score;
}

}  // namespace

int main() {
  // What ReLU leaves: almost everything exactly 0, more equal scores than any bin or block holds.
  for (const int32_t n : {1, 2, 3, 31, 512, 2049, 5000, 100000}) {
    for (const int32_t k : {1, 2, 7, 512, n - 1, n, n + 1, 0}) {
      if (k < 0) continue;
      run("random", check::normal(n), k);
      run("all equal", std::vector<float>(n, 0.0f), k);
      run("all NaN", std::vector<float>(n, kNan), k);
      run("zeros of both signs", drawn_from({0.0f, -0.0f}, n), k);
      run("few values", drawn_from({0.0f, -0.0f, 1.0f, -1.0f, 1.0f + 0x1p-23f}, n), k);
      run("everything",
          drawn_from({kNan, -kNan, kInf, -kInf, 0.0f, -0.0f, 1e-45f, -1e-45f, 3.4e38f, -3.4e38f}, n), k);
      std::vector<float> relu = check::normal(n);
      for (float& x : relu) x = std::max(x - 2.0f, 0.0f);
      run("mostly zero", relu, k);
    }
  }
  // Keys that differ in the last digit of the radix only, and ascending or descending order.
  std::vector<float> close(4096);
  for (size_t i = 0; i < close.size(); ++i)
    close[i] = std::nextafter(1.0f, 2.0f) + static_cast<float>(i % 700) * 0x1p-23f;
  for (const int32_t k : {1, 100, 1000, 4095}) run("last bits", close, k);
  std::sort(close.begin(), close.end());
  run("ascending", close, 1000);
  std::reverse(close.begin(), close.end());
  run("descending", close, 1000);
  return check::finish("topk");
}
