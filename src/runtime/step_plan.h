// A checked step as the forward pass takes it: arrays by row, segments by stream, pointers into the streams'
// state.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/pages.h"
#include "ops/rows.h"
#include "state/stream.h"

namespace rocket {

struct StepPlan {
  std::vector<int32_t> token;           // [rows]
  std::vector<const float*> embedding;  // [rows], null where a token is fed
  bool any_embedding = false;
  std::vector<Segment> segment;      // one a stream
  std::vector<StreamState*> stream;  // [segments]
  std::vector<float*> checkpoint;    // [rows] recurrent blocks to fill, or null
  bool any_checkpoint = false;
  std::vector<int32_t> logits_row;  // rows that want logits, ascending

  int32_t rows() const { return static_cast<int32_t>(token.size()); }
  int32_t segments() const { return static_cast<int32_t>(segment.size()); }

  // Pointers for one layer, valid until the next call of the same function.
  float* const* state(int64_t offset) const;        // [segments] into the recurrent blocks
  float* const* checkpoints(int64_t offset) const;  // [rows], or null if no row asked for one
  const PagedRows* paged(int part) const;           // [segments]

 private:
  mutable std::vector<float*> state_, checkpoints_;
  mutable std::vector<PagedRows> paged_;
};

}  // namespace rocket
