#include "ops/cpu_ops.h"
#include "ops/parallel.h"

namespace rocket::ROCKET_ISA {
namespace {

constexpr int64_t kTokens =
    32;  // tokens whose latents stay in the second-level cache while all heads use them

// Heads and tokens (logits), heads and vectors (values) that share registers. No sum depends on it.
#if defined(__AVX512F__)
constexpr int kHeads = 4, kTogether = 4;
#elif defined(__AVX2__)
constexpr int kHeads = 2, kTogether = 2;
#else
constexpr int kHeads = 1, kTogether = 2;
#endif

// The row of the step and the heads that one work item computes.
struct Item {
  const float* q;  // first head
  float* o;        // first head
  const int32_t* token;
  int64_t count;
  PagedRows cache;
  int heads;
};

// logit[h][t] for kH heads and kT tokens: `scale * dot`, whole vectors first, then the rest of the width.
template <int kH, int kT>
ROCKET_INLINE void logits(const float* q, const float* const* latent, int64_t width, float scale, float* out,
                          int64_t ldout) {
  F16v s[kH][kT] = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    F16v x[kT];
    for (int t = 0; t < kT; ++t) x[t] = load(latent[t] + i);
    for (int h = 0; h < kH; ++h) {
      const F16v y = load(q + h * width + i);
      for (int t = 0; t < kT; ++t) s[h][t] += y * x[t];
    }
  }
  if (i < width) {
    const int rest = static_cast<int>(width - i);
    for (int h = 0; h < kH; ++h) {
      const F16v y = load_part(q + h * width + i, rest);
      for (int t = 0; t < kT; ++t) s[h][t] += y * load_part(latent[t] + i, rest);
    }
  }
  for (int h = 0; h < kH; ++h) {
    if constexpr (kT == 4) {
      const F4v sums = scale * sum4(s[h][0], s[h][1], s[h][2], s[h][3]);
      std::memcpy(out + h * ldout, &sums, sizeof sums);
    } else {
      for (int t = 0; t < kT; ++t) out[h * ldout + t] = scale * sum(s[h][t]);
    }
  }
}

template <int kH>
ROCKET_INLINE void head_logits(const float* q, const float* const* latent, int64_t tokens, int64_t width,
                               float scale, float* out, int64_t ldout) {
  int64_t t = 0;
  for (; t + kTogether <= tokens; t += kTogether)
    logits<kH, kTogether>(q, latent + t, width, scale, out + t, ldout);
  for (; t < tokens; ++t) logits<kH, 1>(q, latent + t, width, scale, out + t, ldout);
}

// o[h][c] += sum over tokens, in order, of p[h][t] * latent[t][c], for kV vectors of columns.
template <int kH, int kV>
ROCKET_INLINE void values(const float* p, int64_t ldp, const float* const* latent, int64_t tokens, float* o,
                          int64_t ldo, int64_t column) {
  F16v s[kH][kV];
  for (int h = 0; h < kH; ++h) {
    for (int v = 0; v < kV; ++v) s[h][v] = load(o + h * ldo + column + v * kLanes);
  }
  for (int64_t t = 0; t < tokens; ++t) {
    F16v x[kV];
    for (int v = 0; v < kV; ++v) x[v] = load(latent[t] + column + v * kLanes);
    for (int h = 0; h < kH; ++h) {
      for (int v = 0; v < kV; ++v) s[h][v] += p[h * ldp + t] * x[v];
    }
  }
  for (int h = 0; h < kH; ++h) {
    for (int v = 0; v < kV; ++v) store(o + h * ldo + column + v * kLanes, s[h][v]);
  }
}

template <int kH>
ROCKET_INLINE void head_values(const float* p, int64_t ldp, const float* const* latent, int64_t tokens,
                               float* o, int64_t dim) {
  int64_t c = 0;
  for (; c + kTogether * kLanes <= dim; c += kTogether * kLanes)
    values<kH, kTogether>(p, ldp, latent, tokens, o, dim, c);
  for (; c + kLanes <= dim; c += kLanes) values<kH, 1>(p, ldp, latent, tokens, o, dim, c);
  if (c == dim) return;
  const int rest = static_cast<int>(dim - c);
  for (int h = 0; h < kH; ++h) {
    F16v s = load_part(o + h * dim + c, rest);
    for (int64_t t = 0; t < tokens; ++t) s += p[h * ldp + t] * load_part(latent[t] + c, rest);
    store_part(o + h * dim + c, s, rest);
  }
}

// x[i] = exp(x[i] - max); returns the sum.
ROCKET_INLINE float exponentials(float* x, int64_t n) {
  F16v tops = splat(-INFINITY), total = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) tops = max(load(x + i), tops);
  float top = max_lane(tops);
  for (int64_t j = i; j < n; ++j) top = x[j] > top ? x[j] : top;
  for (i = 0; i + kLanes <= n; i += kLanes) {
    const F16v e = exp(load(x + i) - top);
    store(x + i, e);
    total += e;
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    float lanes[kLanes];
    store(lanes, exp(load_part(x + i, rest) - top));
    for (int j = 0; j < kLanes; ++j) lanes[j] = j < rest ? lanes[j] : 0.0f;
    store_part(x + i, load(lanes), rest);
    total += load(lanes);
  }
  return sum(total);
}

