#include "base/error.h"
#include "ops/cpu_ops.h"
#include "ops/parallel.h"

namespace rocket::ROCKET_ISA {
namespace {

constexpr int kMaxTaps = 8;
constexpr int kMaxDim = 256;

// --- convolution ---

// Raw rows of one segment, seen from `t` rows after its first; negative t reaches into the stream's tail.
struct ConvRows {
  const float* x;  // first row of the segment
  int64_t ldx;
  const float* tail;  // [taps-1, C]
  int64_t channels;
  int32_t taps;

  [[gnu::always_inline]] const float* row(int64_t t) const {
    return t >= 0 ? x + t * ldx : tail + (t + taps - 1) * channels;
  }
};

// Copies what the tail is after `rows` rows of the segment, channels [begin, end). Oldest rows first, so that
// `to` may be the tail itself.
ROCKET_INLINE void advance_tail(const ConvRows& in, int64_t rows, int64_t begin, int64_t end, float* to) {
  for (int32_t j = 0; j < in.taps - 1; ++j) {
    const float* from = in.row(rows - (in.taps - 1) + j) + begin;
    std::memmove(to + j * in.channels + begin, from, (end - begin) * sizeof(float));
  }
}

template <int kTaps>
ROCKET_INLINE void conv_row(const ConvRows& in, int64_t t, const float* weight, int64_t begin, int64_t end,
                            float* y) {
  const int taps = kTaps ? kTaps : in.taps;
  const float* u[kTaps ? kTaps : kMaxTaps];
  for (int j = 0; j < taps; ++j) u[j] = in.row(t - (taps - 1) + j);
  int64_t c = begin;
  for (; c + kLanes <= end; c += kLanes) {
    F16v s = load(weight + c) * load(u[0] + c);
    for (int j = 1; j < taps; ++j) s += load(weight + j * in.channels + c) * load(u[j] + c);
    store(y + c, silu(s));
  }
  if (c < end) {
    const int rest = static_cast<int>(end - c);
    F16v s = load_part(weight + c, rest) * load_part(u[0] + c, rest);
    for (int j = 1; j < taps; ++j)
      s += load_part(weight + j * in.channels + c, rest) * load_part(u[j] + c, rest);
    store_part(y + c, silu(s), rest);
  }
}

ROCKET_INLINE void conv_segment(const KdaConvParams& p, int32_t index, int64_t begin, int64_t end) {
  const Segment& segment = p.segment[index];
  const ConvRows in{p.x + segment.first_row * p.ldx, p.ldx, p.tail[index], p.channels, p.taps};
  for (int32_t t = 0; t < segment.rows; ++t) {
    const int64_t row = segment.first_row + t;
    float* y = p.y + row * p.ldy;
    if (p.taps == 4) {
      conv_row<4>(in, t, p.weight, begin, end, y);
    } else {
      conv_row<0>(in, t, p.weight, begin, end, y);
    }
    float* checkpoint = p.checkpoint ? p.checkpoint[row] : nullptr;
    if (checkpoint) advance_tail(in, t + 1, begin, end, checkpoint);
  }
  advance_tail(in, segment.rows, begin, end, p.tail[index]);
}

// --- gates ---

// log(1 + exp(x)), and x itself above 20.
ROCKET_INLINE F16v softplus(F16v x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) {
    if (!(lanes[i] > 20.0f)) lanes[i] = __builtin_log1pf(__builtin_expf(lanes[i]));
  }
  return load(lanes);
}

ROCKET_INLINE F16v decay(F16v f, float a, bool bounded, float lower_bound) {
  return bounded ? lower_bound * sigmoid(a * f) : -a * softplus(f);
}

ROCKET_INLINE void gate_row(const KdaGatesParams& p, int64_t row, int64_t head, float a) {
  const int64_t at = (row * p.heads + head) * p.head_dim;
  const float *f = p.f + at, *bias = p.dt_bias + head * p.head_dim;
  float* g = p.g + at;
  int64_t i = 0;
  for (; i + kLanes <= p.head_dim; i += kLanes) {
    store(g + i, decay(load(f + i) + load(bias + i), a, p.bounded, p.lower_bound));
  }
  if (i < p.head_dim) {
    const int rest = static_cast<int>(p.head_dim - i);
    store_part(g + i, decay(load_part(f + i, rest) + load_part(bias + i, rest), a, p.bounded, p.lower_bound),
               rest);
  }
}

// --- recurrence ---

// A head's state is worked on in tiles of columns, copied to a compact buffer: with its own stride it would
// fall on few sets of the first-level cache.
#if defined(__AVX512F__)
constexpr int kTileVectors = 2;
#else
constexpr int kTileVectors = 1;
#endif
constexpr int kTile = kTileVectors * kLanes;
constexpr int64_t kAhead = 2;         // tiles between asking for one and reading it
constexpr int64_t kShortSegment = 4;  // rows that are prepared where they are used

// One row of one head, ready for the recurrence.
struct Prepared {
  const float *q, *k, *decay;  // [D] each: l2norm(q) * D^-1/2, l2norm(k), exp(g)
  float qk;                    // dot(q, k)
};

ROCKET_INLINE void l2norm(const float* x, int64_t n, float scale, float* y) {
  const float length = __builtin_sqrtf(dot(x, x, n) + 1e-6f);
  map(x, y, n, [=](F16v v) { return v / length * scale; });
}

// Fills q, k, decay (D floats each) and returns dot(q, k).
ROCKET_INLINE float prepare(const KdaRecurrenceParams& p, int64_t row, int64_t head, float* q, float* k,
                            float* decay) {
  const int64_t n = p.head_dim, at = row * p.ldqkv + head * n;
  l2norm(p.q + at, n, 1.0f / __builtin_sqrtf(static_cast<float>(n)), q);
  l2norm(p.k + at, n, 1.0f, k);
  map(p.g + (row * p.heads + head) * n, decay, n, [](F16v v) { return exp(v); });
  return dot(q, k, n);
}

template <bool kWhole>
ROCKET_INLINE F16v load_columns(const float* p, int width) {
  if constexpr (kWhole) return load(p);
  return load_part(p, width);
}

template <bool kWhole>
ROCKET_INLINE void store_columns(float* p, F16v v, int width) {
  if constexpr (kWhole) return store(p, v);
  store_part(p, v, width);
}

// kV vectors of columns of one head's state. A row's write k d^T is left pending until the next row (or the
// end) reads the tile anyway, so each row passes over the tile once. The reading uses S = S' + k d^T, hence
// S^T q = S'^T q + (k q) d.
template <int kV, bool kWhole>
struct Tile {
  float s[kMaxDim * kV * kLanes];
  F16v d[kV];
  int dim, width;  // width: columns of the last vector if it is not whole

