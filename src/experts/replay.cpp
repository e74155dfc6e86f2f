#include "experts/replay.h"

#include <utility>

#include "base/error.h"

namespace rocket {
namespace {

// Calls see(step, layer, choices of all its rows) in the order in which the layers are looked up.
template <typename See>
void each_lookup(const RoutingView& routing, See see) {
  const size_t layers = static_cast<size_t>(routing.layers), topk = static_cast<size_t>(routing.topk);
  std::vector<int32_t> choices;
  int64_t row = 0;
  for (size_t step = 0; step < routing.step_ends.size(); ++step) {
    const int64_t end = routing.step_ends[step];
    for (size_t layer = 0; layer < layers; ++layer) {
      choices.clear();
      for (int64_t r = row; r < end; ++r) {
        const int32_t* ids = routing.ids + (static_cast<size_t>(r) * layers + layer) * topk;
        choices.insert(choices.end(), ids, ids + topk);
      }
      see(step, layer, choices);
    }
    row = end;
  }
}

// `reader` is a cache whose distinct() is used, and checks the ids.
std::vector<std::vector<int64_t>> future(const RoutingView& routing, const CacheConfig& config,
                                         ExpertCache& reader) {
  std::vector<std::vector<int64_t>> uses(static_cast<size_t>(config.layers) *
                                         static_cast<size_t>(config.experts));
  int64_t lookup = 0;
  each_lookup(routing, [&](size_t, size_t layer, const std::vector<int32_t>& choices) {
    for (const int32_t expert : reader.distinct(choices)) {
      uses[layer * static_cast<size_t>(config.experts) + static_cast<size_t>(expert)].push_back(lookup);
    }
    ++lookup;
  });
  return uses;
}

ExpertCache make_cache(const RoutingView& routing, const CacheConfig& config) {
  if (config.policy != "belady") return ExpertCache(config);
  CacheConfig plain = config;
  plain.policy = "lru";
  ExpertCache reader(plain);
  return ExpertCache(config, make_belady(ExpertCache::policy_shape(config), future(routing, config, reader)));
}

}  // namespace

ReplayCounts replay(const RoutingView& routing, const CacheConfig& config) {
  if (config.layers != routing.layers) throw InputError("replay: the routing and the cache differ in layers");
  ExpertCache cache = make_cache(routing, config);
  ReplayCounts counts;
  counts.slots = cache.slots();
  each_lookup(routing, [&](size_t, size_t layer, const std::vector<int32_t>& choices) {
    if (layer == 0) cache.begin_step();
    const int64_t before = cache.layer_counters()[layer].misses;
    size_t experts = 0;
    for (const ExpertWave& wave : cache.resolve_rows(static_cast<int32_t>(layer), choices))
      experts += wave.lookups.size();
    counts.lookups.push_back(static_cast<int32_t>(experts));
    counts.misses.push_back(static_cast<int32_t>(cache.layer_counters()[layer].misses - before));
  });
  counts.layers = cache.layer_counters();
  return counts;
}

}  // namespace rocket
