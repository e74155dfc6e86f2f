// Speed of linear and expert_ffn on cold weights, beside this machine's streaming read rate and FMA peak, all
// measured in turns because both swing on a shared machine. Turns are short and each figure is the best of
// its turns: neighbours only ever slow a turn down.
//
//   bench_linear [threads] [turns] [name]     name: a part of a format's name, "small" or "experts"
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>

#include "stored_weight.h"

using namespace rocket;

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kBytes = int64_t{384} << 20;  // of weights: many times the last-level cache

double seconds(Clock::time_point from) {
  return std::chrono::duration<double>(Clock::now() - from).count();
}

constexpr double kTurn = 3e-3;  // seconds that a turn is meant to take

typedef float Wide __attribute__((vector_size(64)));

// Bytes a second that all threads read together.
double stream_rate(ThreadPool& pool, const char* data, int64_t bytes) {
  std::vector<float> sink(pool.threads() * 16);
  const int64_t block = 1 << 16;
  const Clock::time_point start = Clock::now();
  pool.loop(bytes / block, 16, [&](int64_t begin, int64_t end, int thread) {
    Wide sums[4] = {};
    for (const char* at = data + begin * block; at < data + end * block; at += sizeof sums) {
      for (int j = 0; j < 4; ++j) {
        Wide v;
        std::memcpy(&v, at + j * sizeof v, sizeof v);
        sums[j] += v;
      }
    }
    sink[thread * 16] = sums[0][0] + sums[1][0] + sums[2][0] + sums[3][0];
  });
  return static_cast<double>(bytes) / seconds(start);
}

// Floating-point operations of a chain of fused multiply-adds in registers.
#if defined(__x86_64__)
#define ROCKET_CHAINS(NAME, TARGET, BYTES)                                      \
  __attribute__((target(TARGET))) double NAME(int64_t turns) {                  \
    typedef float V __attribute__((vector_size(BYTES)));                        \
    V a0 = V{} + 1, a1 = V{} + 2, a2 = V{} + 3, a3 = V{} + 4, a4 = V{} + 5;     \
    V a5 = V{} + 6, a6 = V{} + 7, a7 = V{} + 8, a8 = V{} + 9, a9 = V{} + 10;    \
    const V m = V{} + 0.999f, c = V{} + 0.001f;                                 \
    for (int64_t i = 0; i < turns; ++i) {                                       \
      a0 = a0 * m + c, a1 = a1 * m + c, a2 = a2 * m + c, a3 = a3 * m + c;       \
      a4 = a4 * m + c, a5 = a5 * m + c, a6 = a6 * m + c, a7 = a7 * m + c;       \
      a8 = a8 * m + c, a9 = a9 * m + c;                                         \
    }                                                                           \
    volatile float sink = (a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7 + a8 + a9)[0]; \
    (void)sink;                                                                 \
    return static_cast<double>(turns) * 10 * 2 * (BYTES / 4);                   \
  }
ROCKET_CHAINS(chains_avx512, "avx512f", 64)
ROCKET_CHAINS(chains_avx2, "avx2,fma", 32)
#endif

double chains(int64_t turns) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return chains_avx512(turns);
  if (__builtin_cpu_supports("fma")) return chains_avx2(turns);
#endif
  typedef float V __attribute__((vector_size(16)));
  V a[8] = {};
  const V m = V{} + 0.999f, c = V{} + 0.001f;
  for (int64_t i = 0; i < turns; ++i) {
    for (int j = 0; j < 8; ++j) a[j] = a[j] * m + c;
  }
  volatile float sink = a[0][0] + a[1][0] + a[2][0] + a[3][0] + a[4][0] + a[5][0] + a[6][0] + a[7][0];
  (void)sink;
  return static_cast<double>(turns) * 8 * 2 * 4;
}

double fma_peak(ThreadPool& pool) {
  std::vector<double> done(pool.threads());
  const Clock::time_point start = Clock::now();
  pool.loop(pool.threads() * 4, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t i = begin; i < end; ++i) done[thread] += chains(100000);
  });
  double all = 0;
  for (double d : done) all += d;
  return all / seconds(start);
}

struct Case {
  std::string name;
  double bytes, flops;            // of one call
  std::function<void(int)> call;  // call number
};

void measure(check::Bench& bench, const char* data, int turns, const Case& c) {
  double rate = 0, stream = 0, peak = 0;  // calls, bytes, operations a second
  int number = 0;
  const Clock::time_point first = Clock::now();
  c.call(number++);
  int calls = static_cast<int>(std::clamp(kTurn / seconds(first), 1.0, 1000.0));
  for (int t = 0; t < turns; ++t) {
    const int64_t part = kBytes / 8;
    stream = std::max(stream, stream_rate(bench.pool, data + t % 8 * part, part));
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < calls; ++i) c.call(number++);
    const double time = seconds(start);
    rate = std::max(rate, calls / time);
    calls = static_cast<int>(std::clamp(kTurn * rate, 1.0, 1000.0));
    peak = std::max(peak, fma_peak(bench.pool));
  }
  std::printf("%-58s %9.1f us  %6.1f GB/s of %5.1f = %3.0f %%   %6.1f GFLOP/s of %5.1f = %3.0f %%\n",
              c.name.c_str(), 1e6 / rate, c.bytes * rate * 1e-9, stream * 1e-9, 100 * c.bytes * rate / stream,
              c.flops * rate * 1e-9, peak * 1e-9, 100 * c.flops * rate / peak);
  std::fflush(stdout);
}