  // The state with the pending write, to where a whole state has this tile.
  [[gnu::always_inline]] void write(const float* k, float* state) const {
    for (int i = 0; i < dim; ++i) {
      for (int v = 0; v < kV; ++v) {
        F16v x = load(s + (i * kV + v) * kLanes);
        x += k[i] * d[v];
        store_columns<kWhole>(state + static_cast<int64_t>(i) * dim + v * kLanes, x, width);
      }
    }
  }

  // One row; `before` is the key of the pending write. The first row reads the tile from `state` instead, and
  // asks for the tile at `next`: a tile's pieces lie too far apart for the hardware to see them coming.
  template <bool kFirst>
  [[gnu::always_inline]] void row(const Prepared& r, const float* before, const float* state,
                                  const float* next, const float* value, float beta, float* out) {
    F16v sk[kV] = {}, sq[kV] = {};
    for (int i = 0; i < dim; ++i) {
      for (int v = 0; v < kV; ++v) {
        float* at = s + (i * kV + v) * kLanes;
        F16v x;
        if constexpr (kFirst) {
          const int64_t from = static_cast<int64_t>(i) * dim + v * kLanes;
          x = load_columns<kWhole>(state + from, width);
          __builtin_prefetch(next + from, 1, 2);
        } else {
          x = load(at);
          x += before[i] * d[v];
        }
        x = x * r.decay[i];
        store(at, x);
        sk[v] += r.k[i] * x;
        sq[v] += r.q[i] * x;
      }
    }
    for (int v = 0; v < kV; ++v) {
      d[v] = beta * (load_columns<kWhole>(value + v * kLanes, width) - sk[v]);
      F16v o = sq[v];
      o += r.qk * d[v];
      store_columns<kWhole>(out + v * kLanes, o, width);
    }
  }
};

// One head over one segment.
struct SegmentHead {
  const KdaRecurrenceParams* p;
  int32_t index, head;         // of the segment, of the head
  const float *q, *k, *decay;  // prepared rows of this head, `stride` floats apart
  const float* qk;             // `qk_stride` apart
  int64_t stride, qk_stride;
  const float* next;  // the tile that is read some tiles later
};

template <int kV, bool kWhole>
ROCKET_INLINE void run_tile(const SegmentHead& h, int64_t column, int width) {
  const KdaRecurrenceParams& p = *h.p;
  const Segment& segment = p.segment[h.index];
  const int64_t n = p.head_dim, base = h.head * n * n + column;
  Tile<kV, kWhole> tile;
  tile.dim = static_cast<int>(n);
  tile.width = width;
  float* state = p.state[h.index] + base;
  const float* before = nullptr;
  for (int32_t t = 0; t < segment.rows; ++t) {
    const int64_t row = segment.first_row + t;
    const Prepared ready{h.q + t * h.stride, h.k + t * h.stride, h.decay + t * h.stride,
                         h.qk[t * h.qk_stride]};
    const float* value = p.v + row * p.ldqkv + h.head * n + column;
    float* out = p.o + (row * p.heads + h.head) * n + column;
    const float beta = p.beta[row * p.heads + h.head];
    if (t == 0) {
      tile.template row<true>(ready, before, state, h.next, value, beta, out);
    } else {
      tile.template row<false>(ready, before, state, h.next, value, beta, out);
    }
    before = ready.k;
    float* checkpoint = p.checkpoint ? p.checkpoint[row] : nullptr;
    if (checkpoint) tile.write(before, checkpoint + base);
  }
  tile.write(before, state);
}

ROCKET_INLINE void run_columns(const SegmentHead& h, int64_t column) {
  const int64_t left = h.p->head_dim - column;
  if (left >= kTile) {
    run_tile<kTileVectors, true>(h, column, kLanes);
  } else if (left >= kLanes) {
    run_tile<1, true>(h, column, kLanes);
    if (left > kLanes) run_tile<1, false>(h, column + kLanes, static_cast<int>(left - kLanes));
  } else {
    run_tile<1, false>(h, column, static_cast<int>(left));
  }
}

// Rows that are prepared by the thread that uses them.
struct Local {
  float q[kShortSegment * kMaxDim], k[kShortSegment * kMaxDim], decay[kShortSegment * kMaxDim],
      qk[kShortSegment];
};

ROCKET_INLINE void prepare_local(const KdaRecurrenceParams& p, const Segment& segment, int32_t head,
                                 Local& to) {
  for (int32_t t = 0; t < segment.rows; ++t) {
    const int64_t at = static_cast<int64_t>(t) * p.head_dim;
    to.qk[t] = prepare(p, segment.first_row + t, head, to.q + at, to.k + at, to.decay + at);
  }
}

struct Scratch {
  float *q, *k, *decay, *qk;
};

void prepare_all(const KdaRecurrenceParams& p, Exec& exec, const Scratch& to) {
  parallel(exec, static_cast<int64_t>(p.rows) * p.heads, 6 * p.head_dim,
           [&](int64_t begin, int64_t end, int) {
             for (int64_t item = begin; item < end; ++item) {
               const int64_t at = item * p.head_dim;
               to.qk[item] = prepare(p, item / p.heads, item % p.heads, to.q + at, to.k + at, to.decay + at);
             }
           });
}

}  // namespace

