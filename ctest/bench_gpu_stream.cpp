// A cache of experts on the device, in the shapes of GLM-5.3-Flash: 8 of 288 experts a row, hidden size 4096, inner size
// 2048, NVFP4.
//
//   the rate of a fetch from the host bank, of all kinds, beside cudaMemcpyAsync from pinned memory in the same run
//   what a look-up adds to the router: everything there, and about half missing
//   what waves add to a layer of experts where nothing is missing
#include <algorithm>

#include "gpu_bench.h"
#include "gpu_stream.h"

namespace {

using namespace rocket;

constexpr int64_t kHidden = 4096, kInner = 2048;
constexpr int32_t kTopk = 8, kLaunches = 24;

CacheConfig config_of(int32_t layers, int32_t experts, int64_t slots) {
  CacheConfig config;
  config.layers = layers, config.experts = experts, config.topk = kTopk, config.slots = slots;
  return config;
}

// Logits of which each launch has its own, and what the router writes.
struct Routing {
  Routing(check::Gpu& gpu, int32_t experts, int32_t rows, const std::vector<float>& logits)
      : experts(experts),
        rows(rows),
        logit(gpu, logits),
        bias(gpu, std::vector<float>(static_cast<size_t>(experts))),
        weight(gpu, int64_t{rows} * kTopk),
        id(gpu, int64_t{rows} * kTopk) {}
  RouterParams params(int launch) const {
    RouterParams p;
    p.ld = p.experts = experts;
    p.logit = logit.data() + int64_t{launch} * rows * experts;
    p.bias = bias.data();
    p.rows = rows;
    p.topk = kTopk;
    p.id = id.data();
    p.weight = weight.data();
    return p;
  }
  std::span<const int32_t> ids() const { return {id.data(), static_cast<size_t>(rows * kTopk)}; }

