#include <cmath>

#include "base/error.h"
#include "ops/cpu_ops.h"
#include "ops/float_key.h"

namespace rocket {
namespace {

constexpr int32_t kMaxExperts = 4096;
constexpr int32_t kMaxTopk = 64;

// The best `k` of n candidates so far, best first; a candidate that ties goes behind, so the lowest id wins.
struct Best {
  uint32_t key[kMaxExperts];
  int32_t id[kMaxExperts];
  int32_t count = 0;

  void offer(uint32_t candidate, int32_t at, int32_t k) {
    if (count == k) {
      if (candidate <= key[k - 1]) return;
      --count;
    }
    int32_t slot = count++;
    for (; slot > 0 && key[slot - 1] < candidate; --slot) {
      key[slot] = key[slot - 1];
      id[slot] = id[slot - 1];
    }
    key[slot] = candidate;
    id[slot] = at;
  }
};

// Sum of a group's two best choices.
float group_score(const float* choice, int32_t n) {
  if (n == 1) return choice[0];
  float first = -INFINITY, second = -INFINITY;
  for (int32_t i = 0; i < n; ++i) {
    if (choice[i] > first) {
      second = first;
      first = choice[i];
    } else if (choice[i] > second) {
      second = choice[i];
    }
  }
  return first + second;
}

// Choices outside the best topk_group groups become -infinity.
void mask_groups(const RouterParams& p, float* choice, Best& best) {
  const int32_t size = p.experts / p.groups;
  bool open[kMaxExperts] = {};
  best.count = 0;
  for (int32_t g = 0; g < p.groups; ++g)
    best.offer(float_key(group_score(choice + g * size, size)), g, p.topk_group);
  for (int32_t i = 0; i < best.count; ++i) open[best.id[i]] = true;
  for (int32_t e = 0; e < p.experts; ++e) {
    if (!open[e / size]) choice[e] = -INFINITY;
  }
}

void sort_ascending(int32_t* id, int32_t n) {
  for (int32_t i = 1; i < n; ++i) {
    const int32_t value = id[i];
    int32_t slot = i;
    for (; slot > 0 && id[slot - 1] > value; --slot) id[slot] = id[slot - 1];
    id[slot] = value;
  }
}

void route_row(const RouterParams& p, int64_t row, Best& best) {
  float score[kMaxExperts], choice[kMaxExperts];
  const float* logit = p.logit + row * p.ld;
  for (int32_t e = 0; e < p.experts; ++e) {
    score[e] = 1.0f / (1.0f + std::exp(-logit[e]));
    choice[e] = score[e] + p.bias[e];
  }
  if (p.groups > 1) mask_groups(p, choice, best);
  best.count = 0;
  for (int32_t e = 0; e < p.experts; ++e) best.offer(float_key(choice[e]), e, p.topk);
  sort_ascending(best.id, best.count);

  int32_t* id = p.id + row * p.topk;
  float* weight = p.weight + row * p.topk;
  float total = 0;
  for (int32_t j = 0; j < p.topk; ++j) {
    id[j] = best.id[j];
    weight[j] = score[id[j]];
    total += weight[j];
  }
  for (int32_t j = 0; j < p.topk; ++j) {
    if (p.norm_topk_prob) weight[j] /= total + 1e-20f;
    weight[j] *= p.scaling;
  }
}

}  // namespace

void router_cpu(const RouterParams& p, Exec& exec) {
  if (p.rows == 0) return;
  if (p.experts > kMaxExperts) fail_op("router", "experts, at most", kMaxExperts, p.experts);
  if (p.topk > kMaxTopk) fail_op("router", "topk, at most", kMaxTopk, p.topk);
  if (p.topk > p.experts) fail_op("router", "topk, at most the number of experts", p.experts, p.topk);
  if (p.groups < 1 || p.experts % p.groups != 0)
    fail_op("router", "groups that divide the experts", p.experts, p.groups);
  if (p.slots) fail_op("router", "caches that it looks up, on the CPU", 0, 1);
  exec.pool->loop(p.rows, 4, [&](int64_t begin, int64_t end, int) {
    Best best;
    for (int64_t row = begin; row < end; ++row) route_row(p, row, best);
  });
  if (!p.distinct) return;
  bool seen[kMaxExperts] = {};
  for (int64_t i = 0; i < int64_t{p.rows} * p.topk; ++i) {
    *p.distinct += !seen[p.id[i]];
    seen[p.id[i]] = true;
  }
}

}  // namespace rocket