// A weight in the buffer at `offset`; scales lie behind the data.
Weight view(WeightFormat format, int64_t out, int64_t in, const char* data, int64_t offset) {
  Weight w;
  w.format = format;
  w.out = out;
  w.in = in;
  w.data = data + offset;
  const int64_t bytes = format == WeightFormat::kF32     ? 4 * out * in
                        : format == WeightFormat::kBF16  ? 2 * out * in
                        : format == WeightFormat::kNVFP4 ? out * in / 2
                                                         : out * in;
  w.block_scale = data + offset + bytes;
  return w;
}

void bench_linear(check::Bench& bench, const char* data, int turns, WeightFormat format, int64_t out,
                  int64_t in, int32_t rows) {
  const std::vector<float> x = check::normal(rows * in);
  std::vector<float> y(rows * out);
  const Weight first = view(format, out, in, data, 0);
  const int64_t size = (weight_bytes(first) + 255) / 256 * 256;
  const int64_t places = kBytes / size;
  Case c;
  c.name = std::string(check::format_name(format)) + ", " + std::to_string(rows) + " rows, " +
           std::to_string(out) + " x " + std::to_string(in);
  c.bytes = static_cast<double>(weight_bytes(first));
  c.flops = 2.0 * static_cast<double>(rows * out * in);
  c.call = [&](int number) {
    LinearParams p;
    p.x = x.data();
    p.ldx = in;
    p.rows = rows;
    p.part_count = 1;
    p.part[0] = {view(format, out, in, data, number % places * size), y.data(), out, nullptr};
    cpu_ops().linear(p, bench.exec);
  };
  measure(bench, data, turns, c);
}

void bench_experts(check::Bench& bench, const char* data, int turns, WeightFormat format, int32_t hidden,
                   int32_t inner, int32_t experts, int32_t topk, int32_t rows) {
  const int64_t size = (weight_bytes(view(format, inner, hidden, data, 0)) + 63) / 64 * 64;
  const int64_t layers = std::max<int64_t>(1, kBytes / (size * 3 * experts));
  std::vector<ExpertWeights> table(layers * experts);
  for (int64_t e = 0; e < layers * experts; ++e) {
    table[e] = {view(format, inner, hidden, data, 3 * e * size),
                view(format, inner, hidden, data, (3 * e + 1) * size),
                view(format, hidden, inner, data, (3 * e + 2) * size)};
  }
  const std::vector<float> x = check::normal(static_cast<int64_t>(rows) * hidden), weight(rows * topk, 0.1f);
  std::vector<float> out(static_cast<int64_t>(rows) * topk * hidden);
  std::vector<int32_t> ids;
  std::vector<int64_t> used(experts);
  const int calls = rows == 1 ? 48 : 2;  // different choices of experts
  double active = 0;
  for (int call = 0; call < calls; ++call) {
    std::fill(used.begin(), used.end(), 0);
    for (int32_t r = 0; r < rows; ++r) {
      std::vector<int32_t> all(experts);
      for (int32_t e = 0; e < experts; ++e) all[e] = e;
      std::shuffle(all.begin(), all.end(), check::rng());
      std::sort(all.begin(), all.begin() + topk);
      for (int32_t j = 0; j < topk; ++j) used[all[j]] = 1, ids.push_back(all[j]);
    }
    for (int64_t u : used) active += static_cast<double>(u);
  }
  Case c;
  c.name = "experts " + std::string(check::format_name(format)) + ", " + std::to_string(rows) +
           " rows, top " + std::to_string(topk) + " of " + std::to_string(experts) + ", " +
           std::to_string(inner) + " x " + std::to_string(hidden);
  c.bytes = active / calls * 3 * static_cast<double>(weight_bytes(table[0].gate));
  c.flops = 6.0 * rows * topk * hidden * inner;
  c.call = [&](int number) {
    const ExpertFfnParams p{x.data(),
                            hidden,
                            rows,
                            topk,
                            ids.data() + number % calls * rows * topk,
                            weight.data(),
                            table.data() + number % layers * experts,
                            experts,
                            hidden,
                            inner,
                            10.0f,
                            out.data()};
    cpu_ops().expert_ffn(p, bench.exec);
  };
  measure(bench, data, turns, c);
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 0, turns = argc > 2 ? std::atoi(argv[2]) : 25;
  check::Bench bench(threads, 256 << 20);
  Arena arena(kBytes, "benchmark weights");
  char* data = arena.take<char>(kBytes);
  // Bytes that are ordinary numbers in every format.
  for (int64_t i = 0; i < kBytes; ++i) data[i] = static_cast<char>(0x38 + (i * 2654435761u >> 24 & 7));
  std::printf("%s, %d threads\n", cpu_ops_isa(), bench.pool.threads());
  const auto wanted = [&](const char* name) { return argc <= 3 || std::strstr(name, argv[3]); };
  for (int32_t rows : {1, 2, 4, 16, 256}) {
    for (WeightFormat format : check::kFormats) {
      if (wanted(check::format_name(format))) bench_linear(bench, data, turns, format, 2048, 1024, rows);
    }
  }
  if (wanted("small")) {
    for (int64_t size : {256, 512}) bench_linear(bench, data, turns, WeightFormat::kBF16, size, 256, 1);
    bench_linear(bench, data, turns, WeightFormat::kNVFP4, 256, 256, 1);
  }
  if (wanted("experts")) {
    for (int32_t rows : {1, 4, 32, 256}) {
      bench_experts(bench, data, turns, WeightFormat::kNVFP4, 1024, 512, 64, 8, rows);
      bench_experts(bench, data, turns, WeightFormat::kBF16, 1024, 512, 64, 8, rows);
    }
    bench_experts(bench, data, turns, WeightFormat::kNVFP4, 256, 128, 16, 4, 1);
  }
  return 0;
}