void kda_conv(const KdaConvParams& p, Exec& exec) {
  if (p.taps < 2 || p.taps > kMaxTaps) fail_op("kda_conv", "taps, 2 to", kMaxTaps, p.taps);
  constexpr int64_t kChannels = 256;
  if (p.rows == 0) return;
  const int64_t tiles = (p.channels + kChannels - 1) / kChannels;
  parallel(exec, p.segments * tiles, 3 * p.taps * kChannels * p.rows / p.segments,
           [&](int64_t begin, int64_t end, int) {
             for (int64_t item = begin; item < end; ++item) {
               const int64_t from = item % tiles * kChannels,
                             to = from + kChannels < p.channels ? from + kChannels : p.channels;
               conv_segment(p, static_cast<int32_t>(item / tiles), from, to);
             }
           });
}

void kda_gates(const KdaGatesParams& p, Exec& exec) {
  if (p.rows == 0) return;
  constexpr int64_t kRows = 16;
  const int64_t blocks = (p.rows + kRows - 1) / kRows,
                columns = p.heads + 1;  // the last column is beta of the block
  parallel(exec, blocks * columns, 8 * p.head_dim * (p.rows < kRows ? p.rows : kRows),
           [&](int64_t begin, int64_t end, int) {
             for (int64_t item = begin; item < end; ++item) {
               const int64_t head = item % columns, first = item / columns * kRows;
               const int64_t last = first + kRows < p.rows ? first + kRows : p.rows;
               if (head == p.heads) {
                 map(p.b + first * p.heads, p.beta + first * p.heads, (last - first) * p.heads,
                     [](F16v v) { return sigmoid(v); });
                 continue;
               }
               const float a = __builtin_expf(p.a_log[head]);
               for (int64_t row = first; row < last; ++row) gate_row(p, row, head, a);
             }
           });
}

