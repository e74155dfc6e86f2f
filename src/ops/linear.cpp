#include "ops/cpu_ops.h"
#include "ops/gemm.h"
#include "ops/quant_decode.h"

namespace rocket::ROCKET_ISA {

void linear(const LinearParams& p, Exec& exec) {
  if (p.part_count < 1 || p.part_count > LinearParams::kMaxParts)
    fail_op("linear", "parts, at most", LinearParams::kMaxParts, p.part_count);
  const int64_t in = p.part[0].w.in, ld = fixed_floats(in);
  int64_t first[LinearParams::kMaxParts + 1] = {};  // tiles of outputs before a part
  bool any_fixed = false;
  double ns = 0;
  for (int i = 0; i < p.part_count; ++i) {
    const LinearPart& part = p.part[i];
    check_weight("linear", part.w);
    if (part.w.in != in) fail_op("linear", "inputs of a part", in, part.w.in);
    if (p.rows > 1 && part.ldy < part.w.out) fail_op("linear", "ldy, at least", part.w.out, part.ldy);
    const int64_t tiles = (part.w.out + kTile - 1) / kTile;
    first[i + 1] = first[i] + tiles;
    any_fixed = any_fixed || part.w.format == WeightFormat::kNVFP4;
    ns += static_cast<double>(tiles * kTile * in) * weight_ns(part.w.format, p.rows);
  }
  if (p.rows > 1 && p.ldx < in) fail_op("linear", "ldx, at least", in, p.ldx);
  if (p.rows <= 0) return;
  ArenaScope scope(*exec.scratch);
  float* fixed = nullptr;  // [rows, ld], for NVFP4 parts
  if (any_fixed) {
    fixed = exec.scratch->take<float>(p.rows * ld);
    exec.pool->loop(p.rows, grain_of(static_cast<double>(in) / 16 * kFixedBlockNs),
                    [&](int64_t begin, int64_t end, int) {
                      for (int64_t r = begin; r < end; ++r) fixed_row(p.x + r * p.ldx, in, fixed + r * ld);
                    });
  }
  const int64_t tiles = first[p.part_count];
  exec.pool->loop(tiles, grain_of(ns / static_cast<double>(tiles)), [&](int64_t begin, int64_t end, int) {
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

namespace {

// kNative columns of a weight of format F.
template <WeightFormat F>
ROCKET_INLINE Fn columns_at(const char* row, int64_t j) {
  return Columns<F>::load(row + j * Columns<F>::kBytes);
}

// The same for the n < kNative columns at the end of a row, the rest zero.
template <WeightFormat F>
ROCKET_INLINE Fn last_columns(const char* row, int64_t j, int64_t n) {
  char bytes[kNative * Columns<F>::kBytes] = {};
  std::memcpy(bytes, row + j * Columns<F>::kBytes, n * Columns<F>::kBytes);
  return Columns<F>::load(bytes);
}

// One head's rows of W, its x and y; y[r][j] = sum over i of x[r][i] * W[i][j], in ascending i.
struct HeadBlock {
  const char* w;
  int64_t ld_bytes;
  int32_t inputs;  // rows of W
  const float* x;
  int64_t ldx;
  float* y;
  int64_t ldy;
};

// R rows, columns [j, j + N * kNative) held in registers.
template <WeightFormat F, int R, int N>
ROCKET_INLINE void head_tile(const HeadBlock& b, int64_t j) {
  Fn sum[R][N];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[r][n] = Fn{};
  }
  const char* w = b.w;
  for (int32_t i = 0; i < b.inputs; ++i, w += b.ld_bytes) {
    Fn v[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) v[n] = columns_at<F>(w, j + n * kNative);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Fn x = nsplat(b.x[r * b.ldx + i]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[r][n] = nfma(v[n], x, sum[r][n]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) nstore(b.y + r * b.ldy + j + n * kNative, sum[r][n]);
  }
}

// The last columns of a row, n < kNative.
template <WeightFormat F, int R>
ROCKET_INLINE void head_rest(const HeadBlock& b, int64_t j, int64_t n) {
  Fn sum[R] = {};
  for (int32_t i = 0; i < b.inputs; ++i) {
    const Fn v = last_columns<F>(b.w + i * b.ld_bytes, j, n);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sum[r] = nfma(v, nsplat(b.x[r * b.ldx + i]), sum[r]);
  }
  for (int r = 0; r < R; ++r) std::memcpy(b.y + r * b.ldy + j, &sum[r], n * sizeof(float));
}

template <WeightFormat F, int R>
[[gnu::noinline]] void head_rows(const HeadBlock& b, int64_t begin, int64_t end) {
  int64_t j = begin;
  for (; j + 4 * kNative <= end; j += 4 * kNative) head_tile<F, R, 4>(b, j);
  for (; j + kNative <= end; j += kNative) head_tile<F, R, 1>(b, j);
  if (j < end) head_rest<F, R>(b, j, end - j);
}

// One row: W in the order of its addresses, the sums in y.
template <WeightFormat F>
[[gnu::noinline]] void head_row(const HeadBlock& b, int64_t begin, int64_t end) {
  const int64_t whole = begin + (end - begin) / kNative * kNative;
  for (int64_t j = begin; j < whole; j += kNative) nstore(b.y + j, Fn{});
  for (int32_t i = 0; i < b.inputs; ++i) {
    const char* w = b.w + i * b.ld_bytes;
    const Fn x = nsplat(b.x[i]);
    int64_t j = begin;
    for (; j + 4 * kNative <= whole; j += 4 * kNative) {
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) {
        float* y = b.y + j + n * kNative;
        nstore(y, nfma(columns_at<F>(w, j + n * kNative), x, nload(y)));
      }
    }
    for (; j < whole; j += kNative) nstore(b.y + j, nfma(columns_at<F>(w, j), x, nload(b.y + j)));
  }
  if (whole < end) head_rest<F, 1>(b, whole, end - whole);
}

// Columns [begin, end) of all rows.
template <WeightFormat F>
void head_columns(HeadBlock b, int32_t rows, int64_t begin, int64_t end) {
  if (rows == 1) return head_row<F>(b, begin, end);
  constexpr int kRows = kNative == 8 ? 2 : 4;  // what the registers hold beside four vectors of columns
  for (; rows >= kRows; rows -= kRows, b.x += kRows * b.ldx, b.y += kRows * b.ldy)
    head_rows<F, kRows>(b, begin, end);
  if (rows == 3) head_rows<F, 3>(b, begin, end);
  if (rows == 2) head_rows<F, 2>(b, begin, end);
  if (rows == 1) head_rows<F, 1>(b, begin, end);
}

}  // namespace

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
  if (p.rows <= 0 || p.heads <= 0) return;
  const int64_t outputs = p.transposed ? p.w.in : p.rows_per_head;
  // A head is cut only where there are too few of them for the threads.
  const int64_t unit = p.transposed ? 4 * kNative : 4 * kTile, most = (outputs + unit - 1) / unit;
  const int64_t cuts = min_i64(most, (4 * exec.pool->threads() + p.heads - 1) / p.heads);
  const double ns = static_cast<double>(p.rows_per_head * p.w.in) * weight_ns(p.w.format, p.rows) /
                    static_cast<double>(cuts);
  exec.pool->loop(p.heads * cuts, grain_of(ns), [&](int64_t first, int64_t last, int) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t h = item / cuts, cut = item % cuts;
      const int64_t begin = most * cut / cuts * unit, end = min_i64(most * (cut + 1) / cuts * unit, outputs);
      const int64_t row0 = h * p.stride_out + p.offset;
      const float* x = p.x + h * p.hx;
      float* y = p.y + h * p.hy;
      if (!p.transposed) {
        matmul(p.w, row0 + begin, row0 + end, p.rows, {x, p.ldx}, {y + begin, p.ldy});
        continue;
      }
      const int64_t bytes = p.w.in * (p.w.format == WeightFormat::kF32 ? 4 : 2);
      const HeadBlock block = {
          static_cast<const char*>(p.w.data) + row0 * bytes, bytes, p.rows_per_head, x, p.ldx, y, p.ldy};
      if (p.w.format == WeightFormat::kF32) {
        head_columns<WeightFormat::kF32>(block, p.rows, begin, end);
      } else {
        head_columns<WeightFormat::kBF16>(block, p.rows, begin, end);
      }
    }
  });
}

}  // namespace rocket::ROCKET_ISA