  int32_t experts, rows;
  check::DeviceArray<float> logit, bias, weight;
  check::DeviceArray<int32_t> id;
};

// Eight experts a launch in turn, of 64, in eight slots: all are missing, always.
constexpr int32_t kFetched = 64;
void fetch_rate(check::Gpu& gpu, const check::StreamBench& bench, const char* name, double copy_rate) {
  constexpr int32_t kExperts = kFetched;
  std::vector<float> logits(static_cast<size_t>(kLaunches * kExperts), -4.0f);
  for (int i = 0; i < kLaunches; ++i) {
    for (int j = 0; j < kTopk; ++j)
      logits[static_cast<size_t>(i * kExperts + (i * kTopk + j) % kExperts)] = 4.0f;
  }
  const Routing routing(gpu, kExperts, 1, logits);
  const double us = check::time_us(gpu, kLaunches, [&](int i) {
    RouterParams p = routing.params(i);
    p.slots = bench.stream->look_up();
    gpu.ops.router(p, gpu.exec);
    bench.stream->find(0, routing.ids(), gpu.exec);
    bench.stream->fetch(0, gpu.exec);
    bench.stream->fetch(1, gpu.exec);
  });
  const double bytes = static_cast<double>(slot_bytes_of(bench.table)) * kTopk;
  check::report(name, us, bytes, copy_rate);
}

// Of rows among 288 experts in each of five layers; slots for all of them, or for half.
void look_ups(check::Gpu& gpu, int32_t rows) {
  constexpr int32_t kExperts = 288, kLayers = 5;
  const Routing routing(gpu, kExperts, rows, check::normal(int64_t{kLaunches} * rows * kExperts, 1.0));
  const double without =
      check::time_us(gpu, kLaunches, [&](int i) { gpu.ops.router(routing.params(i), gpu.exec); });
  std::printf("router of %d rows alone %.2f us", rows, without);
  for (const int64_t slots : {kLayers * kExperts, kLayers * kExperts / 2}) {
    // Small experts: their bytes are not looked at here.
    check::StreamBench bench(gpu, config_of(kLayers, kExperts, slots), 64, 32, false, int64_t{rows} * kTopk,
                             SlotCopy::kLoads);
    const double with = check::time_us(gpu, kLaunches, [&](int i) {
      RouterParams p = routing.params(i);
      p.slots = bench.stream->look_up();
      p.layer = i % kLayers;
      gpu.ops.router(p, gpu.exec);
    });
    int64_t misses = 0, hits = 0;
    for (const CacheCounters& c : bench.stream->stats().layers) misses += c.misses, hits += c.hits;
    std::printf("; with a look-up in %d slots +%.2f us (%.0f %% hit since the start)",
                static_cast<int>(slots), with - without,
                100.0 * static_cast<double>(hits) / static_cast<double>(hits + misses));
  }
  std::printf("\n");
}

// A layer's experts: in place, and through the waves of a cache that has them all.
void waves(check::Gpu& gpu, int32_t rows) {
  constexpr int32_t kExperts = 64;
  check::StreamBench bench(gpu, config_of(1, kExperts, kExperts), kHidden, kInner, false,
                           int64_t{rows} * kTopk, SlotCopy::kLoads);
  const Routing routing(gpu, kExperts, rows, check::normal(int64_t{kLaunches} * rows * kExperts, 1.0));
  const check::DeviceArray<float> x(gpu, check::normal(rows * kHidden)), out(gpu, rows * kTopk * kHidden);
  ExpertFfnParams f;
  f.x = x.data();
  f.ldx = kHidden;
  f.rows = rows;
  f.topk = kTopk;
  f.weight = routing.weight.data();
  f.expert = bench.tables_on_device[0];
  f.experts = kExperts;
  f.hidden = static_cast<int32_t>(kHidden);
  f.inner = static_cast<int32_t>(kInner);
  f.limit = 10.0f;
  f.out = out.data();
  const auto streamed = [&](int i) {
    RouterParams p = routing.params(i);
    p.slots = bench.stream->look_up();
    gpu.ops.router(p, gpu.exec);
    const int32_t count = bench.stream->find(0, routing.ids(), gpu.exec);
    for (int32_t wave = 0; wave < count; ++wave) {
      f.id = bench.stream->fetch(wave, gpu.exec);
      f.keep_absent = wave > 0;
      gpu.ops.expert_ffn(f, gpu.exec);
    }
  };
  for (int pass = 0; pass < 2; ++pass) {
    for (int i = 0; i < kLaunches; ++i) streamed(i);  // now all of them are there
  }
  const double in_waves = check::time_us(gpu, kLaunches, streamed);
  f.keep_absent = false;
  f.id = routing.id.data();
  const double in_place = check::time_us(gpu, kLaunches, [&](int i) {
    gpu.ops.router(routing.params(i), gpu.exec);
    gpu.ops.expert_ffn(f, gpu.exec);
  });
  std::printf("router and experts of %d rows: in place %.2f us, in waves with all there %.2f us, +%.2f us\n",
              rows, in_place, in_waves, in_waves - in_place);
}

void all(check::Gpu& gpu) {
  std::string why;
  const std::optional<DeviceRates> rates = device_rates(0.5, &why);
  if (!rates) {
    check::expect(false, "rates of the device: " + why);
    return;
  }
  std::printf("cudaMemcpyAsync from pinned memory: %.2f GB/s; the figures of fetches are shares of it\n",
              rates->pinned_to_gb_s);
  const auto config = config_of(1, kFetched, kTopk);
  const double rate = rates->pinned_to_gb_s * 1e9;
  {
    const check::StreamBench loads(gpu, config, kHidden, kInner, false, kTopk, SlotCopy::kLoads);
    fetch_rate(gpu, loads, "fetch of 8 experts by loads", rate);
  }
  {
    const check::StreamBench bulk(gpu, config, kHidden, kInner, false, kTopk, SlotCopy::kBulk);
    fetch_rate(gpu, bulk, "fetch of 8 experts in bulk", rate);
  }
  {
    const check::StreamBench swaps(gpu, config, kHidden, kInner, false, kTopk);
    fetch_rate(gpu, swaps, "swap of 8 experts, bytes of one direction", rate);
  }
  for (const int32_t rows : {1, 8, 64, 512}) look_ups(gpu, rows);
  for (const int32_t rows : {1, 2, 8}) waves(gpu, rows);
  check::expect(true, "ran");
}

}  // namespace

int main() {
  return check::run_on_gpu("bench_gpu_stream", all);
}
