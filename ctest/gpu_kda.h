// Calls of the KDA ops on rows of several streams, for the tests of their CUDA versions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "ops/rows.h"

namespace check {

using Floats = std::vector<float>;

inline Floats poisoned(int64_t n) {
  Floats v(static_cast<size_t>(n));
  std::memset(v.data(), 0xFF, v.size() * sizeof(float));
  return v;
}

inline std::string text(const std::vector<int32_t>& lengths) {
  std::string s = "segments";
  for (size_t i = 0; i < lengths.size() && i < 6; ++i) s += " " + std::to_string(lengths[i]);
  return s + (lengths.size() > 6 ? " …" : "");
}

// One call: rows [first, first + rows) of some segments, each of which goes on where its state is.
struct Call {
  std::vector<rocket::Segment> segment;
  std::vector<int32_t> stream;  // [segments] whose state
  std::vector<int32_t> source;  // [rows] row of the whole input
};

inline Call whole(const std::vector<int32_t>& lengths) {
  Call call;
  for (size_t s = 0; s < lengths.size(); ++s) {
    call.segment.push_back({static_cast<int32_t>(call.source.size()), lengths[s], 100});
    call.stream.push_back(static_cast<int32_t>(s));
    for (int32_t r = 0; r < lengths[s]; ++r) call.source.push_back(static_cast<int32_t>(call.source.size()));
  }
  return call;
}

// The same in calls of at most `chunk` rows of each of the segments that still have some.
inline std::vector<Call> chunked(const std::vector<int32_t>& lengths, int32_t chunk) {
  std::vector<Call> calls;
  const int32_t longest = *std::max_element(lengths.begin(), lengths.end());
  for (int32_t from = 0; from < longest; from += chunk) {
    Call call;
    int32_t first = 0;
    for (size_t s = 0; s < lengths.size(); ++s) {
      const int32_t rows = std::min(chunk, lengths[s] - from);
      if (rows > 0) {
        call.segment.push_back({static_cast<int32_t>(call.source.size()), rows, 100 + from});
        call.stream.push_back(static_cast<int32_t>(s));
        for (int32_t r = 0; r < rows; ++r) call.source.push_back(first + from + r);
      }
      first += lengths[s];
    }
    calls.push_back(call);
  }
  return calls;
}

// What a call keeps for its streams, on the device or on the host, and where the call finds it.
struct Blocks {
  std::vector<float*> state, checkpoint;
};

// Pointers as an op wants them: the state of each segment, the checkpoint of each row that has one. `keep(row)` says
// whether a row of the whole input has one. `empty` segments follow those in use.
template <typename F>
Blocks blocks(const Call& call, float* state, int64_t size, float* saved, int empty, F keep) {
  Blocks b;
  for (const int32_t s : call.stream) b.state.push_back(state + s * size);
  for (int i = 0; i < empty; ++i) b.state.push_back(nullptr);
  for (const int32_t r : call.source) b.checkpoint.push_back(keep(r) ? saved + r * size : nullptr);
  return b;
}

inline std::vector<rocket::Segment> with_empty(const Call& call, int empty) {
  std::vector<rocket::Segment> segment = call.segment;
  for (int i = 0; i < empty; ++i) segment.push_back({static_cast<int32_t>(call.source.size()), 0, 0});
  return segment;
}

inline Floats gather(const Floats& from, const Call& call, int64_t width, int64_t ld) {
  Floats out = poisoned(static_cast<int64_t>(call.source.size()) * ld);
  for (size_t r = 0; r < call.source.size(); ++r) {
    std::memcpy(out.data() + static_cast<int64_t>(r) * ld, from.data() + call.source[r] * width,
                static_cast<size_t>(width) * sizeof(float));
  }
  return out;
}

inline void scatter(const Floats& from, const Call& call, int64_t width, int64_t ld, Floats& to,
                    const std::string& what) {
  for (size_t r = 0; r < call.source.size(); ++r) {
    const float* row = from.data() + static_cast<int64_t>(r) * ld;
    std::memcpy(to.data() + call.source[r] * width, row, static_cast<size_t>(width) * sizeof(float));
    for (int64_t i = width; i < ld; ++i) expect(std::isnan(row[i]), what + ": wrote between its rows");
  }
}

}  // namespace check
