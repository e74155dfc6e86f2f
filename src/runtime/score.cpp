#include "runtime/score.h"

#include <cmath>

namespace rocket {

TokenScore score_token(const float* logits, int32_t vocab, int32_t target) {
  TokenScore score{0, 0, 0};
  for (int32_t i = 1; i < vocab; ++i) {
    if (logits[i] > logits[score.best]) score.best = i;
  }
  const double top = logits[score.best];
  double sum = 0;
  for (int32_t i = 0; i < vocab; ++i) {
    sum += std::exp(static_cast<double>(logits[i]) - top);
    score.rank += logits[i] > logits[target] || (logits[i] == logits[target] && i < target);
  }
  score.log_prob = static_cast<double>(logits[target]) - top - std::log(sum);
  return score;
}

}  // namespace rocket
