// CUDA sampling and the search for bad values against the CPU's.
#include "gpu_check.h"

namespace {

using namespace rocket;
using check::DeviceArray;
using check::expect;
using Floats = std::vector<float>;

struct Named {
  const char* name;
  SamplingParams s;
};

// Draws row after row from logits [rows, vocab]; every row has its own counter and, unless greedy, seed.
void compare(check::Gpu& gpu, const std::string& what, const Floats& logits, int32_t rows, int32_t vocab,
             int64_t extra, const std::vector<SamplingParams>& sampling) {
  // Threads that add to one bin wait for each other, under a sanitizer for minutes. Every path has a case that stays.
  const bool spread_out = sampling.size() == 1 && sampling[0].temperature < 0.5f;
  if (gpu.small() && vocab > (spread_out ? 5000 : 700)) return;
  if (!gpu.takes_case()) return;
  if (gpu.small()) rows = std::min(rows, 3);
  const int64_t ld = vocab + extra;
  Floats spread(static_cast<size_t>(rows * ld), INFINITY);
  std::vector<SamplingParams> s;
  std::vector<uint64_t> counter;
  for (int32_t r = 0; r < rows; ++r) {
    std::copy_n(logits.begin() + int64_t{r} * vocab, vocab, spread.begin() + r * ld);
    s.push_back(sampling[static_cast<size_t>(r) % sampling.size()]);
    s.back().seed = static_cast<uint64_t>(check::uniform_int(0, 1 << 30));
    counter.push_back(static_cast<uint64_t>(check::uniform_int(0, 1 << 20)));
  }
  const DeviceArray<float> x(gpu, spread);
  const DeviceArray<SamplingParams> ds(gpu, s);
  const DeviceArray<uint64_t> dc(gpu, counter);
  SampleParams p;
  p.ld = ld;
  p.vocab = vocab;
  const auto draw = [&](int32_t first, int32_t n) {
    const DeviceArray<int32_t> token(gpu, n);
    p.rows = n;
    p.logits = x.data() + first * ld;
    p.sampling = ds.data() + first;
    p.counter = dc.data() + first;
    p.token = token.data();
    gpu.ops.sample(p, gpu.exec);
    token.check(what);
    return token.get();
  };
  const std::vector<int32_t> found = draw(0, rows);
  expect(gpu.scratch.used() == 0, what + ": gives its scratch back");
  std::vector<int32_t> expected(static_cast<size_t>(rows));
  p.rows = rows;
  p.logits = spread.data();
  p.sampling = s.data();
  p.counter = counter.data();
  p.token = expected.data();
  cpu_ops().sample(p, gpu.cpu.exec);
  int32_t wrong = 0;
  for (int32_t r = 0; r < rows; ++r)
    wrong += found[static_cast<size_t>(r)] != expected[static_cast<size_t>(r)];
  expect(wrong == 0, what + ": " + std::to_string(wrong) + " of " + std::to_string(rows) +
                         " draws differ from the CPU's");
  for (int32_t r = 0; r < std::min(rows, 5); ++r) {
    expect(draw(r, 1)[0] == found[static_cast<size_t>(r)], what + ": the same draw alone");
  }
}

Floats repeated(const Floats& row, int32_t rows) {
  Floats all;
  for (int32_t r = 0; r < rows; ++r) all.insert(all.end(), row.begin(), row.end());
  return all;
}

void check_greedy(check::Gpu& gpu) {
  const std::vector<SamplingParams> greedy(1);
  const auto one = [&](const Floats& row) {
    compare(gpu, "greedy, special values", row, 1, static_cast<int32_t>(row.size()), 0, greedy);
  };
  one({1, 3, 3, 2});
  one({NAN, -5, NAN, -4});
  one({NAN, NAN});
  one({-INFINITY, NAN, -INFINITY});
  one({NAN, -INFINITY});
  one({-0.0f, 0.0f});
  one({1, INFINITY, 2});
  for (const int32_t vocab : {1, 5, 100, 4096, 4097, 154880}) {
    compare(gpu, "greedy, vocabulary " + std::to_string(vocab), check::normal(int64_t{9} * vocab), 9, vocab,
            3, greedy);
  }
  Floats ties(20000, -1.0f);
  ties[12345] = ties[4096] = ties[4095] = 2.0f;
  compare(gpu, "greedy, ties", ties, 1, 20000, 0, greedy);
}

const Named kCases[] = {
    {"temperature 1", {1.0f}},
    {"temperature 0.3", {0.3f}},
    {"temperature 2, top-k 40", {2.0f, 40}},
    {"top-k 1", {1.0f, 1}},
    {"top-k 2 of a tie of three", {1.0f, 2}},
    {"top-k 3500", {1.0f, 3500}},
    {"top-k 3500, top-p 0.99", {1.0f, 3500, 0.99f}},
    {"top-k above the vocabulary", {1.5f, 1 << 21}},
    {"top-p 0.9", {1.0f, 0, 0.9f}},
    {"top-p 0.05", {1.0f, 0, 0.05f}},
    {"top-p 0.999", {1.0f, 0, 0.999f}},
    {"min-p 0.1", {1.0f, 0, 1.0f, 0.1f}},
    {"min-p 1e-4", {1.0f, 0, 1.0f, 1e-4f}},
    {"top-k 100, top-p 0.8, min-p 0.02", {1.2f, 100, 0.8f, 0.02f}},
    {"min-p 0.2 below top-p 0.99", {1.0f, 0, 0.99f, 0.2f}},
    {"min-p 0.01, top-p 0.5", {1.0f, 0, 0.5f, 0.01f}},
    {"a temperature that makes it greedy", {1e-30f}},
    {"a temperature that makes it uniform", {1e30f}},
    {"uniform, top-k 7", {1e30f, 7}},
};

void check_filters(check::Gpu& gpu) {
  for (const int32_t vocab : {500, 4096, 20001}) {
    Floats logits = check::normal(vocab, 2.0);
    logits[17] = NAN;
    logits[18] = -INFINITY;
    logits[40] = logits[41] = logits[42] = 6.5f;  // ties, in front or nearly so
    for (const Named& c : kCases) {
      compare(gpu, "vocabulary " + std::to_string(vocab) + ", " + c.name, repeated(logits, 48), 48, vocab, 1,
              {c.s});
    }
  }
  // A draw's settings are its row's own.
  std::vector<SamplingParams> mixed(1);
  for (const Named& c : kCases) mixed.push_back(c.s);
  compare(gpu, "mixed settings", check::normal(40 * 3000, 3.0), 40, 3000, 0, mixed);
  for (const double spread : {1.0, 4.0}) {
    const Floats logits = check::normal(154880, spread);
    for (const Named& c : kCases) {
      compare(gpu, std::string("vocabulary 154880, ") + c.name, repeated(logits, 6), 6, 154880, 0, {c.s});
    }
  }
}

// Equal probabilities meet in one bin: what adds to it then waits for all others, a sanitizer's checks of it too.
void check_flat(check::Gpu& gpu) {
  const int32_t flat = gpu.small() ? 300 : 5000, steep_at = gpu.small() ? 350 : 4100;
  for (const Named& c : kCases) {
    compare(gpu, std::string("flat, ") + c.name, Floats(flat * 16, 0.5f), 16, flat, 0, {c.s});
    compare(gpu, std::string("all NaN, ") + c.name, Floats(700 * 4, NAN), 4, 700, 0, {c.s});
    compare(gpu, std::string("one token, ") + c.name, {0.25f}, 1, 1, 0, {c.s});
    // One token far above equal others, whose probabilities are 0 or denormal.
    for (const float depth : {-740.0f, -800.0f}) {
      Floats steep(steep_at + 100, depth);
      steep[steep_at] = 0;
      compare(gpu, std::string("steep, ") + c.name, repeated(steep, 8), 8, steep_at + 100, 0, {c.s});
    }
    Floats certain = check::normal(300);
    certain[200] = INFINITY;
    compare(gpu, std::string("infinity, ") + c.name, certain, 1, 300, 0, {c.s});
  }
  // A mass that top_p meets exactly is enough.
  compare(gpu, "one of two", repeated({0.0f, 0.0f}, 64), 64, 2, 0, {{1.0f, 0, 0.5f}});
  compare(gpu, "three of four", repeated({1.0f, 1.0f, 1.0f, 1.0f}, 64), 64, 4, 0, {{1.0f, 0, 0.75f}});
}

void check_bad(check::Gpu& gpu) {
  for (const int32_t dim : {1, 5, 4095, 4096, 4097, 154880}) {
    constexpr int32_t kRows = 7;
    const int64_t ld = dim + 2;
    Floats x(kRows * ld, NAN);
    for (int64_t r = 0; r < kRows; ++r) {
      const Floats row = check::normal(dim, 1e37);
      std::copy(row.begin(), row.end(), x.begin() + r * ld);
    }
    const float bad[] = {NAN, INFINITY, -INFINITY};
    const int64_t at[] = {0, dim - 1, dim / 2};
    for (int64_t i = 0; i < 3; ++i) x[static_cast<size_t>((2 * i + 1) * ld + at[i])] = bad[i];
    const DeviceArray<float> dx(gpu, x);
    const DeviceArray<int32_t> out(gpu, kRows);
    FiniteParams p;
    p.x = dx.data();
    p.ld = ld;
    p.rows = kRows;
    p.dim = dim;
    p.bad = out.data();
    gpu.ops.find_bad(p, gpu.exec);
    out.check("find_bad");
    expect(out.get() == std::vector<int32_t>{0, 1, 0, 1, 0, 1, 0},
           "find_bad, " + std::to_string(dim) + " values");
  }
}

void all(check::Gpu& gpu) {
  check_greedy(gpu);
  check_filters(gpu);
  check_flat(gpu);
  check_bad(gpu);
}

}  // namespace

int main() {
  return check::run_on_gpu("gpu_sample", all);
}