// Reads the latents twice, block by block: for the logits of all heads, then for their values.
ROCKET_INLINE void attend(const SparseMlaParams& p, const Item& item, float* logit) {
  const int64_t ld = (item.count + kLanes - 1) / kLanes * kLanes, dim = p.value_dim;
  const float* latent[kTokens];
  const auto each_block = [&](auto&& f) {
    for (int64_t t = 0; t < item.count; t += kTokens) {
      const int64_t tokens = item.count - t < kTokens ? item.count - t : kTokens;
      for (int64_t i = 0; i < tokens; ++i) latent[i] = item.cache.row(item.token[t + i]);
      f(t, tokens);
    }
  };
  each_block([&](int64_t t, int64_t tokens) {
    int h = 0;
    for (; h + kHeads <= item.heads; h += kHeads) {
      head_logits<kHeads>(item.q + h * p.width, latent, tokens, p.width, p.scale, logit + h * ld + t, ld);
    }
    for (; h < item.heads; ++h) {
      head_logits<1>(item.q + h * p.width, latent, tokens, p.width, p.scale, logit + h * ld + t, ld);
    }
  });
  std::memset(item.o, 0, item.heads * dim * sizeof(float));
  float total[1];
  for (int h = 0; h < item.heads; ++h) {
    total[0] = exponentials(logit + h * ld, item.count);
    const float share = 1.0f / total[0];
    map(logit + h * ld, logit + h * ld, item.count, [=](F16v v) { return v * share; });
  }
  each_block([&](int64_t t, int64_t tokens) {
    int h = 0;
    for (; h + kHeads <= item.heads; h += kHeads) {
      head_values<kHeads>(logit + h * ld + t, ld, latent, tokens, item.o + h * dim, dim);
    }
    for (; h < item.heads; ++h) head_values<1>(logit + h * ld + t, ld, latent, tokens, item.o + h * dim, dim);
  });
}

ROCKET_INLINE int32_t segment_of(const Segment* segment, int32_t segments, int64_t row) {
  int32_t low = 0, high = segments - 1;
  while (low < high) {
    const int32_t middle = (low + high + 1) / 2;
    if (segment[middle].first_row <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace

void latent_append(const LatentAppendParams& p, Exec& exec) {
  for (int32_t s = 0; s < p.segments; ++s) {
    const Segment& segment = p.segment[s];
    const PagedRows cache = p.cache[s];
    parallel(exec, segment.rows, 2 * cache.width, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t) {
        std::memcpy(cache.row(segment.position + t), p.latent + (segment.first_row + t) * p.ld,
                    cache.width * sizeof(float));
      }
    });
  }
}

void sparse_mla(const SparseMlaParams& p, Exec& exec) {
  if (p.rows == 0) return;
  int64_t longest = 0;
  for (int32_t r = 0; r < p.rows; ++r) longest = p.count[r] > longest ? p.count[r] : longest;
  // Heads of an item: all of them where rows alone keep the threads busy, else so few that heads do, in whole
  // blocks.
  const int64_t threads = exec.pool->threads(), wanted = (2 * threads + p.rows - 1) / p.rows;
  int64_t share = (p.heads + wanted - 1) / wanted;
  share = (share + kHeads - 1) / kHeads * kHeads;
  const int64_t parts = (p.heads + share - 1) / share;
  const int64_t ld = p.heads * ((longest + kLanes - 1) / kLanes * kLanes) + kLanes;
  ArenaScope scope(*exec.scratch);
  float* logit = exec.scratch->take<float>(threads * ld);
  parallel(exec, p.rows * parts, share * longest * p.width / 2, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / parts, head = item % parts * share;
      const int64_t heads = head + share < p.heads ? share : p.heads - head;
      const int32_t segment = segment_of(p.segment, p.segments, row);
      attend(p,
             Item{p.q + row * p.ldq + head * p.width, p.o + row * p.ldo + head * p.value_dim,
                  p.token + row * p.ldtoken, p.count[row], p.cache[segment], static_cast<int>(heads)},
             logit + thread * ld);
    }
  });
}

}  // namespace rocket::ROCKET_ISA
