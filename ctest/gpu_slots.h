// A cache of experts on the device, against ExpertCache: cases, the router's arrays, and what must be where.
#pragma once

#include <string>
#include <vector>

#include "experts/slot_state.h"
#include "gpu_stream.h"
#include "ops/slot_cache.h"

namespace check {

struct Case {
  rocket::CacheConfig config;
  int64_t hidden = 64, inner = 32;
  int32_t most_rows = 1, groups = 1, topk_group = 1;
  int steps = 12;
  rocket::SlotCopy copy = rocket::SlotCopy::kLoads;
  bool exclusive = false;
};

inline StreamBench make_bench(Gpu& gpu, const Case& c) {
  const int64_t choices = int64_t{c.most_rows} * c.config.topk;
  if (c.exclusive) return StreamBench(gpu, c.config, c.hidden, c.inner, true, choices);
  return StreamBench(gpu, c.config, c.hidden, c.inner, true, choices, c.copy);
}

// The cache that says what the device has to do.
inline rocket::ExpertCache make_cache(const Case& c) {
  rocket::ExpertCache cache(c.config);
  if (!c.exclusive) return cache;
  const rocket::SlotState state(c.config, 1, rocket::Tiers::kExclusive);
  int32_t slot = 0;
  for (const int32_t key : state.in_slots())
    expect(cache.preload(key / c.config.experts, key % c.config.experts) == slot++, "slots from the start");
  return cache;
}

inline std::string describe(const Case& c) {
  const rocket::CacheConfig& config = c.config;
  return std::to_string(config.layers) + " layers of " + std::to_string(config.experts) + ", top " +
         std::to_string(config.topk) + ", " +
         (config.layer_slots.empty() ? std::to_string(config.slots) + " slots" : std::string("budgets")) +
         ", rows to " + std::to_string(c.most_rows) + (c.groups > 1 ? ", groups" : "") +
         (c.copy == rocket::SlotCopy::kBulk ? ", bulk" : "") + (c.exclusive ? ", exclusive" : "");
}

template <typename T>
std::vector<T> read(Gpu& gpu, const T* from, int64_t n) {
  std::vector<T> values(static_cast<size_t>(n));
  gpu.memory().read(values.data(), from, values.size() * sizeof(T));
  return values;
}

// The router's arrays on the device.
struct Routing {
  Routing(Gpu& gpu, const Case& c)
      : logit(gpu, int64_t{c.most_rows} * c.config.experts),
        bias(gpu, std::vector<float>(static_cast<size_t>(c.config.experts))),
        weight(gpu, int64_t{c.most_rows} * c.config.topk),
        id(gpu, int64_t{c.most_rows} * c.config.topk) {}
  // Low experts are chosen more often, so that small caches have hits.
  static std::vector<float> draw(const Case& c) {
    std::vector<float> values = normal(int64_t{c.most_rows} * c.config.experts, 1.0);
    for (size_t i = 0; i < values.size(); ++i) {
      if (static_cast<int32_t>(i % static_cast<size_t>(c.config.experts)) < 2 * c.config.topk)
        values[i] += 1.5f;
    }
    return values;
  }
  rocket::RouterParams params(const Case& c, int32_t rows) const {
    rocket::RouterParams p;
    p.logit = logit.data();
    p.ld = p.experts = c.config.experts;
    p.bias = bias.data();
    p.rows = rows;
    p.topk = c.config.topk;
    p.groups = c.groups;
    p.topk_group = c.topk_group;
    p.id = id.data();
    p.weight = weight.data();
    return p;
  }
  DeviceArray<float> logit, bias, weight;
  DeviceArray<int32_t> id;
};

// Whether the device's table leads to the expert's own bytes.
inline bool is_there(Gpu& gpu, const StreamBench& bench, int32_t layer, int32_t expert) {
  const rocket::ExpertWeights found =
      read(gpu, bench.tables_on_device[static_cast<size_t>(layer)] + expert, 1)[0];
  const rocket::SlotLayout layout = rocket::slot_layout(bench.table[static_cast<size_t>(expert)]);
  const rocket::Weight* const weights[] = {&found.gate, &found.up, &found.down};
  for (int part = 0; part < 3; ++part) {
    const size_t i = static_cast<size_t>(part);
    const auto same = [&](const void* from, int which, int64_t bytes) {
      return from &&
             read(gpu, static_cast<const char*>(from), bytes) == bank_bytes(layer, expert, which, bytes);
    };
    if (weights[part]->global_scale != 0.02f || !same(weights[part]->data, part, layout.data_bytes[i]))
      return false;
    if (layout.scale_bytes[i] == 0 ? weights[part]->block_scale != nullptr
                                   : !same(weights[part]->block_scale, 3 + part, layout.scale_bytes[i]))
      return false;
  }
  return true;
}

inline void check_state(Gpu& gpu, const StreamBench& bench, const rocket::ExpertCache& cache,
                        const rocket::CacheConfig& config, const std::string& what) {
  const rocket::SlotCache& c = *bench.stream->look_up();
  const std::vector<int32_t> key = read(gpu, c.key, cache.slots());
  const std::vector<int32_t> slot_of = read(gpu, c.slot_of, int64_t{config.layers} * config.experts);
  int64_t there = 0;
  for (const int32_t slot : slot_of) there += slot >= 0;
  bool same = there == cache.resident();
  for (int32_t slot = 0; slot < cache.slots(); ++slot) {
    const rocket::ExpertKey at = cache.at(slot);
    const int32_t expected = at.layer < 0 ? -1 : at.layer * config.experts + at.expert;
    same = same && key[static_cast<size_t>(slot)] == expected;
    if (expected >= 0) same = same && slot_of[static_cast<size_t>(expected)] == slot;
  }
  expect(same, what + ": what is in which slot");
  const rocket::StreamStats stats = bench.stream->stats();
  expect(stats.layers == cache.layer_counters(), what + ": counters");
}

inline Case case_of(int32_t layers, int32_t experts, int32_t topk, int64_t slots, int32_t most_rows) {
  Case c;
  c.config.layers = layers, c.config.experts = experts, c.config.topk = topk, c.config.slots = slots;
  c.most_rows = most_rows;
  return c;
}

}  // namespace check
