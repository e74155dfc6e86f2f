#include "base/error.h"
#include "ops/cpu_ops.h"
#include "ops/parallel.h"

namespace rocket::ROCKET_ISA {
namespace {

ROCKET_INLINE void rms_row(const float* x, const float* weight, float eps, int64_t n, float* y) {
  const float r = 1.0f / __builtin_sqrtf(dot(x, x, n) / static_cast<float>(n) + eps);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(y + i, load(x + i) * r * load(weight + i));
  for (; i < n; ++i) y[i] = x[i] * r * weight[i];
}

// Two passes: the variance of values that share a large mean would cancel in one.
ROCKET_INLINE void layer_row(const float* x, const float* weight, const float* bias, float eps, int64_t n,
                             float* y) {
  const int rest = static_cast<int>(n % kLanes);
  const int64_t whole = n - rest;
  F16v s = {};
  for (int64_t i = 0; i < whole; i += kLanes) s += load(x + i);
  if (rest) s += load_part(x + whole, rest);
  const float mean = sum(s) / static_cast<float>(n);

  F16v squares = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    const F16v d = load(x + i) - mean;
    squares += d * d;
  }
  if (rest) {
    float lanes[kLanes] = {};
    for (int i = 0; i < rest; ++i) lanes[i] = x[whole + i] - mean;
    const F16v d = load(lanes);
    squares += d * d;
  }
  const float r = 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(n) + eps);

  for (int64_t i = 0; i < whole; i += kLanes)
    store(y + i, (load(x + i) - mean) * r * load(weight + i) + load(bias + i));
  for (int64_t i = whole; i < n; ++i) y[i] = (x[i] - mean) * r * weight[i] + bias[i];
}

}  // namespace

void norm(const NormParams& p, Exec& exec) {
  if (p.part_count < 1 || p.part_count > NormParams::kMaxParts)
    fail_op("norm", "parts, at most", NormParams::kMaxParts, p.part_count);
  int64_t dims = 0;
  for (int i = 0; i < p.part_count; ++i) dims += p.part[i].dim;
  parallel(exec, p.rows, 2 * dims, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      for (int i = 0; i < p.part_count; ++i) {
        const NormPart& part = p.part[i];
        const float* x = part.x + row * part.ldx;
        float* y = part.y + row * part.ldy;
        if (part.bias) {
          layer_row(x, part.weight, part.bias, part.eps, part.dim, y);
        } else {
          rms_row(x, part.weight, part.eps, part.dim, y);
        }
      }
    }
  });
}

}  // namespace rocket::ROCKET_ISA
