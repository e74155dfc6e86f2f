// The router's look-up in the device's cache of experts, and the bytes that come from the host bank, against ExpertCache
// and what the bank holds: after every wave, for caches of every size, called one by one and recorded.
#include <algorithm>
#include <set>

#include "gpu_slots.h"

namespace {

using namespace rocket;
using namespace check;

// What the first wave of the cache is on the device: its hits, then its misses.
std::vector<std::set<int32_t>> device_waves(std::span<const ExpertWave> waves) {
  std::vector<std::set<int32_t>> all(waves.size() + 1);
  for (size_t w = 0; w < waves.size(); ++w) {
    for (const ExpertLookup& lookup : waves[w].lookups) all[lookup.hit ? 0 : w + 1].insert(lookup.expert);
  }
  return all;
}

void run_case(check::Gpu& gpu, const Case& c) {
  if (!gpu.takes_case()) return;
  const std::string what = describe(c);
  const CacheConfig& config = c.config;
  check::StreamBench bench(gpu, config, c.hidden, c.inner, true, int64_t{c.most_rows} * config.topk, c.copy);
  ExpertCache cache(config);
  Routing routing(gpu, c);
  int64_t streamed = 0;
  const int steps = gpu.small() ? std::min(c.steps, 4) : c.steps;
  for (int step = 0; step < steps; ++step) {
    cache.begin_step();
    bench.stream->begin_step();
    for (int32_t layer = 0; layer < config.layers; ++layer) {
      // The most there may be, any number, and as few as a decode step has.
      const int32_t most = step % 3 == 2 ? std::min(c.most_rows, 2) : c.most_rows;
      const int32_t rows = step % 3 == 0 ? most : static_cast<int32_t>(check::uniform_int(1, most));
      routing.logit.set(Routing::draw(c));
      RouterParams p = routing.params(c, rows);
      gpu.ops.router(p, gpu.exec);
      const int64_t n = int64_t{rows} * config.topk;
      const std::vector<int32_t> alone = read(gpu, routing.id.data(), n);
      p.slots = bench.stream->look_up();
      p.layer = layer;
      gpu.ops.router(p, gpu.exec);
      const std::vector<int32_t> id = read(gpu, routing.id.data(), n);
      expect(id == alone, what + ": the router's choices do not change");
      const std::span<const ExpertWave> resolved = cache.resolve_rows(layer, id);
      for (const ExpertWave& wave : resolved) {
        for (const ExpertFetch& fetch : wave.fetches)
          streamed += slot_layout(bench.table[static_cast<size_t>(fetch.expert)]).stored_bytes();
      }
      const std::vector<std::set<int32_t>> waves = device_waves(resolved);
      const int32_t bound = bench.stream->find(layer, {routing.id.data(), static_cast<size_t>(n)}, gpu.exec);
      expect(static_cast<int32_t>(waves.size()) <= bound, what + ": waves within their bound");
      for (int32_t wave = 0; wave < bound; ++wave) {
        const std::vector<int32_t> found = read(gpu, bench.stream->fetch(wave, gpu.exec), n);
        const std::set<int32_t> members = wave < static_cast<int32_t>(waves.size())
                                              ? waves[static_cast<size_t>(wave)]
                                              : std::set<int32_t>();
        bool same = true;
        for (size_t i = 0; i < id.size(); ++i)
          same = same && found[i] == (members.contains(id[i]) ? id[i] : -1);
        expect(same, what + ": choices of wave " + std::to_string(wave));
        int looked = 0;  // the larger caches: a few, as each look copies a lot
        for (const int32_t e : members) {
          if (++looked > 8) break;
          expect(is_there(gpu, bench, layer, e),
                 what + ": bytes of expert " + std::to_string(e) + " in wave " + std::to_string(wave));
        }
      }
    }
    if (step % 4 == 3 || step + 1 == steps) check_state(gpu, bench, cache, config, what);
  }
  const StreamStats stats = bench.stream->stats();
  expect(stats.streamed_bytes == streamed, what + ": streamed bytes");
  expect(stats.fetch_seconds > 0 && stats.fetch_seconds < 60, what + ": seconds of fetches");
  for (const ExpertKey key : {cache.at(0), cache.at(cache.slots() - 1)}) {
    if (key.layer >= 0) expect(is_there(gpu, bench, key.layer, key.expert), what + ": bytes at the end");
  }
}

// Steps recorded as a graph: the copy beside wave 0 is a branch of it. Same launches, whatever is missing.
void recorded(check::Gpu& gpu, const Case& c, int32_t rows, int32_t key_number) {
  if (!gpu.takes_case()) return;
  const std::string what = "recorded, " + describe(c);
  const CacheConfig& config = c.config;
  check::StreamBench bench(gpu, config, c.hidden, c.inner, true, int64_t{c.most_rows} * config.topk, c.copy);
  ExpertCache cache(config);
  Routing routing(gpu, c);
  const int64_t n = int64_t{rows} * config.topk;
  std::vector<std::unique_ptr<check::DeviceArray<float>>> logits;
  for (int32_t layer = 0; layer < config.layers; ++layer)
    logits.push_back(std::make_unique<check::DeviceArray<float>>(gpu, int64_t{c.most_rows} * config.experts));
  check::DeviceArray<int32_t> ids(gpu, n * config.layers);
  check::DeviceArray<float> y(gpu, 64);
  const std::vector<float> ones(64, 1.0f);
  check::DeviceArray<float> x(gpu, ones);
  Backend::Key key;
  key.rows = rows;
  key.first_logit = key_number;
  const auto step = [&] {
    for (int32_t layer = 0; layer < config.layers; ++layer) {
      RouterParams p = routing.params(c, rows);
      p.logit = logits[static_cast<size_t>(layer)]->data();
      p.id = ids.data() + layer * n;
      p.slots = bench.stream->look_up();
      p.layer = layer;
      gpu.ops.router(p, gpu.exec);
      const int32_t waves = bench.stream->find(layer, {p.id, static_cast<size_t>(n)}, gpu.exec);
      for (int32_t wave = 0; wave < waves; ++wave) {
        bench.stream->fetch(wave, gpu.exec);
        SwigluParams between{x.data(), x.data(), 64, 1, 64, 10.0f, y.data(), 64};
        gpu.ops.swiglu(between, gpu.exec);
      }
    }
  };
  for (int i = 0; i < (gpu.small() ? 3 : 12); ++i) {
    for (const auto& logit : logits) logit->set(Routing::draw(c));
    gpu.backend->run(key, step);
    cache.begin_step();
    const std::vector<int32_t> all = ids.get();
    for (int32_t layer = 0; layer < config.layers; ++layer) {
      const std::vector<int32_t> mine(all.begin() + layer * n, all.begin() + (layer + 1) * n);
      cache.resolve_rows(layer, mine);
    }
    check_state(gpu, bench, cache, config, what);
    for (int32_t slot = 0; slot < cache.slots(); slot += 5) {
      const ExpertKey at = cache.at(slot);
      if (at.layer >= 0) expect(is_there(gpu, bench, at.layer, at.expert), what + ": bytes in a slot");
    }
  }
}

void all(check::Gpu& gpu) {
  for (const SlotCopy copy : {SlotCopy::kLoads, SlotCopy::kBulk}) {
    for (const int64_t slots : {3, 4, 9, 17, 32}) {
      Case c = case_of(3, 11, 3, slots, 7);
      c.copy = copy;
      run_case(gpu, c);
    }
    Case large = case_of(2, 64, 4, 30, 16);  // slots of many pieces
    large.hidden = 512, large.inner = 704, large.copy = copy;
    run_case(gpu, large);
    Case budgets = case_of(4, 40, 4, 0, 20);
    budgets.config.layer_slots = {4, 7, 40, 11};
    budgets.copy = copy;
    run_case(gpu, budgets);
    Case graph = case_of(3, 40, 4, 30, 8);
    graph.copy = copy;
    for (const int32_t rows : {1, 2, 8, 16, 17, 48}) {
      graph.most_rows = rows;
      recorded(gpu, graph, rows, 1000 + rows + 100 * (copy == SlotCopy::kBulk));
    }
    for (const int64_t slots : {4, 13, 60, 119}) {
      Case many = case_of(3, 40, 4, slots, 40);
      many.copy = copy;
      run_case(gpu, many);
    }
  }
  for (const int64_t slots : {8, 100, 500, 863}) run_case(gpu, case_of(3, 288, 8, slots, 64));
  run_case(gpu, case_of(1, 288, 8, 150, 512));
  Case grouped = case_of(2, 256, 8, 100, 40);
  grouped.groups = 8, grouped.topk_group = 4;
  run_case(gpu, grouped);
  Case wide = case_of(2, 4096, 33, 5000, 19);
  wide.steps = 5;
  run_case(gpu, wide);
  Case plain = case_of(2, 1024, 16, 700, 300);
  plain.steps = 5;
  run_case(gpu, plain);
}

}  // namespace

int main() {
  return check::run_on_gpu("gpu_slot_cache", all);
}
