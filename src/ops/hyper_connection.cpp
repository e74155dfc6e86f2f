#include "base/error.h"
#include "ops/cpu_ops.h"
#include "ops/parallel.h"

namespace rocket::ROCKET_ISA {
namespace {

constexpr int kMaxStreams = 8;
constexpr int kMaxOut = kMaxStreams * (kMaxStreams + 2);
constexpr int kPartials = kMaxOut + 1;  // the outputs of fn, then the sum of squares
constexpr int kGroup = 4;               // outputs of fn that one work item reads together
constexpr int kChunk = 16;              // rows whose partial sums are kept at a time
constexpr int kMaxBlocks = 16;          // blocks of the flattened axis, each summed on its own

// Rows and outputs that share registers. A pair's sum does not depend on it.
#if defined(__AVX512F__)
constexpr int kBlockRows = 4, kBlockOut = 4;
#elif defined(__AVX2__)
constexpr int kBlockRows = 1, kBlockOut = 4;
#else
constexpr int kBlockRows = 1, kBlockOut = 2;
#endif

// The length of a block depends on the shape alone.
ROCKET_INLINE int64_t block_length(int64_t flat) {
  const int64_t even = (flat + kMaxBlocks - 1) / kMaxBlocks;
  const int64_t length = even > 2048 ? even : 2048;
  return (length + kLanes - 1) / kLanes * kLanes;
}

template <bool kBf16>
ROCKET_INLINE F16v load_fn(const unsigned char* row, int64_t i) {
  if constexpr (kBf16) return load_bf16(reinterpret_cast<const uint16_t*>(row + 2 * i));
  return load(reinterpret_cast<const float*>(row + 4 * i));
}

template <bool kBf16>
ROCKET_INLINE F16v load_fn_part(const unsigned char* row, int64_t i, int n) {
  float lanes[kLanes] = {};
  for (int j = 0; j < n; ++j) {
    if constexpr (kBf16) {
      uint16_t bits;
      std::memcpy(&bits, row + 2 * (i + j), sizeof bits);
      lanes[j] = bf16_to_f32(bits);
    } else {
      std::memcpy(&lanes[j], row + 4 * (i + j), sizeof(float));
    }
  }
  return load(lanes);
}

// out[r][o] = sum over [begin, end) of x[r][i] * fn[o][i], for kRows x kOut pairs.
template <int kRows, int kOut, bool kBf16>
ROCKET_INLINE void products(const float* x, int64_t ldx, const unsigned char* fn, int64_t ldfn, int64_t begin,
                            int64_t end, float* out, int64_t ldout) {
  F16v s[kRows][kOut] = {};
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    F16v row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = load(x + r * ldx + i);
    for (int o = 0; o < kOut; ++o) {
      const F16v w = load_fn<kBf16>(fn + o * ldfn, i);
      for (int r = 0; r < kRows; ++r) s[r][o] += row[r] * w;
    }
  }
  if (i < end) {
    const int rest = static_cast<int>(end - i);
    for (int o = 0; o < kOut; ++o) {
      const F16v w = load_fn_part<kBf16>(fn + o * ldfn, i, rest);
      for (int r = 0; r < kRows; ++r) s[r][o] += load_part(x + r * ldx + i, rest) * w;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int o = 0; o < kOut; ++o) out[r * ldout + o] = sum(s[r][o]);
  }
}

// Partial sums of one block of the flattened axis for up to kBlockRows rows and up to kGroup outputs.
template <bool kBf16>
ROCKET_INLINE void group_products(const float* x, int64_t ldx, int rows, const unsigned char* fn,
                                  int64_t ldfn, int outputs, int64_t begin, int64_t end, float* out,
                                  int64_t ldout) {
  int o = 0;
  for (; o + kBlockOut <= outputs; o += kBlockOut) {
    if (rows == kBlockRows) {
      products<kBlockRows, kBlockOut, kBf16>(x, ldx, fn + o * ldfn, ldfn, begin, end, out + o, ldout);
    } else {
      for (int r = 0; r < rows; ++r) {
        products<1, kBlockOut, kBf16>(x + r * ldx, ldx, fn + o * ldfn, ldfn, begin, end, out + r * ldout + o,
                                      ldout);
      }
    }
  }
  for (; o < outputs; ++o) {
    for (int r = 0; r < rows; ++r) {
      products<1, 1, kBf16>(x + r * ldx, ldx, fn + o * ldfn, ldfn, begin, end, out + r * ldout + o, ldout);
    }
  }
}

// Every lane the sum, or the largest, of the four.
ROCKET_INLINE F4v sum_all(F4v v) {
  v += __builtin_shufflevector(v, v, 1, 0, 3, 2);
  return v + __builtin_shufflevector(v, v, 2, 3, 0, 1);
}

ROCKET_INLINE F4v max_all(F4v v) {
  F4v other = __builtin_shufflevector(v, v, 1, 0, 3, 2);
  v = v > other ? v : other;
  other = __builtin_shufflevector(v, v, 2, 3, 0, 1);
  return v > other ? v : other;
}

// Softmax over rows, then Sinkhorn, of a 4 x 4 matrix, in place: its rows are four registers.
ROCKET_INLINE void mix4(float* matrix, float eps, int iters) {
  F4v c[4];
  std::memcpy(c, matrix, sizeof c);
  for (F4v& row : c) row -= max_all(row);
  std::memcpy(matrix, c, sizeof c);
  store(matrix, exp(load(matrix)));
  std::memcpy(c, matrix, sizeof c);
  for (F4v& row : c) row = row / sum_all(row) + eps;
  for (int i = 0; i < iters || i == 0; ++i) {
    if (i > 0) {
      for (F4v& row : c) row = row / (sum_all(row) + eps);
    }
    const F4v columns = (c[0] + c[1]) + (c[2] + c[3]) + eps;
    for (F4v& row : c) row = row / columns;
  }
  std::memcpy(matrix, c, sizeof c);
}

ROCKET_INLINE void divide_rows(float* c, int n, float eps) {
  for (int i = 0; i < n; ++i) {
    float s = 0;
    for (int j = 0; j < n; ++j) s += c[i * n + j];
    for (int j = 0; j < n; ++j) c[i * n + j] /= s + eps;
  }
}

ROCKET_INLINE void divide_columns(float* c, int n, float eps) {
  for (int j = 0; j < n; ++j) {
    float s = 0;
    for (int i = 0; i < n; ++i) s += c[i * n + j];
    for (int i = 0; i < n; ++i) c[i * n + j] /= s + eps;
  }
}

// The same for any number of streams, in place.
ROCKET_INLINE void mix_any(float* c, int n, float eps, int iters) {
  for (int i = 0; i < n; ++i) {
    float* row = c + i * n;
    float top = row[0];
    for (int j = 1; j < n; ++j) top = row[j] > top ? row[j] : top;
    float e[kLanes];
    store(e, exp(load_part(row, n) - top));
    float total = 0;
    for (int j = 0; j < n; ++j) total += e[j];
    for (int j = 0; j < n; ++j) row[j] = e[j] / total + eps;
  }
  divide_columns(c, n, eps);
  for (int i = 1; i < iters; ++i) {
    divide_rows(c, n, eps);
    divide_columns(c, n, eps);
  }
}

// pre (returned in `pre`), post and comb of one row from the mix logits w.
ROCKET_INLINE void coefficients(const HyperPreParams& p, const float* w, float* pre, float* post,
                                float* comb) {
  const int n = p.streams;
  float z[kLanes] = {};
  for (int i = 0; i < n; ++i) {
    z[i] = p.scale[0] * w[i] + p.base[i];
    z[n + i] = p.scale[1] * w[n + i] + p.base[n + i];
  }
  store(z, sigmoid(load(z)));
  for (int i = 0; i < n && n <= kMaxStreams; ++i) {
    pre[i] = z[i] + p.hc_eps;
    post[i] = 2.0f * z[n + i];
  }
  w += 2 * n;
  const float* base = p.base + 2 * n;
  for (int i = 0; i < n * n; ++i) comb[i] = p.scale[2] * w[i] + base[i];
  if (n == 4) {
    mix4(comb, p.hc_eps, p.sinkhorn_iters);
  } else {
    mix_any(comb, n, p.hc_eps, p.sinkhorn_iters);
  }
}

// y[i] = sum over streams of factor[n] * x[n][i], streams ascending; returns the sum of y^2. kN = 0: any
// number.
template <int kN>
ROCKET_INLINE float collapse(const float* x, const float* factor, int streams, int64_t hidden, float* y) {
  const int n = kN ? kN : streams;
  F16v squares = {};
  int64_t i = 0;
  for (; i + kLanes <= hidden; i += kLanes) {
    F16v c = factor[0] * load(x + i);
    for (int m = 1; m < n; ++m) c += factor[m] * load(x + m * hidden + i);
    store(y + i, c);
    squares += c * c;
  }
  if (i < hidden) {
    const int rest = static_cast<int>(hidden - i);
    F16v c = factor[0] * load_part(x + i, rest);
    for (int m = 1; m < n; ++m) c += factor[m] * load_part(x + m * hidden + i, rest);
    store_part(y + i, c, rest);
    squares += c * c;
  }
  return sum(squares);
}

ROCKET_INLINE void collapse_norm(const float* x, const float* factor, int streams, int64_t hidden,
                                 const float* weight, float eps, float* y) {
  const float squares =
      streams == 4 ? collapse<4>(x, factor, streams, hidden, y) : collapse<0>(x, factor, streams, hidden, y);
  const float r = 1.0f / __builtin_sqrtf(squares / static_cast<float>(hidden) + eps);
  int64_t i = 0;
  for (; i + kLanes <= hidden; i += kLanes) store(y + i, load(y + i) * r * load(weight + i));
  for (; i < hidden; ++i) y[i] = y[i] * r * weight[i];
}

// One row from its partial sums [blocks][kPartials].
ROCKET_INLINE void finish_row(const HyperPreParams& p, int64_t row, const float* partial, int64_t blocks) {
  const int n = p.streams, outputs = n * (n + 2);
  const int64_t flat = static_cast<int64_t>(n) * p.hidden;
  float w[kMaxOut], squares = 0;
  for (int64_t b = 0; b < blocks; ++b) squares += partial[b * kPartials + outputs];
  const float r = 1.0f / __builtin_sqrtf(squares / static_cast<float>(flat) + p.rms_eps);
  for (int o = 0; o < outputs; ++o) {
    float s = 0;
    for (int64_t b = 0; b < blocks; ++b) s += partial[b * kPartials + o];
    w[o] = s * r;
  }
  if (p.mix) std::memcpy(p.mix + row * outputs, w, outputs * sizeof(float));
  float pre[kMaxStreams];
  coefficients(p, w, pre, p.post + row * n, p.comb + row * n * n);
  collapse_norm(p.x + row * flat, pre, n, p.hidden, p.norm_weight, p.rms_eps, p.y + row * p.hidden);
}

void pre_chunk(const HyperPreParams& p, Exec& exec, int64_t first, int64_t rows) {
  const int outputs = p.streams * (p.streams + 2);
  const int64_t flat = static_cast<int64_t>(p.streams) * p.hidden;
  const int64_t length = block_length(flat), blocks = (flat + length - 1) / length;
  const int64_t groups = (outputs + kGroup - 1) / kGroup;  // one more item a block sums the squares
  const int64_t row_blocks = (rows + kBlockRows - 1) / kBlockRows;
  const bool bf16 = p.fn.format == WeightFormat::kBF16;
  const auto* fn = static_cast<const unsigned char*>(p.fn.data);
  const int64_t ldfn = flat * (bf16 ? 2 : 4), ldout = blocks * kPartials;
  float partial[kChunk * kMaxBlocks * kPartials];

  parallel(exec, blocks * (groups + 1) * row_blocks, kGroup * length, [&](int64_t begin, int64_t end, int) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item % row_blocks * kBlockRows, group = item / row_blocks % (groups + 1);
      const int64_t block = item / row_blocks / (groups + 1);
      const int64_t from = block * length, to = from + length < flat ? from + length : flat;
      const int count = static_cast<int>(rows - row < kBlockRows ? rows - row : kBlockRows);
      const float* x = p.x + (first + row) * flat;
      float* out = partial + row * ldout + block * kPartials;
      if (group == groups) {
        for (int r = 0; r < count; ++r) {
          const float* segment = x + r * flat + from;
          out[r * ldout + outputs] = dot(segment, segment, to - from);
        }
        continue;
      }
      const int o = static_cast<int>(group) * kGroup, width = outputs - o < kGroup ? outputs - o : kGroup;
      if (bf16) {
        group_products<true>(x, flat, count, fn + o * ldfn, ldfn, width, from, to, out + o, ldout);
      } else {
        group_products<false>(x, flat, count, fn + o * ldfn, ldfn, width, from, to, out + o, ldout);
      }
    }
  });
  parallel(exec, rows, 2 * flat, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) finish_row(p, first + row, partial + row * ldout, blocks);
  });
}

