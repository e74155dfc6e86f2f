#include "base/error.h"
#include "ops/cpu_ops.h"
#include "ops/parallel.h"

namespace rocket::ROCKET_ISA {
namespace {

constexpr int kMaxDim = 512;
constexpr int64_t kTile = 2 * kLanes;  // pools that a work item scores together
constexpr int64_t kTilesAnItem = 4;

// --- pooling ---

// Softmax over the pool's tokens for channels [begin, end) of a full tail, weighted sum of keys into out.
ROCKET_INLINE void compress(const PoolUpdateParams& p, const float* tail, int64_t begin, int64_t end,
                            float* out) {
  const float* gates = tail + static_cast<int64_t>(p.pool) * p.dim;
  for (int64_t c = begin; c < end; c += kLanes) {
    const int width = static_cast<int>(end - c < kLanes ? end - c : kLanes);
    const auto at = [&](const float* base, int32_t t) {
      const float* from = base + static_cast<int64_t>(t) * p.dim + c;
      return width == kLanes ? load(from) : load_part(from, width);
    };
    const auto logit = [&](int32_t t) { return p.ape ? at(gates, t) + at(p.ape, t) : at(gates, t); };
    F16v top = logit(0);
    for (int32_t t = 1; t < p.pool; ++t) top = max(top, logit(t));
    F16v total = {}, s = {};
    for (int32_t t = 0; t < p.pool; ++t) {
      const F16v e = exp(logit(t) - top);
      total += e;
      s += e * at(tail, t);
    }
    s = s / total;
    width == kLanes ? store(out + c, s) : store_part(out + c, s, width);
  }
}

ROCKET_INLINE void pool_segment(const PoolUpdateParams& p, int32_t index, int64_t begin, int64_t end) {
  const Segment& segment = p.segment[index];
  const int64_t bytes = (end - begin) * sizeof(float), half = static_cast<int64_t>(p.pool) * p.dim;
  float* tail = p.tail[index];
  for (int32_t t = 0; t < segment.rows; ++t) {
    const int64_t row = segment.first_row + t, position = segment.position + t, slot = position % p.pool;
    const float* k = p.k + row * p.ldk;
    std::memcpy(tail + slot * p.dim + begin, k + begin, bytes);
    if (p.gate) std::memcpy(tail + half + slot * p.dim + begin, p.gate + row * p.ldgate + begin, bytes);
    if (slot == p.pool - 1) {
      float* out = p.pooled[index].row(position / p.pool);
      if (p.gate) {
        compress(p, tail, begin, end, out);
      } else {
        std::memcpy(out + begin, k + begin, bytes);
      }
    }
    float* checkpoint = p.checkpoint ? p.checkpoint[row] : nullptr;
    if (!checkpoint) continue;
    for (int64_t line = 0; line < 2 * p.pool; ++line) {
      std::memcpy(checkpoint + line * p.dim + begin, tail + line * p.dim + begin, bytes);
    }
  }
}

// --- selection ---

#if defined(__AVX512F__)
constexpr int kHeads = 8, kVectors = 2;  // heads and vectors of pools that share registers
#elif defined(__AVX2__)
constexpr int kHeads = 4, kVectors = 1;
#else
constexpr int kHeads = 2, kVectors = 1;
#endif

// Four rows of four floats become four columns. Lanes of V hold several such squares side by side.
#if defined(__AVX2__)
typedef F8v Square;
template <bool kHigh>
ROCKET_INLINE F8v zip(F8v a, F8v b) {
  constexpr int h = kHigh ? 2 : 0;
  return __builtin_shufflevector(a, b, h, 8 + h, h + 1, 9 + h, 4 + h, 12 + h, 5 + h, 13 + h);
}
template <bool kHigh>
ROCKET_INLINE F8v join(F8v a, F8v b) {
  constexpr int h = kHigh ? 2 : 0;
  return __builtin_shufflevector(a, b, h, h + 1, 8 + h, 9 + h, 4 + h, 5 + h, 12 + h, 13 + h);
}
#else
typedef F4v Square;
template <bool kHigh>
ROCKET_INLINE F4v zip(F4v a, F4v b) {
  constexpr int h = kHigh ? 2 : 0;
  return __builtin_shufflevector(a, b, h, 4 + h, h + 1, 5 + h);
}
template <bool kHigh>
ROCKET_INLINE F4v join(F4v a, F4v b) {
  constexpr int h = kHigh ? 2 : 0;
  return __builtin_shufflevector(a, b, h, h + 1, 4 + h, 5 + h);
}
#endif
constexpr int kSquare = sizeof(Square) / sizeof(float);

ROCKET_INLINE Square load_square(const float* p) {
  return Width<Square>::load(p);
}

// A column of each square, to tile lines d, d + 4, ….
ROCKET_INLINE void store_column(Square v, float* to) {
#if defined(__AVX2__)
  Width<F4v>::store(to, __builtin_shufflevector(v, v, 0, 1, 2, 3));
  Width<F4v>::store(to + 4 * kTile, __builtin_shufflevector(v, v, 4, 5, 6, 7));
#else
  Width<F4v>::store(to, v);
#endif
}

// to[d * kTile + i] = row[i][d] for kSquare columns d and the four rows i.
ROCKET_INLINE void transpose4(const float* const* row, int64_t d, float* to) {
  const Square a = load_square(row[0] + d), b = load_square(row[1] + d);
  const Square c = load_square(row[2] + d), e = load_square(row[3] + d);
  const Square low_ab = zip<false>(a, b), high_ab = zip<true>(a, b);
  const Square low_ce = zip<false>(c, e), high_ce = zip<true>(c, e);
  to += d * kTile;
  store_column(join<false>(low_ab, low_ce), to);
  store_column(join<true>(low_ab, low_ce), to + kTile);
  store_column(join<false>(high_ab, high_ce), to + 2 * kTile);
  store_column(join<true>(high_ab, high_ce), to + 3 * kTile);
}

// keys[d][pool] for pools first … of a tile, up to `pools` in all; the rest of the tile is zero. Asks for the
// next tile, so that memory works while this one is scored.
ROCKET_INLINE void transpose_keys(const PagedRows& pooled, int64_t first, int64_t pools, int dim,
                                  float* keys) {
  const int64_t count = pools - first;
  for (int64_t i = 0; i < kTile; i += 4) {
    const int64_t here = count - i < 4 ? count - i : 4;
    if (here < 4) {
      for (int d = 0; d < dim; ++d) std::memset(keys + d * kTile + i, 0, 4 * sizeof(float));
    }
    const float* row[4];
    for (int64_t j = 0; j < here; ++j) row[j] = pooled.row(first + i + j);
    for (int64_t j = first + kTile + i; j < first + kTile + i + 4 && j < pools; ++j) {
      for (int d = 0; d < dim; d += kLanes) __builtin_prefetch(pooled.row(j) + d, 0, 2);
    }
    int64_t d = 0;
    if (here == 4) {
      for (; d + kSquare <= dim; d += kSquare) transpose4(row, d, keys + i);
    }
    for (; d < dim; ++d) {
      for (int64_t j = 0; j < here; ++j) keys[d * kTile + i + j] = row[j][d];
    }
  }
}

// Adds kH heads, in order, to the scores of kVectors vectors of pools. Each dot product runs over d in order.
template <int kH>
ROCKET_INLINE void add_heads(const float* q, int dim, const float* keys, const float* weight,
                             float weight_scale, float scale, F16v* score) {
  F16v dots[kH][kVectors] = {};
  for (int d = 0; d < dim; ++d) {
    F16v key[kVectors];
    for (int v = 0; v < kVectors; ++v) key[v] = load(keys + d * kTile + v * kLanes);
    for (int h = 0; h < kH; ++h) {
      for (int v = 0; v < kVectors; ++v) dots[h][v] += q[h * dim + d] * key[v];
    }
  }
  for (int h = 0; h < kH; ++h) {
    const float w = weight[h] * weight_scale;
    for (int v = 0; v < kVectors; ++v) {
      const F16v x = dots[h][v] * scale;
      score[v] += w * less(x, splat(0.0f), splat(0.0f), x);  // a NaN passes
    }
  }
}

// The scores of one row for one tile of pools.
ROCKET_INLINE void score_tile(const IndexSelectParams& p, int64_t row, const float* keys, float* score) {
  const float *q = p.q + row * p.ldq, *weight = p.head_weight + row * p.ldw;
  for (int part = 0; part < kTile / kLanes; part += kVectors) {
    F16v s[kVectors] = {};
    const float* at = keys + part * kLanes;
    int h = 0;
    for (; h + kHeads <= p.heads; h += kHeads) {
      add_heads<kHeads>(q + h * p.dim, p.dim, at, weight + h, p.head_weight_scale, p.scale, s);
    }
    for (; h < p.heads; ++h)
      add_heads<1>(q + h * p.dim, p.dim, at, weight + h, p.head_weight_scale, p.scale, s);
    for (int v = 0; v < kVectors; ++v) store(score + (part + v) * kLanes, s[v]);
  }
}

// Consecutive rows of one segment whose scores are in flight together.
struct Block {
  int32_t index;   // segment
  int32_t offset;  // first row within the segment
  int32_t rows;
};

ROCKET_INLINE int64_t visible_pools(const IndexSelectParams& p, const Segment& segment, int64_t offset) {
  return (segment.position + offset + 1) / p.pool;
}

// Turns the `count` chosen pools at the front of a row's token list into their tokens, last pool first so
// that none is overwritten before it is read, and adds the row's own unfinished pool.
ROCKET_INLINE void list_tokens(const IndexSelectParams& p, const Segment& segment, int64_t offset,
                               int32_t count) {
  const int64_t row = segment.first_row + offset, position = segment.position + offset;
  int32_t* token = p.token + row * p.ldtoken;
  for (int64_t i = count - 1; i >= 0; --i) {
    const int32_t first = token[i] * p.pool;
    for (int32_t t = 0; t < p.pool; ++t) token[i * p.pool + t] = first + t;
  }
  int32_t n = count * p.pool;
  if (p.select_tail) {
    for (int64_t t = visible_pools(p, segment, offset) * p.pool; t <= position; ++t)
      token[n++] = static_cast<int32_t>(t);
  }
  p.count[row] = n;
}

// Rows that see no more pools than they may take, and need no scores.
ROCKET_INLINE void list_all(const IndexSelectParams& p, const Segment& segment, int64_t offset) {
  const auto pools = static_cast<int32_t>(visible_pools(p, segment, offset));
  int32_t* token = p.token + (segment.first_row + offset) * p.ldtoken;
  for (int32_t i = 0; i < pools; ++i) token[i] = i;
  list_tokens(p, segment, offset, pools);
}

void score_block(const IndexSelectParams& p, Exec& exec, const Block& block, float* score, int64_t ldscore) {
  const Segment& segment = p.segment[block.index];
  const int64_t pools = visible_pools(p, segment, block.offset + block.rows - 1);
  const int64_t tiles = (pools + kTile - 1) / kTile, items = (tiles + kTilesAnItem - 1) / kTilesAnItem;
  parallel(exec, items, kTilesAnItem * kTile * p.dim, [&](int64_t begin, int64_t end, int) {
    alignas(64) float keys[kTile * kMaxDim];
    for (int64_t tile = begin * kTilesAnItem; tile < tiles && tile < end * kTilesAnItem; ++tile) {
      const int64_t first = tile * kTile;
      transpose_keys(p.pooled[block.index], first, pools, p.dim, keys);
      for (int32_t r = 0; r < block.rows; ++r) {
        if (visible_pools(p, segment, block.offset + r) <= first) continue;
        score_tile(p, segment.first_row + block.offset + r, keys, score + r * ldscore + first);
      }
    }
  });
}

void select_block(const IndexSelectParams& p, Exec& exec, const Block& block, const float* score,
                  int64_t ldscore, uint64_t* keys) {
  const Segment& segment = p.segment[block.index];
  parallel(exec, block.rows, ldscore, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t pools = visible_pools(p, segment, block.offset + r);
      const float* row = score + r * ldscore;
      if (p.score) {
        std::memcpy(p.score + (segment.first_row + block.offset + r) * p.ldscore, row, pools * sizeof(float));
      }
      int32_t* token = p.token + (segment.first_row + block.offset + r) * p.ldtoken;
      const int32_t count =
          topk_lowest_index(row, static_cast<int32_t>(pools), p.topk, keys + r * ldscore, token);
      list_tokens(p, segment, block.offset + r, count);
    }
  });
}

}  // namespace

