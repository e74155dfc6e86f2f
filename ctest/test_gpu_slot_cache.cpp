// The router's look-up in the device's cache of experts, and the bytes that come from the host bank, against ExpertCache
// and what the bank holds: after every wave, for caches of every size, called one by one and recorded.
#include <algorithm>
#include <chrono>
#include <set>
#include <thread>

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

// Asks for every expert in turn, a row's at a time: each has one place, and its own bytes.
void none_is_lost(check::Gpu& gpu, const Case& c, const StreamBench& bench, const Routing& routing,
                  const std::string& what) {
  const CacheConfig& config = c.config;
  const SlotCache& cache = *bench.stream->look_up();
  for (int32_t layer = 0; layer < config.layers; ++layer) {
    for (int32_t first = 0; first < config.experts; first += config.topk) {
      std::vector<float> logit(static_cast<size_t>(c.most_rows) * static_cast<size_t>(config.experts), -9.0f);
      const int32_t last = std::min(first + config.topk, config.experts);
      for (int32_t e = last - config.topk; e < last; ++e) logit[static_cast<size_t>(e)] = 9.0f;
      DeviceArray<float> logits(gpu, logit);
      bench.stream->begin_step();
      RouterParams p = routing.params(c, 1);
      p.logit = logits.data();
      p.slots = &cache;
      p.layer = layer;
      gpu.ops.router(p, gpu.exec);
      const int32_t waves =
          bench.stream->find(layer, {routing.id.data(), static_cast<size_t>(config.topk)}, gpu.exec);
      for (int32_t wave = 0; wave < waves; ++wave) bench.stream->fetch(wave, gpu.exec);
      for (int32_t e = first; e < last; ++e)
        expect(is_there(gpu, bench, layer, e),
               what + ": bytes of expert " + std::to_string(e) + " at the end");
    }
  }
  const std::vector<int32_t> slot_of = read(gpu, cache.slot_of, int64_t{config.layers} * config.experts);
  const std::vector<int32_t> place_of = read(gpu, cache.place_of, static_cast<int64_t>(slot_of.size()));
  std::set<int32_t> places;
  bool one = true;
  for (size_t key = 0; key < slot_of.size(); ++key) {
    one = one && (slot_of[key] >= 0) == (place_of[key] == -1);
    if (place_of[key] >= 0) one = one && places.insert(place_of[key]).second;
  }
  expect(one, what + ": each expert in one place");
}

void run_case(check::Gpu& gpu, const Case& c) {
  if (!gpu.takes_case()) return;
  const std::string what = describe(c);
  const CacheConfig& config = c.config;
  check::StreamBench bench = make_bench(gpu, c);
  ExpertCache cache = make_cache(c);
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
  expect((stats.fetch_seconds > 0 || streamed == 0) && stats.fetch_seconds < 60,
         what + ": seconds of fetches");
  for (const ExpertKey key : {cache.at(0), cache.at(cache.slots() - 1)}) {
    if (key.layer >= 0) expect(is_there(gpu, bench, key.layer, key.expert), what + ": bytes at the end");
  }
  if (c.exclusive) none_is_lost(gpu, c, bench, routing, what);
}

