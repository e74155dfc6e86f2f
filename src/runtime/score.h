// Teacher-forced scores from logits.
#pragma once

#include <cstdint>

namespace rocket {

struct TokenScore {
  double log_prob;  // nats
  int32_t rank;     // tokens with a larger logit, or an equal one and a lower id
  int32_t best;     // arg-max, ties to the lowest id
};

// logits: [vocab]; 0 <= target < vocab. Sums in float64.
TokenScore score_token(const float* logits, int32_t vocab, int32_t target);

}  // namespace rocket
