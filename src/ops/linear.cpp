#include "ops/cpu_ops.h"
#include "ops/gemm.h"

namespace rocket::ROCKET_ISA {

void linear(const LinearParams& p, Exec& exec) {
  if (p.part_count < 1 || p.part_count > LinearParams::kMaxParts)
    fail_op("linear", "parts, at most", LinearParams::kMaxParts, p.part_count);
  int64_t first[LinearParams::kMaxParts + 1] = {};
  for (int i = 0; i < p.part_count; ++i) {
    const LinearPart& part = p.part[i];
    check_weight("linear", part.w);
    if (part.w.in != p.part[0].w.in) fail_op("linear", "inputs of a part", p.part[0].w.in, part.w.in);
    if (p.rows > 1 && part.ldy < part.w.out) fail_op("linear", "ldy, at least", part.w.out, part.ldy);
    first[i + 1] = first[i] + part.w.out;
  }
  if (p.rows > 1 && p.ldx < p.part[0].w.in) fail_op("linear", "ldx, at least", p.part[0].w.in, p.ldx);
  if (p.rows <= 0) return;
  exec.pool->loop(first[p.part_count], 16, [&](int64_t begin, int64_t end, int) {
    int i = 0;
    for (int64_t at = begin; at < end; ++at) {
      while (at >= first[i + 1]) ++i;
      const LinearPart& part = p.part[i];
      const int64_t o = at - first[i];
      for (int32_t r = 0; r < p.rows; r += 8) {
        const int rows = static_cast<int>(min_i64(8, p.rows - r));
        float y[8];
        dot_rows(part.w, o, p.x + r * p.ldx, p.ldx, rows, y);
        for (int k = 0; k < rows; ++k) part.y[(r + k) * part.ldy + o] = y[k] + (part.bias ? part.bias[o] : 0.0f);
      }
    }
  });
}

void head_linear(const HeadLinearParams& p, Exec& exec) {
  check_weight("head_linear", p.w);
  if (p.w.format != WeightFormat::kF32 && p.w.format != WeightFormat::kBF16)
    fail_op("head_linear", "weight format, F32 or BF16 only", static_cast<int64_t>(WeightFormat::kBF16),
            static_cast<int64_t>(p.w.format));
  if (p.offset < 0 || p.offset + p.rows_per_head > p.stride_out)
    fail_op("head_linear", "offset + rows_per_head, at most", p.stride_out, p.offset + p.rows_per_head);
  if (static_cast<int64_t>(p.heads) * p.stride_out > p.w.out)
    fail_op("head_linear", "heads * stride_out, at most", p.w.out, static_cast<int64_t>(p.heads) * p.stride_out);
  if (p.rows <= 0) return;
  const int64_t in = p.w.in;
  exec.pool->loop(p.heads, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t h = begin; h < end; ++h) {
      const int64_t row0 = h * p.stride_out + p.offset;
      for (int32_t r = 0; r < p.rows; ++r) {
        const float* x = p.x + r * p.ldx + h * p.hx;
        float* y = p.y + r * p.ldy + h * p.hy;
        if (!p.transposed) {
          for (int32_t i = 0; i < p.rows_per_head; ++i) dot_rows(p.w, row0 + i, x, 0, 1, y + i);
          continue;
        }
        for (int64_t j = 0; j < in; ++j) y[j] = 0;
        alignas(64) float chunk[kChunk];
        for (int32_t i = 0; i < p.rows_per_head; ++i) {
          for (int64_t j = 0; j < in; j += kChunk) {
            const int64_t n = min_i64(kChunk, in - j);
            decode_row(p.w, row0 + i, j, n, chunk);
            for (int64_t k = 0; k < n; ++k) y[j + k] += x[i] * chunk[k];
          }
        }
      }
    }
  });
}

}  // namespace rocket::ROCKET_ISA
