// Experts for tests of streams: small, of several formats, their bytes known by layer, expert and piece.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "experts/cache.h"
#include "experts/slot_layout.h"

namespace check::fake {

using namespace rocket;

constexpr int32_t kLayers = 3, kExperts = 11, kTopk = 3, kRows = 7;

inline std::mt19937_64 rng(20261130);
inline int32_t draw(int32_t low, int32_t high) {
  return std::uniform_int_distribution<int32_t>(low, high)(rng);
}

inline Weight shape(WeightFormat format, int64_t out, int64_t in) {
  return Weight{format, out, in, nullptr, nullptr, 1.0f};
}

// Experts of several formats, so that slots are not all filled to the end.
inline ExpertWeights make_expert(int32_t layer, int32_t expert) {
  const WeightFormat formats[] = {WeightFormat::kNVFP4, WeightFormat::kBF16, WeightFormat::kMXFP8};
  const WeightFormat format = formats[(layer + expert) % 3];
  return {shape(format, 32, 64), shape(format, 32, 64), shape(format, 64, 32)};
}

inline uint8_t byte_of(int32_t layer, int32_t expert, int32_t piece) {
  return static_cast<uint8_t>(1 + (layer * kExperts + expert) * 3 + piece);
}

// A piece of an expert as a store brings it.
inline void fill(int32_t layer, int32_t expert, int32_t piece, const SlotLayout& layout, void* slot) {
  const size_t part = static_cast<size_t>(piece);
  char* const base = static_cast<char*>(slot);
  const uint8_t byte = byte_of(layer, expert, piece);
  std::memset(base + layout.data_at[part], byte, static_cast<size_t>(layout.data_bytes[part]));
  std::memset(base + layout.scale_at[part], byte, static_cast<size_t>(layout.scale_bytes[part]));
}

inline bool all_are(const void* from, int64_t bytes, uint8_t value) {
  const uint8_t* p = static_cast<const uint8_t*>(from);
  return p && std::all_of(p, p + bytes, [&](uint8_t b) { return b == value; });
}

using Tables = std::vector<ExpertWeights>[kLayers];

// Whether the table says where the expert's bytes are, and they are its own.
inline bool is_there(const Tables& tables, int32_t layer, int32_t expert) {
  const ExpertWeights& e = tables[layer][static_cast<size_t>(expert)];
  const SlotLayout layout = slot_layout(e);
  const Weight* const weights[] = {&e.gate, &e.up, &e.down};
  for (int32_t piece = 0; piece < 3; ++piece) {
    const size_t part = static_cast<size_t>(piece);
    if (!all_are(weights[piece]->data, layout.data_bytes[part], byte_of(layer, expert, piece))) return false;
    if (layout.scale_bytes[part] > 0 &&
        !all_are(weights[piece]->block_scale, layout.scale_bytes[part], byte_of(layer, expert, piece)))
      return false;
  }
  return true;
}

inline std::vector<int32_t> choices() {
  std::vector<int32_t> ids;
  for (int32_t row = draw(1, kRows); row > 0; --row) {
    std::vector<int32_t> all(kExperts);
    for (int32_t e = 0; e < kExperts; ++e) all[static_cast<size_t>(e)] = e;
    std::sample(all.begin(), all.end(), std::back_inserter(ids), kTopk, rng);
    if (draw(0, 5) == 0) ids.back() = -1;
  }
  return ids;
}

inline CacheConfig config_of(int64_t slots, const std::string& policy) {
  CacheConfig c;
  c.layers = kLayers, c.experts = kExperts, c.topk = kTopk, c.slots = slots, c.policy = policy;
  return c;
}

}  // namespace check::fake
