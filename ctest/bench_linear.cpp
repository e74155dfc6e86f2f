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

// Adds up `bytes` of floats, a multiple of 256.
#define ROCKET_SUM_BYTES                                           \
  {                                                                \
    typedef float V __attribute__((vector_size(64)));              \
    V s0 = {}, s1 = {}, s2 = {}, s3 = {}, v[4];                    \
    for (const char* end = at + bytes; at < end; at += sizeof v) { \
      std::memcpy(v, at, sizeof v);                                \
      s0 += v[0], s1 += v[1], s2 += v[2], s3 += v[3];              \
    }                                                              \
    return (s0 + s1 + s2 + s3)[0];                                 \
  }
float sum_bytes(const char* at, int64_t bytes) ROCKET_SUM_BYTES
#if defined(__x86_64__)
    __attribute__((target("avx512f"))) float sum_bytes_avx512(const char* at, int64_t bytes) ROCKET_SUM_BYTES
#endif

    // Bytes a second that all threads read together.
    double stream_rate(ThreadPool& pool, const char* data, int64_t bytes) {
  auto* sum = sum_bytes;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) sum = sum_bytes_avx512;
#endif
  std::vector<float> sink(pool.threads() * 16);
  const int64_t block = 1 << 16;
  const Clock::time_point start = Clock::now();
  pool.loop(bytes / block, 16, [&](int64_t begin, int64_t end, int thread) {
    sink[thread * 16] += sum(data + begin * block, (end - begin) * block);
  });
  return static_cast<double>(bytes) / seconds(start);
}

// Floating-point operations of a chain of fused multiply-adds in registers.
#if defined(__x86_64__)
#define ROCKET_CHAINS(NAME, TARGET, BYTES)                                      \
  __attribute__((target(TARGET))) double NAME(int64_t turns) {                  \
    typedef float V __attribute__((vector_size(BYTES)));                        \
    V a0 = V{} + 11, a1 = V{} + 2, a2 = V{} + 3, a3 = V{} + 4, a4 = V{} + 5;    \
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

// n floats on a cache line, as an engine's are.
struct Floats {
  explicit Floats(int64_t n)
      : arena(static_cast<size_t>(n) * sizeof(float), "benchmark rows"), data(arena.take<float>(n)) {
    for (int64_t i = 0; i < n; ++i) data[i] = static_cast<float>(i % 251) / 128 - 1;
  }
  Arena arena;
  float* data;
};

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
  const Floats x(rows * in), y(rows * out);
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
    p.x = x.data;
    p.ldx = in;
    p.rows = rows;
    p.part_count = 1;
    p.part[0] = {view(format, out, in, data, number % places * size), y.data, out, nullptr};
    cpu_ops().linear(p, bench.exec);
  };
  measure(bench, data, turns, c);
}

void bench_heads(check::Bench& bench, const char* data, int turns, bool transposed, int32_t rows) {
  const int32_t heads = 16, stride = 256, dim = 128;
  const int64_t in = 512, size = 2 * heads * stride * in;
  const Floats x(static_cast<int64_t>(rows) * heads * in), y(static_cast<int64_t>(rows) * heads * in);
  Case c;
  c.name = std::string("heads ") + (transposed ? "transposed" : "straight") + ", BF16, " +
           std::to_string(rows) + " rows, 16 x 128 x 512";
  c.bytes = static_cast<double>(size / 2);
  c.flops = 2.0 * rows * heads * dim * static_cast<double>(in);
  c.call = [&](int number) {
    HeadLinearParams p;
    p.w = view(WeightFormat::kBF16, heads * stride, in, data, number % (kBytes / size) * size);
    p.heads = heads, p.stride_out = stride, p.offset = transposed ? 0 : dim, p.rows_per_head = dim;
    p.transposed = transposed;
    p.x = x.data, p.y = y.data, p.rows = rows;
    p.hx = p.hy = in, p.ldx = p.ldy = heads * in;
    cpu_ops().head_linear(p, bench.exec);
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
  const std::vector<float> weight(rows * topk, 0.1f);
  const Floats x(static_cast<int64_t>(rows) * hidden), out(static_cast<int64_t>(rows) * topk * hidden);
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
    const ExpertFfnParams p{x.data,
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
                            out.data};
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
      if (wanted(check::format_name(format)))
        bench_linear(bench, data, turns, format, rows < 16 ? 2048 : 256, 1024, rows);
    }
  }
  if (wanted("wide")) {
    bench_linear(bench, data, turns, WeightFormat::kBF16, 1024, 4096, 1);
    bench_linear(bench, data, turns, WeightFormat::kNVFP4, 1024, 4096, 1);
    bench_linear(bench, data, turns, WeightFormat::kBF16, 128, 4096, 128);
    bench_linear(bench, data, turns, WeightFormat::kNVFP4, 128, 4096, 128);
  }
  if (wanted("small")) {
    for (int64_t size : {256, 512}) bench_linear(bench, data, turns, WeightFormat::kBF16, size, 256, 1);
    bench_linear(bench, data, turns, WeightFormat::kNVFP4, 256, 256, 1);
  }
  if (wanted("heads")) {
    for (int32_t rows : {1, 4, 64}) {
      bench_heads(bench, data, turns, false, rows);
      bench_heads(bench, data, turns, true, rows);
    }
  }
  if (wanted("experts")) {
    for (WeightFormat format : {WeightFormat::kNVFP4, WeightFormat::kBF16}) {
      bench_experts(bench, data, turns, format, 1024, 512, 64, 8, 1);
      bench_experts(bench, data, turns, format, 1024, 512, 64, 8, 4);
      // As many rows an expert as 256 rows with 8 of 64 experts give, in a call short enough for a turn.
      bench_experts(bench, data, turns, format, 1024, 512, 2, 1, 64);
    }
    bench_experts(bench, data, turns, WeightFormat::kNVFP4, 256, 128, 16, 4, 1);
  }
  return 0;
}
