// Sampling of the next token from logits, the same on every backend.
//
//   greedy: the largest logit, ties to the lowest id (temperature 0)
//   else:   z = logit / temperature; keep the top_k largest (ties to the lowest id); softmax; drop p < min_p * p_max;
//           keep the smallest leading set with mass >= top_p (in descending p, ties to the lowest id); renormalise; draw with
//           u = uniform(seed, counter) by walking kept tokens in descending p. Float64 sums. A NaN logit counts as -inf.
// uniform() is counter-based (splitmix64 of seed and counter), so a draw depends on nothing but these.
#pragma once

#include <cstdint>

namespace rocket {

struct SamplingParams {
  float temperature = 0.0f;  // 0 = greedy
  int32_t top_k = 0;         // 0 = off
  float top_p = 1.0f;        // in (0, 1]; 1 = off
  float min_p = 0.0f;        // in [0, 1); 0 = off
  uint64_t seed = 0;
};

struct SampleParams {
  const float* logits = nullptr;  // [rows, vocab], rows ld apart
  int64_t ld = 0;
  int32_t rows = 0;
  int32_t vocab = 0;
  const SamplingParams* sampling = nullptr;  // [rows]
  const uint64_t* counter = nullptr;         // [rows], the position of the token that is drawn
  int32_t* token = nullptr;                  // out [rows]
};

// Whether rows of logits are all finite.
struct FiniteParams {
  const float* x = nullptr;  // [rows, dim], rows ld apart
  int64_t ld = 0;
  int32_t rows = 0;
  int32_t dim = 0;
  int32_t* bad = nullptr;  // out [rows]: 1 where any value is NaN or infinite, else 0
};

double sampling_uniform(uint64_t seed, uint64_t counter);  // in [0, 1)

}  // namespace rocket
