#include "base/error.h"
#include "ops/cpu_ops.h"
#include "ops/parallel.h"

namespace rocket::ROCKET_ISA {
namespace {

// Widens n BF16 values that may lie at an odd address.
ROCKET_INLINE void widen(const unsigned char* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    store(to + i, load_bf16(reinterpret_cast<const uint16_t*>(from + 2 * i)));
  for (; i < n; ++i) {
    uint16_t bits;
    std::memcpy(&bits, from + 2 * i, sizeof bits);
    to[i] = bf16_to_f32(bits);
  }
}

ROCKET_INLINE void embed_row(const EmbedParams& p, int64_t row) {
  const int64_t hidden = p.table.in;
  float* x = p.x + row * p.streams * hidden;
  const float* ready = p.embedding ? p.embedding[row] : nullptr;
  const auto* table = static_cast<const unsigned char*>(p.table.data);
  if (ready) {
    std::memcpy(x, ready, hidden * sizeof(float));
  } else if (p.table.format == WeightFormat::kBF16) {
    widen(table + 2 * p.token[row] * hidden, x, hidden);
  } else {
    std::memcpy(x, table + 4 * p.token[row] * hidden, hidden * sizeof(float));
  }
  for (int32_t n = 1; n < p.streams; ++n) std::memcpy(x + n * hidden, x, hidden * sizeof(float));
}

}  // namespace

void embed(const EmbedParams& p, Exec& exec) {
  if (p.rows == 0) return;
  if (p.table.format != WeightFormat::kBF16 && p.table.format != WeightFormat::kF32) {
    fail_op("embed", "table format (kF32 or kBF16)", static_cast<int64_t>(WeightFormat::kBF16),
            static_cast<int64_t>(p.table.format));
  }
  parallel(exec, p.rows, p.streams * p.table.in, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) embed_row(p, row);
  });
}

}  // namespace rocket::ROCKET_ISA
