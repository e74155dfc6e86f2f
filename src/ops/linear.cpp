#include "ops/cpu_ops.h"
#include "ops/gemm.h"
#include "ops/native.h"

namespace rocket::ROCKET_ISA {

void linear(const LinearParams& p, Exec& exec) {
  if (p.part_count < 1 || p.part_count > LinearParams::kMaxParts)
    fail_op("linear", "parts, at most", LinearParams::kMaxParts, p.part_count);
  int64_t first[LinearParams::kMaxParts + 1] = {};  // tiles of outputs before a part
  bool any_four = false;
  for (int i = 0; i < p.part_count; ++i) {
    const LinearPart& part = p.part[i];
    check_weight("linear", part.w);
    if (part.w.in != p.part[0].w.in) fail_op("linear", "inputs of a part", p.part[0].w.in, part.w.in);
    if (p.rows > 1 && part.ldy < part.w.out) fail_op("linear", "ldy, at least", part.w.out, part.ldy);
    first[i + 1] = first[i] + (part.w.out + kTile - 1) / kTile;
    any_four = any_four || part.w.format == WeightFormat::kNVFP4;
  }
  if (p.rows > 1 && p.ldx < p.part[0].w.in) fail_op("linear", "ldx, at least", p.part[0].w.in, p.ldx);
  if (p.rows <= 0) return;
  const int64_t in = p.part[0].w.in, ld = fixed_floats(in);
  ArenaScope scope(*exec.scratch);
  float* fixed = nullptr;  // [rows, ld], for NVFP4 parts
  if (any_four) {
    fixed = exec.scratch->take<float>(p.rows * ld);
    exec.pool->loop(p.rows, 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r) fixed_row(p.x + r * p.ldx, in, fixed + r * ld);
    });
  }
  exec.pool->loop(first[p.part_count], 8, [&](int64_t begin, int64_t end, int) {
    for (int i = 0; i < p.part_count; ++i) {
      const LinearPart& part = p.part[i];
      const int64_t from = begin > first[i] ? begin - first[i] : 0;
      const int64_t to = min_i64(end - first[i], first[i + 1] - first[i]);
      if (from >= to) continue;
      const int64_t o = from * kTile;
      const bool four = part.w.format == WeightFormat::kNVFP4;
      matmul(part.w, o, min_i64(to * kTile, part.w.out), p.rows, {four ? fixed : p.x, four ? ld : p.ldx},
             {part.y + o, part.ldy, nullptr, nullptr, part.bias ? part.bias + o : nullptr});
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
    fail_op("head_linear", "heads * stride_out, at most", p.w.out,
            static_cast<int64_t>(p.heads) * p.stride_out);
  if (p.rows <= 0) return;
  const int64_t in = p.w.in;
  exec.pool->loop(p.heads, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t h = begin; h < end; ++h) {
      const int64_t row0 = h * p.stride_out + p.offset;
      if (!p.transposed) {
        matmul(p.w, row0, row0 + p.rows_per_head, p.rows, {p.x + h * p.hx, p.ldx}, {p.y + h * p.hy, p.ldy});
        continue;
      }
      for (int32_t r = 0; r < p.rows; ++r) {
        const float* x = p.x + r * p.ldx + h * p.hx;
        float* y = p.y + r * p.ldy + h * p.hy;
        for (int64_t j = 0; j < in; ++j) y[j] = 0;
        for (int32_t i = 0; i < p.rows_per_head; ++i) {
          for (int64_t j = 0; j < in; ++j) {
            const char* at = static_cast<const char*>(p.w.data) +
                             ((row0 + i) * in + j) * (p.w.format == WeightFormat::kF32 ? 4 : 2);
            y[j] += x[i] * (p.w.format == WeightFormat::kF32 ? load_as<float>(at)
                                                             : bf16_to_f32(load_as<uint16_t>(at)));
          }
        }
      }
    }
  });
}

}  // namespace rocket::ROCKET_ISA
