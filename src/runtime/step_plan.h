// A checked step: what the session decides about it, and what the forward pass sees of it.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/pages.h"
#include "ops/rows.h"
#include "ops/sample.h"
#include "runtime/step.h"
#include "state/layout.h"
#include "state/stream.h"

namespace rocket {

// The session's side. One segment for each stream, rows in order.
struct StepPlan {
  std::vector<int32_t> token;           // [rows]
  std::vector<const float*> embedding;  // [rows], on the host, null where a token is fed
  bool any_embedding = false;
  std::vector<Segment> segment;      // one a stream
  std::vector<StreamState*> stream;  // [segments]
  std::vector<StreamId> stream_id;   // [segments]
  std::vector<RowKind> kind;         // [rows]
  std::vector<float*> checkpoint;    // [rows] recurrent blocks to fill, or null
  bool any_checkpoint = false;
  std::vector<int32_t> logits_row;       // rows that want logits, ascending
  int32_t first_logit = 0;               // where in the step's logits the first of them goes
  std::vector<SamplingParams> sampling;  // [logits_row] how to draw from each, or empty: nothing is drawn
  std::vector<uint64_t> counter;         // likewise
  bool tensor_cores = false;             // rows may be rounded
  bool continues = false;                // a further part of the step that the plan before it began

  int32_t rows() const { return static_cast<int32_t>(token.size()); }
  int32_t segments() const { return static_cast<int32_t>(segment.size()); }
};

// The forward pass's side: arrays in the memory space of the backend.
struct StepView {
  int32_t rows = 0;
  int32_t segments = 0;  // entries of `segment`; on a device some at its end may be empty
  int32_t logits_rows = 0;
  int32_t first_logit = 0;
  const int32_t* token = nullptr;            // [rows]
  const float* const* embedding = nullptr;   // [rows], or null if only tokens are fed
  const Segment* segment = nullptr;          // [segments]
  float* const* state = nullptr;             // [segments] recurrent blocks
  float* const* checkpoint = nullptr;        // [rows] recurrent blocks to fill, each may be null; or null
  float* const* const* pages = nullptr;      // [segments] page tables
  const int32_t* logits_row = nullptr;       // [logits_rows]
  const SamplingParams* sampling = nullptr;  // [logits_rows], or null: nothing is drawn
  const uint64_t* counter = nullptr;         // [logits_rows]

  BlockParts state_part(const RecurrentPart& part) const { return {state, part.offset}; }
  BlockParts checkpoint_part(const RecurrentPart& part) const { return {checkpoint, part.offset}; }
  PagedParts paged_part(const PagedPart& part) const {
    return {pages, part.offset, part.page_rows, part.width, part.bf16};
  }
};

}  // namespace rocket
