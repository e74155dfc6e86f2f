// A step: rows of any mix of streams that go through the model together.
#pragma once

#include <cstdint>
#include <vector>

namespace rocket {

using StreamId = int32_t;

enum class RowKind : uint8_t {
  kDecode,   // float32 activations, bits independent of the other rows of the step
  kPrefill,  // may be rounded for tensor cores by a backend that says so; the CPU treats it as kDecode
};

struct Row {
  int32_t token = -1;                // id in [0, vocab); ignored where `embedding` is set
  const float* embedding = nullptr;  // [H], a ready-made embedding instead of a token; copied, may be null
  StreamId stream = 0;
  int64_t position = -1;  // must be the stream's next position; -1 = fill it in
  bool wants_logits = false;
  bool checkpoint = false;  // keep the state after this row until commit() or the stream's next step
  RowKind kind = RowKind::kDecode;
};

// The rows of one stream stand together and in order.
struct Step {
  std::vector<Row> rows;
};

}  // namespace rocket
