// Times of the CUDA router, expert_ffn, expert_sum and swiglu in the shapes of GLM-5.3-Flash: 8 of 288 experts a row,
// hidden size 4096, inner size 2048, NVFP4. Launches take turns through buffers that the L2 cache does not hold together;
// where they read too little for that, their line says so.
#include <algorithm>
#include <numeric>
#include <set>
#include <string>

#include "gpu_bench.h"

namespace {

using namespace rocket;

constexpr int32_t kHidden = 4096, kInner = 2048, kExperts = 288, kTopk = 8;
constexpr int64_t kNibbles = int64_t{kHidden} * kInner / 2, kScales = int64_t{kHidden} * kInner / 16;
constexpr int64_t kSlot = 3 * (kNibbles + kScales);

// A slot for each expert: gate, up, down, then their scales. A few random slots, copied about.
struct Experts {
  explicit Experts(check::Gpu& gpu)
      : slots(static_cast<size_t>(kExperts * kSlot), "expert slots", gpu.memory()) {
    constexpr int kDrawn = 3;
    char* base = static_cast<char*>(slots.take_bytes(static_cast<size_t>(kExperts * kSlot)));
    std::vector<uint8_t> bytes(static_cast<size_t>(kSlot));
    std::vector<ExpertWeights> host;
    for (int e = 0; e < kExperts; ++e) {
      char* slot = base + e * kSlot;
      if (e < kDrawn) {
        fill(bytes);
        gpu.memory().write(slot, bytes.data(), bytes.size());
      } else {
        gpu.memory().copy(slot, base + e % kDrawn * kSlot, static_cast<size_t>(kSlot));
      }
      const auto part = [&](int i, int64_t out, int64_t in) {
        Weight w;
        w.format = WeightFormat::kNVFP4;
        w.out = out;
        w.in = in;
        w.data = slot + i * kNibbles;
        w.block_scale = slot + 3 * kNibbles + i * kScales;
        w.global_scale = 0.02f;
        return w;
      };
      host.push_back({part(0, kInner, kHidden), part(1, kInner, kHidden), part(2, kHidden, kInner)});
    }
    table = std::make_unique<check::DeviceArray<ExpertWeights>>(gpu, host);
  }
  // Random nibbles, scales of E4M3 values up to 2.
  static void fill(std::vector<uint8_t>& bytes) {
    for (size_t i = 0; i + 8 <= bytes.size(); i += 8) {
      const uint64_t random = check::rng()();
      std::memcpy(bytes.data() + i, &random, sizeof random);
    }
    for (size_t i = static_cast<size_t>(3 * kNibbles); i < bytes.size(); ++i) bytes[i] = bytes[i] % 0x41;
  }