// x'[n] = post[n] * block + sum_m comb[m][n] * x[m] on columns [begin, end) of one row. kN = 0: any number of
// streams.
template <int kN>
ROCKET_INLINE void expand(const float* x, float* y, const float* block, const float* post, const float* comb,
                          int streams, int64_t hidden, int64_t begin, int64_t end) {
  const int n = kN ? kN : streams;
  for (int64_t i = begin; i < end; i += kLanes) {
    const int width = static_cast<int>(end - i < kLanes ? end - i : kLanes);
    const bool whole = width == kLanes;
    F16v old[kN ? kN : kMaxStreams];
    for (int m = 0; m < n; ++m)
      old[m] = whole ? load(x + m * hidden + i) : load_part(x + m * hidden + i, width);
    const F16v b = whole ? load(block + i) : load_part(block + i, width);
    for (int j = 0; j < n; ++j) {
      F16v s = post[j] * b;
      for (int m = 0; m < n; ++m) s += comb[m * n + j] * old[m];
      whole ? store(y + j * hidden + i, s) : store_part(y + j * hidden + i, s, width);
    }
  }
}

void check_streams(const char* op, int32_t streams) {
  if (streams < 1 || streams > kMaxStreams) fail_op(op, "streams, at most", kMaxStreams, streams);
}

}  // namespace

