#include "ops/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/cpu_ops.h"

namespace rocket {
namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();

uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// A token that is still in the draw, with its unnormalised probability exp(z - max z).
struct Candidate {
  double p;
  int32_t id;
  bool operator<(const Candidate& other) const { return p != other.p ? p > other.p : id < other.id; }
};

// The largest of n floats, in eight chains that the CPU can run side by side. A NaN is never larger than
// anything, which is what counting as -infinity means.
float maximum(const float* x, int32_t n) {
  float top[8];
  std::fill(top, top + 8, -INFINITY);
  int32_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; ++j) top[j] = x[i + j] > top[j] ? x[i + j] : top[j];
  }
  float best = *std::max_element(top, top + 8);
  for (; i < n; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

int32_t largest(const float* logit, int32_t vocab) {
  constexpr int32_t kBlock = 512;
  float top = -INFINITY;
  int32_t at = 0;
  for (int32_t first = 0; first < vocab; first += kBlock) {
    const float here = maximum(logit + first, std::min(kBlock, vocab - first));
    if (here > top) {
      top = here;
      at = first;
    }
  }
  if (top == -INFINITY) return 0;
  while (logit[at] != top) ++at;
  return at;
}

// The tokens that top_k leaves, in ascending id.
std::vector<Candidate> candidates(const float* logit, int32_t vocab, const SamplingParams& s) {
  std::vector<Candidate> kept;
  const auto z = [&](int32_t i) {
    return std::isnan(logit[i]) ? kNone : logit[i] / static_cast<double>(s.temperature);
  };
  if (s.top_k > 0 && s.top_k < vocab) {
    std::vector<float> clean(vocab);
    std::vector<uint64_t> keys(vocab);
    std::vector<int32_t> id(s.top_k);
    for (int32_t i = 0; i < vocab; ++i) clean[i] = std::isnan(logit[i]) ? -INFINITY : logit[i];
    topk_lowest_index(clean.data(), vocab, s.top_k, keys.data(), id.data());
    kept.reserve(s.top_k);
    for (const int32_t i : id) kept.push_back({z(i), i});
  } else {
    kept.reserve(vocab);
    for (int32_t i = 0; i < vocab; ++i) kept.push_back({z(i), i});
  }
  double top = kNone;
  for (const Candidate& c : kept) top = std::max(top, c.p);
  for (Candidate& c : kept) c.p = c.p == top ? 1.0 : std::exp(c.p - top);
  return kept;
}

double mass(const std::vector<Candidate>& list) {
  double total = 0;
  for (const Candidate& c : list) total += c.p;
  return total;
}

// Walks candidates in descending p. Sorts only as far as the walk gets: a draw seldom leaves the first few
// hundred.
class Descending {
 public:
  explicit Descending(std::vector<Candidate>& list) : list_(list) {}
  size_t size() const { return list_.size(); }
  const Candidate& operator[](size_t i) {
    if (i >= sorted_) {
      const size_t end = std::min(list_.size(), std::max<size_t>(256, 4 * sorted_));
      if (end < list_.size()) std::nth_element(list_.begin() + sorted_, list_.begin() + end, list_.end());
      std::sort(list_.begin() + sorted_, list_.begin() + end);
      sorted_ = end;
    }
    return list_[i];
  }

 private:
  std::vector<Candidate>& list_;
  size_t sorted_ = 0;
};

int32_t draw(const float* logit, int32_t vocab, const SamplingParams& s, double u) {
  std::vector<Candidate> list = candidates(logit, vocab, s);
  const double total = mass(list);
  if (s.min_p > 0) {
    // The largest p is 1 / total, so the factor 1 / total falls out of the comparison.
    std::erase_if(list, [&](const Candidate& c) { return c.p < static_cast<double>(s.min_p); });
  }
  Descending kept(list);
  size_t count = list.size();
  double left = s.min_p > 0 ? mass(list) : total;
  if (s.top_p < 1) {
    const double enough = static_cast<double>(s.top_p) * total;
    left = 0;
    for (count = 0; count < list.size() && left < enough;) left += kept[count++].p;
    if (count == 0) left = kept[count++].p;
  }
  double walked = 0;
  for (size_t i = 0; i + 1 < count; ++i) {
    walked += kept[i].p;
    if (walked > u * left) return kept[i].id;
  }
  return kept[count - 1].id;
}

}  // namespace

double sampling_uniform(uint64_t seed, uint64_t counter) {
  return static_cast<double>(splitmix64(splitmix64(seed) + counter) >> 11) * 0x1p-53;
}

void sample_cpu(const SampleParams& p, Exec& exec) {
  exec.pool->loop(p.rows, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const float* logit = p.logits + row * p.ld;
      const SamplingParams& s = p.sampling[row];
      p.token[row] = s.temperature > 0 ? draw(logit, p.vocab, s, sampling_uniform(s.seed, p.counter[row]))
                                       : largest(logit, p.vocab);
    }
  });
}

}  // namespace rocket