void pool_update(const PoolUpdateParams& p, Exec& exec) {
  if (p.rows == 0) return;
  if (!p.gate && p.pool != 1) fail_op("pool_update", "pool without gate", 1, p.pool);
  constexpr int64_t kChannels = 2 * kLanes;
  const int64_t tiles = (p.dim + kChannels - 1) / kChannels;
  parallel(exec, p.segments * tiles, 8 * kChannels * p.rows / p.segments,
           [&](int64_t begin, int64_t end, int) {
             for (int64_t item = begin; item < end; ++item) {
               const int64_t from = item % tiles * kChannels,
                             to = from + kChannels < p.dim ? from + kChannels : p.dim;
               pool_segment(p, static_cast<int32_t>(item / tiles), from, to);
             }
           });
}

void index_select(const IndexSelectParams& p, Exec& exec) {
  if (p.rows == 0) return;
  if (p.dim > kMaxDim) fail_op("index_select", "dim, at most", kMaxDim, p.dim);
  for (int32_t index = 0; index < p.segments; ++index) {
    const Segment& segment = p.segment[index];
    int32_t offset = 0;
    for (; !p.score && offset < segment.rows && visible_pools(p, segment, offset) <= p.topk; ++offset) {
      list_all(p, segment, offset);
    }
    if (offset == segment.rows) continue;
    const int64_t pools = visible_pools(p, segment, segment.rows - 1),
                  ldscore = (pools + kTile - 1) / kTile * kTile;
    const int64_t block_rows = index_select_block_rows(segment.rows - offset);
    ArenaScope scope(*exec.scratch);
    float* score = exec.scratch->take<float>(block_rows * ldscore);
    uint64_t* keys = exec.scratch->take<uint64_t>(block_rows * ldscore);
    for (; offset < segment.rows; offset += static_cast<int32_t>(block_rows)) {
      const int64_t left = segment.rows - offset;
      const Block block{index, offset, static_cast<int32_t>(left < block_rows ? left : block_rows)};
      score_block(p, exec, block, score, ldscore);
      select_block(p, exec, block, score, ldscore, keys);
    }
  }
}

}  // namespace rocket::ROCKET_ISA
