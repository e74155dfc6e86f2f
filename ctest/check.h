// A small harness for component tests: named checks, comparisons that print max|err| / max|ref|, guarded buffers.
//
// Comparisons look at NaN and infinity first, then at numbers, and pass only where !(error <= limit) is false. Outputs
// are poisoned before the op runs and lie between guard regions that are checked afterwards.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/arena.h"
#include "base/dtype.h"
#include "base/thread_pool.h"
#include "ops/table.h"

namespace check {

inline int failures = 0;
inline int checks = 0;

inline bool expect(bool ok, const std::string& what) {
  ++checks;
  if (!ok) {
    ++failures;
    std::printf("FAIL  %s\n", what.c_str());
  }
  return ok;
}

// max|found - expected| / max|expected| against a limit; `seed_figure` (a published figure for the same component, 0 =
// none) is printed beside it.
template <typename A, typename B>
bool close(const std::string& what, const A* found, const B* expected, int64_t n, double limit,
           double seed_figure = 0) {
  ++checks;
  double worst = 0, scale = 0;
  int64_t mismatched = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double f = static_cast<double>(found[i]), e = static_cast<double>(expected[i]);
    if (std::isnan(f) != std::isnan(e) || std::isinf(f) != std::isinf(e) || (std::isinf(e) && f != e)) {
      ++mismatched;
      continue;
    }
    if (!std::isfinite(e)) continue;
    worst = std::max(worst, std::fabs(f - e));
    scale = std::max(scale, std::fabs(e));
  }
  const double error = scale > 0 ? worst / scale : worst;
  const bool ok = mismatched == 0 && error <= limit;
  if (!ok) ++failures;
  std::printf("%s  %-58s max|err|/max|ref| %.2e  limit %.1e", ok ? "ok  " : "FAIL", what.c_str(), error,
              limit);
  if (seed_figure > 0) std::printf("  (published: %.2e)", seed_figure);
  if (mismatched)
    std::printf("  %lld values differ in being NaN or infinite", static_cast<long long>(mismatched));
  std::printf("\n");
  return ok;
}

template <typename A, typename B>
bool equal(const std::string& what, const A* found, const B* expected, int64_t n) {
  ++checks;
  for (int64_t i = 0; i < n; ++i) {
    if (!(found[i] == expected[i])) {
      ++failures;
      std::printf("FAIL  %s: element %lld: expected %.9g, found %.9g\n", what.c_str(),
                  static_cast<long long>(i), static_cast<double>(expected[i]), static_cast<double>(found[i]));
      return false;
    }
  }
  return true;
}

// Same bits, element by element (tells -0 from 0, compares NaN payloads).
inline bool same_bits(const std::string& what, const float* a, const float* b, int64_t n) {
  ++checks;
  for (int64_t i = 0; i < n; ++i) {
    if (std::memcmp(a + i, b + i, sizeof(float)) != 0) {
      ++failures;
      std::printf("FAIL  %s: element %lld has other bits: %.9g and %.9g\n", what.c_str(),
                  static_cast<long long>(i), a[i], b[i]);
      return false;
    }
  }
  return true;
}

// n elements filled with a poison pattern (a NaN for floats), between guards.
template <typename T>
class Guarded {
 public:
  explicit Guarded(int64_t n) : n_(n), bytes_(2 * kGuard + n * sizeof(T), 0xA5) {
    std::memset(bytes_.data() + kGuard, 0xFF, n * sizeof(T));
  }
  T* data() { return reinterpret_cast<T*>(bytes_.data() + kGuard); }
  T& operator[](int64_t i) { return data()[i]; }
  int64_t size() const { return n_; }
  void check(const std::string& what) {
    bool ok = true;
    for (size_t i = 0; i < kGuard; ++i) ok = ok && bytes_[i] == 0xA5 && bytes_[bytes_.size() - 1 - i] == 0xA5;
    expect(ok, what + ": wrote outside its output");
  }

 private:
  static constexpr size_t kGuard = 256;
  int64_t n_;
  std::vector<uint8_t> bytes_;
};

inline std::mt19937_64& rng() {
  static std::mt19937_64 engine(20260917);
  return engine;
}
inline int64_t uniform_int(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(rng());
}
inline std::vector<float> normal(int64_t n, double scale = 1.0) {
  std::normal_distribution<double> d(0.0, scale);
  std::vector<float> v(n);
  for (float& x : v) x = static_cast<float>(d(rng()));
  return v;
}
inline std::vector<uint16_t> normal_bf16(int64_t n, double scale = 1.0) {
  std::vector<uint16_t> v(n);
  const std::vector<float> f = normal(n, scale);
  for (int64_t i = 0; i < n; ++i) v[i] = rocket::f32_to_bf16(f[i]);
  return v;
}

// The experts that `rows` rows choose: topk distinct ones each, ascending; with `holes` -1 (held elsewhere) for some.
inline std::vector<int32_t> routed_ids(int64_t rows, int32_t topk, int32_t experts, bool holes) {
  std::vector<int32_t> ids, all(static_cast<size_t>(experts));
  std::iota(all.begin(), all.end(), 0);
  for (int64_t r = 0; r < rows; ++r) {
    std::shuffle(all.begin(), all.end(), rng());
    std::vector<int32_t> row(all.begin(), all.begin() + topk);
    std::sort(row.begin(), row.end());
    for (int32_t& id : row) {
      if (holes && uniform_int(0, 3) == 0) id = -1;
    }
    ids.insert(ids.end(), row.begin(), row.end());
  }
  return ids;
}

// An Exec with its own pool and scratch, for calling ops.
struct Bench {
  explicit Bench(int threads = 2, size_t scratch_bytes = 64 << 20)
      : pool(threads), scratch(scratch_bytes, "test scratch") {
    exec.pool = &pool;
    exec.scratch = &scratch;
  }
  rocket::ThreadPool pool;
  rocket::Arena scratch;
  rocket::Exec exec;
};

// The instruction sets that this CPU has, for running every test on each of them.
std::vector<std::string> isas();

inline int finish(const char* name) {
  std::printf("%s: %d checks, %d failed\n", name, checks, failures);
  if (checks == 0) std::printf("FAIL  no check ran\n");
  return failures == 0 && checks > 0 ? 0 : 1;
}

}  // namespace check

inline std::vector<std::string> check::isas() {
  std::vector<std::string> found;
  for (const char* isa : {"portable", "avx2", "avx512"}) {
    try {
      rocket::cpu_ops(isa);
      found.push_back(isa);
    } catch (const std::exception&) {
    }
  }
  return found;
}
