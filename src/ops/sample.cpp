#include "ops/sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "ops/cpu_ops.h"

namespace rocket {
namespace {

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

double mass(const std::vector<Candidate>& list) {
  double total = 0;
  for (const Candidate& c : list) total += c.p;
  return total;
}

// Walks candidates in descending p. Sorts only as far as the walk gets: a draw seldom leaves the first few hundred.
class Descending {
 public:
  explicit Descending(std::vector<Candidate>& list) : list_(list) {}
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

// Unnormalised probability of a logit. Equal logits give equal bits, and the largest gives 1, infinity included.
double weight(float logit, float top, double temperature) {
  if (logit == top) return 1;
  return std::isnan(logit) ? 0 : std::exp(logit / temperature - top / temperature);
}

// One row's distribution over the whole vocabulary.
struct Dense {
  std::vector<double> p;
  double total = 0;

  Dense(const float* logit, int32_t vocab, double temperature, ThreadPool& pool) : p(vocab) {
    constexpr int32_t kBlock = 4096;  // summed on its own, so that the total does not depend on threads
    const int32_t blocks = (vocab + kBlock - 1) / kBlock;
    const float top = maximum(logit, vocab);
    std::vector<double> sum(blocks);
    pool.loop(blocks, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t b = begin; b < end; ++b) {
        const auto last = static_cast<int32_t>(std::min<int64_t>(vocab, (b + 1) * kBlock));
        for (auto i = static_cast<int32_t>(b * kBlock); i < last; ++i) {
          // A NaN counts as -infinity, which ties with the largest where there is nothing else.
          p[i] = top == -INFINITY ? 1 : weight(logit[i], top, temperature);
          sum[b] += p[i];
        }
      }
    });
    for (const double x : sum) total += x;
  }

  // The tokens with p >= least, in ascending id.
  std::vector<Candidate> at_least(double least) const {
    std::vector<Candidate> list;
    for (size_t i = 0; i < p.size(); ++i) {
      if (p[i] >= least) list.push_back({p[i], static_cast<int32_t>(i)});
    }
    return list;
  }
};

// The tokens that a draw can reach, and what all tokens that top_k leaves weigh together.
std::vector<Candidate> candidates(const float* logit, int32_t vocab, const SamplingParams& s, double u,
                                  ThreadPool& pool, double& total) {
  std::vector<Candidate> list;
  if (s.top_k > 0 && s.top_k < vocab) {
    std::vector<float> clean(vocab);
    std::vector<uint64_t> keys(vocab);
    std::vector<int32_t> id(s.top_k);
    for (int32_t i = 0; i < vocab; ++i) clean[i] = std::isnan(logit[i]) ? -INFINITY : logit[i];
    topk_lowest_index(clean.data(), vocab, s.top_k, keys.data(), id.data());
    const float top = maximum(clean.data(), vocab);
    for (const int32_t i : id) list.push_back({weight(clean[i], top, s.temperature), i});
    total = mass(list);
    if (s.min_p > 0)
      std::erase_if(list, [&](const Candidate& c) { return c.p < static_cast<double>(s.min_p); });
    return list;
  }
  const Dense dense(logit, vocab, s.temperature, pool);
  total = dense.total;
  // The largest p is 1 / total, so that factor falls out of the comparison with min_p.
  if (s.min_p > 0) return dense.at_least(s.min_p);
  // What the walk in descending p passes before it ends. The margin covers sums in another order.
  const double end = (s.top_p < 1 ? static_cast<double>(s.top_p) : u) * total * (1 + 1e-9);
  for (const double least : {0x1p-6, 0x1p-12, 0x1p-24}) {
    list = dense.at_least(least);
    if (mass(list) > end) return list;
  }
  return dense.at_least(0);
}

int32_t draw(const float* logit, int32_t vocab, const SamplingParams& s, double u, ThreadPool& pool) {
  double total = 0;
  std::vector<Candidate> list = candidates(logit, vocab, s, u, pool, total);
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

// Whether all values are finite: no exponent of all ones. Sixteen at a time, since a vocabulary is long.
bool all_finite(const float* values, int64_t n) {
  typedef uint32_t Wide __attribute__((vector_size(64)));
  constexpr uint32_t kExponent = 0x7f800000u;
  Wide bad = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    Wide bits;
    std::memcpy(&bits, values + i, sizeof bits);
    bad |= reinterpret_cast<Wide>((bits & kExponent) == kExponent);
  }
  uint32_t any = 0;
  for (int lane = 0; lane < 16; ++lane) any |= bad[lane];
  for (; i < n; ++i) any |= !std::isfinite(values[i]);
  return any == 0;
}

}  // namespace

double sampling_uniform(uint64_t seed, uint64_t counter) {
  return static_cast<double>(splitmix64(splitmix64(seed) + counter) >> 11) * 0x1p-53;
}

void sample_cpu(const SampleParams& p, Exec& exec) {
  for (int32_t row = 0; row < p.rows; ++row) {
    const float* logit = p.logits + row * p.ld;
    const SamplingParams& s = p.sampling[row];
    p.token[row] = s.temperature > 0
                       ? draw(logit, p.vocab, s, sampling_uniform(s.seed, p.counter[row]), *exec.pool)
                       : largest(logit, p.vocab);
  }
}

void find_bad_cpu(const FiniteParams& p, Exec&) {
  for (int32_t row = 0; row < p.rows; ++row) p.bad[row] = !all_finite(p.x + row * p.ld, p.dim);
}

}  // namespace rocket
