// Embedding: a row of the table for each token, or a ready-made embedding, copied into N residual streams.
//
//   x[r][n][:] = embedding[r] ? embedding[r][:] : float(table[token[r]][:])        n = 0 … streams-1
#pragma once

#include "ops/weight.h"

namespace rocket {

struct EmbedParams {
  Weight table;                    // [vocab, H], kF32 or kBF16
  const int32_t* token = nullptr;  // [rows]; not read where embedding[r] is set
  const float* const* embedding =
      nullptr;  // [rows] pointers to [H], each may be null; may be null as a whole
  int32_t rows = 0;
  int32_t streams = 1;  // N
  float* x = nullptr;   // out [rows, N, H]
};

}  // namespace rocket