void hyper_post(const HyperPostParams& p, Exec& exec) {
  if (p.rows == 0) return;
  check_streams("hyper_post", p.streams);
  constexpr int64_t kTile = 1024;
  const int64_t tiles = (p.hidden + kTile - 1) / kTile, n = p.streams;
  parallel(exec, p.rows * tiles, 2 * n * (p.hidden < kTile ? p.hidden : kTile),
           [&](int64_t begin, int64_t end, int) {
             for (int64_t item = begin; item < end; ++item) {
               const int64_t row = item / tiles, from = item % tiles * kTile;
               const int64_t to = from + kTile < p.hidden ? from + kTile : p.hidden;
               const float* x = p.x + row * n * p.hidden;
               float* y = p.y + row * n * p.hidden;
               const float* block = p.block + row * p.hidden;
               const float *post = p.post + row * n, *comb = p.comb + row * n * n;
               if (n == 4) {
                 expand<4>(x, y, block, post, comb, 4, p.hidden, from, to);
               } else {
                 expand<0>(x, y, block, post, comb, p.streams, p.hidden, from, to);
               }
             }
           });
}

void hyper_pre(const HyperPreParams& p, Exec& exec) {
  if (p.rows == 0) return;
  check_streams("hyper_pre", p.streams);
  if (p.fn.out != p.streams * (p.streams + 2))
    fail_op("hyper_pre", "fn rows", p.streams * (p.streams + 2), p.fn.out);
  if (p.fn.in != static_cast<int64_t>(p.streams) * p.hidden) {
    fail_op("hyper_pre", "fn columns", static_cast<int64_t>(p.streams) * p.hidden, p.fn.in);
  }
  if (p.fn.format != WeightFormat::kF32 && p.fn.format != WeightFormat::kBF16) {
    fail_op("hyper_pre", "fn format (kF32 or kBF16)", static_cast<int64_t>(WeightFormat::kF32),
            static_cast<int64_t>(p.fn.format));
  }
  HyperPreParams from = p;
  if (p.block) {
    hyper_post(post_before(p), exec);
    from.x = p.next;
  }
  for (int64_t first = 0; first < p.rows; first += kChunk) {
    pre_chunk(from, exec, first, p.rows - first < kChunk ? p.rows - first : kChunk);
  }
}

void hyper_head(const HyperHeadParams& p, Exec& exec) {
  if (p.rows == 0) return;
  check_streams("hyper_head", p.streams);
  float share[kMaxStreams];
  for (int i = 0; i < p.streams; ++i) share[i] = 1.0f / static_cast<float>(p.streams);
  const int64_t flat = static_cast<int64_t>(p.streams) * p.hidden;
  parallel(exec, p.rows, flat, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      collapse_norm(p.x + p.row_index[row] * flat, share, p.streams, p.hidden, p.norm_weight, p.rms_eps,
                    p.y + row * p.hidden);
    }
  });
}

}  // namespace rocket::ROCKET_ISA