// Steps recorded as a graph: the copy beside wave 0 is a branch of it. Same launches, whatever is missing.
void recorded(check::Gpu& gpu, const Case& c, int32_t rows, int32_t key_number) {
  if (!gpu.takes_case()) return;
  const std::string what = "recorded, " + describe(c);
  const CacheConfig& config = c.config;
  check::StreamBench bench = make_bench(gpu, c);
  ExpertCache cache = make_cache(c);
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

// Hints between steps, which the device takes and fetches by itself; as nothing begins meanwhile, all of them.
void hinted(check::Gpu& gpu, const Case& c) {
  if (!gpu.takes_case()) return;
  const std::string what = "hints, " + describe(c);
  const CacheConfig& config = c.config;
  check::StreamBench bench = make_bench(gpu, c);
  ExpertCache cache = make_cache(c);
  Routing routing(gpu, c);
  bench.stream->hint(0, std::vector<int32_t>{0});  // from here on steps are told
  bench.stream->stats();                           // waits, so that no step begins before the hint
  if (cache.hint(0, 0).answer == HintAnswer::kTaken) cache.arrived(0, 0);
  for (int step = 0; step < c.steps; ++step) {
    cache.begin_step();
    bench.stream->begin_step();
    for (int32_t layer = 0; layer < config.layers; ++layer) {
      const auto rows = static_cast<int32_t>(check::uniform_int(1, c.most_rows));
      routing.logit.set(Routing::draw(c));
      RouterParams p = routing.params(c, rows);
      p.slots = bench.stream->look_up();
      p.layer = layer;
      gpu.ops.router(p, gpu.exec);
      const int64_t n = int64_t{rows} * config.topk;
      const std::vector<int32_t> id = read(gpu, routing.id.data(), n);
      cache.resolve_rows(layer, id);
      const int32_t waves = bench.stream->find(layer, {routing.id.data(), static_cast<size_t>(n)}, gpu.exec);
      for (int32_t wave = 0; wave < waves; ++wave) bench.stream->fetch(wave, gpu.exec);
    }
    for (int32_t layer = 0; layer < config.layers; ++layer) {
      std::vector<int32_t> wanted;
      for (int64_t count = check::uniform_int(0, 70); count > 0; --count)
        wanted.push_back(static_cast<int32_t>(check::uniform_int(0, config.experts - 1)));
      expect(bench.stream->hint(layer, wanted), what + ": are taken");
      for (const int32_t e : wanted) {
        if (cache.hint(layer, e).answer == HintAnswer::kTaken) cache.arrived(layer, e);
      }
    }
    check_state(gpu, bench, cache, config, what);
    for (int32_t slot = 0; slot < cache.slots(); slot += 3) {
      const ExpertKey at = cache.at(slot);
      if (at.layer >= 0) expect(is_there(gpu, bench, at.layer, at.expert), what + ": bytes in a slot");
    }
  }
  const StreamStats stats = bench.stream->stats();
  const CacheCounters sum = cache.counters();
  expect(sum.hints_useful > 0 && sum.hints_wasted > 0, what + ": of both kinds");
  expect(sum.hints_taken == sum.hints_useful + sum.hints_wasted + stats.hints_there, what + ": each hint");
  if (c.exclusive) none_is_lost(gpu, c, bench, routing, what);
}

// Hints that a step cuts short: whatever was begun is whole, and is accounted for.
void cut_short(check::Gpu& gpu, bool exclusive) {
  Case c = case_of(1, 64, 4, 40, 1);
  c.hidden = 1024, c.inner = 1024, c.exclusive = exclusive;
  const std::string what = "cut short, " + describe(c);
  check::StreamBench bench = make_bench(gpu, c);
  Routing routing(gpu, c);
  for (int step = 0; step < c.steps; ++step) {
    bench.stream->begin_step();
    routing.logit.set(Routing::draw(c));
    RouterParams p = routing.params(c, 1);
    p.slots = bench.stream->look_up();
    gpu.ops.router(p, gpu.exec);
    const int32_t waves =
        bench.stream->find(0, {routing.id.data(), static_cast<size_t>(c.config.topk)}, gpu.exec);
    for (int32_t wave = 0; wave < waves; ++wave) bench.stream->fetch(wave, gpu.exec);
    bench.stream->stats();  // waits: the link is idle, and the first hint is begun at once
    std::vector<int32_t> wanted;
    for (int32_t e = 0; e < c.config.experts; ++e) wanted.push_back((e * 7 + step * 13) % c.config.experts);
    bench.stream->hint(0, wanted);
    // The step begins later and later, the second one not before all are done.
    if (step == 0) bench.stream->stats();
    std::this_thread::sleep_for(std::chrono::microseconds(40 * step));
  }
  bench.stream->begin_step();
  const StreamStats stats = bench.stream->stats();
  const CacheCounters& sum = stats.layers[0];
  expect(sum.hints_taken > 0, what + ": some were begun");
  expect(sum.hints_taken == sum.hints_useful + sum.hints_wasted + stats.hints_there, what + ": each hint");
  const SlotCache& cache = *bench.stream->look_up();
  const std::vector<int32_t> key = read(gpu, cache.key, c.config.slots);
  for (const int32_t e : key) {
    if (e >= 0) expect(is_there(gpu, bench, 0, e), what + ": bytes in a slot");
  }
  if (exclusive) none_is_lost(gpu, c, bench, routing, what);
}

void hints(check::Gpu& gpu) {
  for (const bool exclusive : {false, true}) {
    for (const int64_t slots : {60, 110}) {  // of 120: where few have none, hardly a hint fetches
      Case c = case_of(3, 40, 4, slots, 3);
      c.exclusive = exclusive;
      hinted(gpu, c);
    }
    Case large = case_of(2, 64, 4, 60, 2);  // experts of many pieces
    large.hidden = 512, large.inner = 704, large.exclusive = exclusive;
    hinted(gpu, large);
    Case budgets = case_of(4, 40, 4, 0, 2);
    budgets.config.layer_slots = {12, 17, 38, 21};
    budgets.exclusive = exclusive;
    hinted(gpu, budgets);
    cut_short(gpu, exclusive);
  }
}

void exclusive(check::Gpu& gpu) {
  const auto run = [&](Case c) {
    c.exclusive = true;
    run_case(gpu, c);
  };
  for (const int64_t slots : {3, 4, 9, 17, 32}) run(case_of(3, 11, 3, slots, 7));
  for (const int64_t slots : {4, 13, 60, 119}) run(case_of(3, 40, 4, slots, 40));
  Case large = case_of(2, 64, 4, 30, 16);  // slots of many pieces
  large.hidden = 512, large.inner = 704;
  run(large);
  Case budgets = case_of(4, 40, 4, 0, 20);
  budgets.config.layer_slots = {4, 7, 40, 11};
  run(budgets);
  run(case_of(2, 288, 8, 100, 64));
  Case graph = case_of(3, 40, 4, 30, 8);
  graph.exclusive = true;
  for (const int32_t rows : {1, 2, 8, 16, 17, 48}) {
    graph.most_rows = rows;
    recorded(gpu, graph, rows, 2000 + rows);
  }
}

// What is written may change as soon as write() returns, pinned or not, however small.
void writes(check::Gpu& gpu) {
  constexpr size_t kBytes = 16 << 10, kPieces = 256;
  const BankMemory memory = pinned_bank_memory();
  char* const pinned = memory.take(kBytes);
  const DeviceArray<char> to(gpu, static_cast<int64_t>(kBytes * kPieces));
  for (size_t i = 0; i < kPieces; ++i) {
    std::fill_n(pinned, kBytes, static_cast<char>(i));
    gpu.memory().write(to.data() + i * kBytes, pinned, kBytes);
  }
  const std::vector<char> found = to.get();
  bool same = true;
  for (size_t i = 0; i < found.size(); ++i) same = same && found[i] == static_cast<char>(i / kBytes);
  expect(same, "small writes from pinned memory");
  memory.give_back(pinned);
}

void all(check::Gpu& gpu) {
  writes(gpu);
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
  exclusive(gpu);
  hints(gpu);
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
