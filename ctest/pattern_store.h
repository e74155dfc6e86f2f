// Experts with bytes that tell them apart, and where they come from, for tests and benchmarks of caches.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "experts/cache.h"
#include "experts/host_bank.h"
#include "experts/store.h"

namespace check {

// The word at place i of a part of an expert: data of gate, up, down are parts 0 to 2, their scales 3 to 5.
inline uint32_t bank_word(int32_t layer, int32_t expert, int part, int64_t i) {
  uint32_t x =
      static_cast<uint32_t>((layer * 5003 + expert) * 6 + part) * 0x9e3779b9u + static_cast<uint32_t>(i);
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  return x ^ (x >> 13);
}

inline std::vector<char> bank_bytes(int32_t layer, int32_t expert, int part, int64_t bytes) {
  std::vector<char> all(static_cast<size_t>((bytes + 3) / 4 * 4));
  for (int64_t i = 0; i < (bytes + 3) / 4; ++i) {
    const uint32_t word = bank_word(layer, expert, part, i);
    std::memcpy(all.data() + i * 4, &word, 4);
  }
  all.resize(static_cast<size_t>(bytes));
  return all;
}

class PatternStore : public rocket::ExpertStore {
 public:
  const char* name() const override { return "pattern"; }
  int32_t pieces() const override { return 3; }
  void fetch(int32_t layer, int32_t expert, int32_t piece, const rocket::SlotLayout& layout,
             void* slot) const override {
    char* const base = static_cast<char*>(slot);
    const size_t part = static_cast<size_t>(piece);
    const auto fill = [&](int which, int64_t at, int64_t bytes) {
      const std::vector<char> all = bank_bytes(layer, expert, which, bytes);
      std::copy(all.begin(), all.end(), base + at);
    };
    fill(piece, layout.data_at[part], layout.data_bytes[part]);
    fill(3 + piece, layout.scale_at[part], layout.scale_bytes[part]);
  }
};

// Tensor by tensor, as files may have them.
inline std::vector<rocket::BankPiece> pattern_order(const rocket::CacheConfig& config) {
  std::vector<rocket::BankPiece> order;
  for (int32_t piece = 0; piece < 3; ++piece) {
    for (int32_t layer = 0; layer < config.layers; ++layer) {
      for (int32_t e = 0; e < config.experts; ++e) order.push_back({layer, e, piece});
    }
  }
  return order;
}

// NVFP4, and with `mix` every third expert BF16, so that slots are not all filled to the end.
inline std::vector<rocket::ExpertWeights> stream_table(int32_t experts, int64_t hidden, int64_t inner,
                                                       bool mix) {
  std::vector<rocket::ExpertWeights> table;
  for (int32_t e = 0; e < experts; ++e) {
    const auto weight = [&](int64_t out, int64_t in) {
      const bool plain = mix && e % 3 == 2;
      return rocket::Weight{plain ? rocket::WeightFormat::kBF16 : rocket::WeightFormat::kNVFP4,
                            out,
                            in,
                            nullptr,
                            nullptr,
                            0.02f};
    };
    table.push_back({weight(inner, hidden), weight(inner, hidden), weight(hidden, inner)});
  }
  return table;
}

}  // namespace check