  Arena slots;
  std::unique_ptr<check::DeviceArray<ExpertWeights>> table;
};

// Ids of so many steps; of one row each, all experts have their turn before one comes back.
struct Steps {
  Steps(int count, int32_t rows) {
    std::vector<int32_t> all(kExperts);
    std::iota(all.begin(), all.end(), 0);
    size_t next = all.size();
    for (int step = 0; step < count; ++step) {
      std::set<int32_t> seen;
      for (int32_t r = 0; r < rows; ++r) {
        if (next + kTopk > all.size() || rows > 1) {
          std::shuffle(all.begin(), all.end(), check::rng());
          next = 0;
        }
        std::sort(all.begin() + static_cast<int64_t>(next), all.begin() + static_cast<int64_t>(next) + kTopk);
        for (int j = 0; j < kTopk; ++j) {
          id.push_back(all[next + static_cast<size_t>(j)]);
          seen.insert(id.back());
        }
        next += kTopk;
      }
      distinct += static_cast<double>(seen.size()) / count;
    }
  }
  std::vector<int32_t> id;
  double distinct = 0;  // experts of a step, on average
};

void bench_ffn(check::Gpu& gpu, const Experts& experts, int32_t rows, bool tensor_cores, double rate) {
  const int count = rows == 1 ? kExperts / kTopk : rows <= 16 ? 8 : 2;
  const Steps steps(count, rows);
  const int64_t pairs = int64_t{rows} * kTopk;
  check::DeviceArray<int32_t> id(gpu, steps.id);
  check::DeviceArray<float> x(gpu, check::normal(int64_t{rows} * kHidden)), weight(gpu, check::normal(pairs));
  check::DeviceArray<float> out(gpu, pairs * kHidden);
  ExpertFfnParams p;
  p.x = x.data();
  p.ldx = p.hidden = kHidden;
  p.rows = rows;
  p.topk = kTopk;
  p.weight = weight.data();
  p.expert = experts.table->data();
  p.experts = kExperts;
  p.inner = kInner;
  p.limit = 10.0f;
  p.out = out.data();
  Exec exec = gpu.exec;
  exec.tensor_cores = tensor_cores;
  const double us = check::time_us(gpu, count, [&](int i) {
    p.id = id.data() + i * pairs;
    gpu.ops.expert_ffn(p, exec);
  });
  const std::string name = "expert_ffn rows " + std::to_string(rows) + (tensor_cores ? " rounded" : " exact");
  const double bytes = steps.distinct * static_cast<double>(kSlot) +
                       4.0 * static_cast<double>(rows * int64_t{kHidden} + pairs * (kHidden + 2 * kInner));
  check::report(name.c_str(), us, bytes, rate);
}

void bench_router(check::Gpu& gpu, int32_t rows, double rate) {
  const check::Turns turns(4.0 * (rows + 1) * kExperts);
  const check::Blocks logit(gpu, int64_t{4} * rows * kExperts, turns.sets, check::normal(1 << 20)),
      bias(gpu, 4 * kExperts, turns.sets, check::normal(kExperts, 0.1));
  check::DeviceArray<float> weight(gpu, int64_t{rows} * kTopk);
  check::DeviceArray<int32_t> id(gpu, int64_t{rows} * kTopk);
  check::DeviceArray<int64_t> distinct(gpu, std::vector<int64_t>{0});
  RouterParams p;
  p.ld = p.experts = kExperts;
  p.rows = rows;
  p.topk = kTopk;
  p.scaling = 2.5f;
  p.id = id.data();
  p.weight = weight.data();
  p.distinct = distinct.data();
  const double us = check::time_us(gpu, turns.launches, [&](int i) {
    p.logit = logit[i];
    p.bias = bias[i];
    gpu.ops.router(p, gpu.exec);
  });
  check::report(("router rows " + std::to_string(rows)).c_str(), us, 4.0 * rows * (kExperts + 2 * kTopk),
                rate, &turns);
}

void bench_sum(check::Gpu& gpu, int32_t rows, double rate) {
  const int64_t outs = int64_t{rows} * kTopk * kHidden, sums = int64_t{rows} * kHidden;
  const check::Turns turns(4.0 * static_cast<double>(outs + sums));
  const std::vector<float> noise = check::normal(1 << 20);
  const check::Blocks out(gpu, 4 * outs, turns.sets, noise), y(gpu, 4 * sums, turns.sets, noise);
  const double us = check::time_us(gpu, turns.launches, [&](int i) {
    const ExpertSumParams p{out[i], y[i], rows, kTopk, kHidden, y[i]};
    gpu.ops.expert_sum(p, gpu.exec);
  });
  check::report(("expert_sum rows " + std::to_string(rows)).c_str(), us,
                4.0 * static_cast<double>(outs + 2 * sums), rate, &turns);
}

void bench_swiglu(check::Gpu& gpu, int32_t rows, double rate) {
  const int64_t pairs = int64_t{rows} * 2 * kInner;  // a row's gate, then its up
  const check::Turns turns(4.0 * static_cast<double>(pairs));
  const check::Blocks x(gpu, 4 * pairs, turns.sets, check::normal(1 << 20));
  const check::DeviceArray<float> y(gpu, int64_t{rows} * kInner);
  const double us = check::time_us(gpu, turns.launches, [&](int i) {
    const SwigluParams p{x[i], x[i] + kInner, 2 * kInner, rows, kInner, 10.0f, y.data(), kInner};
    gpu.ops.swiglu(p, gpu.exec);
  });
  check::report(("swiglu rows " + std::to_string(rows)).c_str(), us, 12.0 * rows * kInner, rate, &turns);
}

void all(check::Gpu& gpu) {
  const double rate = check::read_rate(gpu);
  std::printf("streaming read: %.0f GB/s\n", rate * 1e-9);
  const Experts experts(gpu);
  for (const int32_t rows : {1, 2, 4, 8, 16, 512}) bench_ffn(gpu, experts, rows, false, rate);
  for (const int32_t rows : {32, 128, 512, 1024}) bench_ffn(gpu, experts, rows, true, rate);
  for (const int32_t rows : {1, 8, 512}) {
    bench_router(gpu, rows, rate);
    bench_sum(gpu, rows, rate);
    bench_swiglu(gpu, rows, rate);
  }
  check::expect(true, "ran");
}

}  // namespace

int main() {
  return check::run_on_gpu("bench_gpu_experts", all);
}