void kda_recurrence(const KdaRecurrenceParams& p, Exec& exec) {
  if (p.rows == 0) return;
  if (p.head_dim % 8 != 0 || p.head_dim < 8 || p.head_dim > kMaxDim) {
    fail_op("kda_recurrence", "head_dim, a multiple of 8 up to", kMaxDim, p.head_dim);
  }
  ArenaScope scope(*exec.scratch);
  int32_t longest = 0;
  for (int32_t s = 0; s < p.segments; ++s)
    longest = p.segment[s].rows > longest ? p.segment[s].rows : longest;
  const bool local = longest <= kShortSegment;
  const int64_t pairs = static_cast<int64_t>(p.rows) * p.heads, n = p.head_dim;
  Scratch all{};
  if (!local) {
    all = {exec.scratch->take<float>(pairs * n), exec.scratch->take<float>(pairs * n),
           exec.scratch->take<float>(pairs * n), exec.scratch->take<float>(pairs)};
    prepare_all(p, exec, all);
  }
  const int64_t tiles = (n + kTile - 1) / kTile;
  const int64_t items = static_cast<int64_t>(p.segments) * p.heads * tiles;
  // Whole heads a thread where there are enough of them: a head's rows of state lie in common pages.
  const int64_t least = p.segments * p.heads >= exec.pool->threads() ? tiles : 1;
  const int64_t worth = grain(items, 2 * kTile * n * p.rows / p.segments);
  exec.pool->loop(items, worth > least ? worth : least, [&](int64_t begin, int64_t end, int) {
    Local mine;
    int64_t prepared = -1;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t pair = item / tiles;
      const auto index = static_cast<int32_t>(pair / p.heads), head = static_cast<int32_t>(pair % p.heads);
      const Segment& segment = p.segment[index];
      const int64_t at = static_cast<int64_t>(segment.first_row) * p.heads + head;
      const int64_t after = item + kAhead < items ? item + kAhead : item;
      const float* next =
          p.state[after / tiles / p.heads] + after / tiles % p.heads * n * n + after % tiles * kTile;
      SegmentHead h{
          &p,          index,   head, all.q + at * n, all.k + at * n, all.decay + at * n, all.qk + at,
          p.heads * n, p.heads, next};
      if (local) {
        if (prepared != pair) prepare_local(p, segment, head, mine);
        prepared = pair;
        h = {&p, index, head, mine.q, mine.k, mine.decay, mine.qk, n, 1, next};
      }
      run_columns(h, item % tiles * kTile);
    }
  });
}

void gated_norm(const GatedNormParams& p, Exec& exec) {
  const int64_t n = p.head_dim;
  parallel(exec, static_cast<int64_t>(p.rows) * p.heads, 4 * n, [&](int64_t begin, int64_t end, int) {
    for (int64_t item = begin; item < end; ++item) {
      const float *o = p.o + item * n, *gate = p.gate + item * n;
      float* y = p.y + item * n;
      const float r = 1.0f / __builtin_sqrtf(dot(o, o, n) / static_cast<float>(n) + p.eps);
      int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes)
        store(y + i, load(o + i) * r * load(p.weight + i) * sigmoid(load(gate + i)));
      if (i < n) {
        const int rest = static_cast<int>(n - i);
        const F16v v =
            load_part(o + i, rest) * r * load_part(p.weight + i, rest) * sigmoid(load_part(gate + i, rest));
        store_part(y + i, v, rest);
      }
    }
  });
}

void kda_head(const KdaHeadParams& p, Exec& exec) {
  linear(p.f_b, exec);
  linear(p.g_b, exec);
  kda_conv(p.conv, exec);
  kda_gates(p.gates, exec);
  kda_recurrence(p.recurrence, exec);
  gated_norm(p.norm, exec);
}

}  // namespace rocket::ROCKET_ISA
