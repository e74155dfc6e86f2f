// The draw of a token by one block, from probabilities and a coarse histogram of them.
//
// Nothing is sorted. Every filter keeps a leading piece of the order by descending probability, and the draw is the
// first token at which the sum along that order passes a value. Both are found by radix descent over histograms of
// counts and masses. Masses are integers, so that atomics in any order give the same sums.
#pragma once

#include "ops/sample.h"
#include "ops/topk.cuh"

namespace rocket::cuda::draw {

using Word = unsigned long long;

constexpr int kThreads = kSelectThreads, kBins = kSelectBins;
constexpr int kChunk = 4 * kThreads;      // logits of a block
constexpr int kListed = 3072;             // candidates that fit in shared memory
constexpr int kMaxVocab = (1 << 20) - 1;  // so many masses of at most 2^44 each fit in 64 bits

// How many tokens come first in an order, and what they weigh: in units of 2^-44, and of 2^-88 for the rest. A
// probability loses less than one small unit.
struct Order {
  Word high = 0, low = 0;
  uint32_t count = 0;
  __device__ double mass() const {
    return static_cast<double>(high) * 0x1p-44 + static_cast<double>(low) * 0x1p-88;
  }
};
__device__ __forceinline__ Order operator+(const Order& a, const Order& b) {
  return {a.high + b.high, a.low + b.low, a.count + b.count};
}
__device__ __forceinline__ Order operator-(const Order& a, const Order& b) {
  return {a.high - b.high, a.low - b.low, a.count - b.count};
}
__device__ __forceinline__ Order operator*(const Order& a, uint32_t n) {
  return {a.high * n, a.low * n, a.count * n};
}
__device__ __forceinline__ Order shuffle_up(const Order& x, int step) {
  return {__shfl_up_sync(0xffffffffu, x.high, step), __shfl_up_sync(0xffffffffu, x.low, step),
          __shfl_up_sync(0xffffffffu, x.count, step)};
}
__device__ __forceinline__ Order one(double p) {
  const double scaled = p * 0x1p44;
  const Word high = static_cast<Word>(scaled);
  return {high, static_cast<Word>((scaled - static_cast<double>(high)) * 0x1p44), 1};
}

// Coarse bins by the leading bits of p: 32 in each power of two, from 1 in the last bin down; the first has the rest.
constexpr int kBinShift = 47;
constexpr int64_t kFirstBin = (int64_t{0x3ff} << 5) - (kBins - 1);
constexpr Word kOne = 0x3ff0000000000000u;  // the bits of 1.0

__device__ __forceinline__ Word bits_of(double p) {
  return static_cast<Word>(__double_as_longlong(p));
}
__device__ __forceinline__ int bin_of(double p) {
  const int64_t bin = (__double_as_longlong(p) >> kBinShift) - kFirstBin;
  return static_cast<int>(min(max(bin, int64_t{0}), int64_t{kBins - 1}));
}
__device__ __forceinline__ Word lower_edge(int bin) {
  return bin > 0 ? static_cast<Word>(bin + kFirstBin) << kBinShift : 0;
}

struct Crossing {
  bool found;
  int bin;
  uint32_t inside;  // tokens in the bin
  Order above;      // of the bins above it
};

struct Shared {
  Word high[kBins], low[kBins];
  double p[kListed];
  uint32_t count[kBins];
  uint32_t rank[kListed];
  int32_t id[kListed];
  Order scan[kThreads / kWarp];
  Crossing crossing;
  Order total;
  Word word[kThreads / kWarp];
  uint32_t listed;
  bool last;
};
static_assert(sizeof(Shared) <= kSharedLimit);

// A NaN counts as -infinity.
__device__ __forceinline__ uint32_t rank_key(float logit) {
  return float_key(logit != logit ? -INFINITY : logit);
}
__device__ __forceinline__ float from_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// What a leading piece of an order has to reach.
struct Goal {
  enum Kind { kCount, kAbove, kAtLeast } kind;
  uint32_t count;  // kCount: more tokens than this
  double mass;     // kAbove: more mass, kAtLeast: no less
  __device__ bool reached(const Order& o) const {
    return kind == kCount ? o.count > count : kind == kAbove ? o.mass() > mass : o.mass() >= mass;
  }
};

__device__ __forceinline__ void clear_bins(Shared& s) {
  for (int b = threadIdx.x; b < kBins; b += kThreads) {
    s.high[b] = s.low[b] = 0;
    s.count[b] = 0;
  }
  __syncthreads();
}
__device__ __forceinline__ void add(Shared& s, int bin, double p, bool masses) {
  atomicAdd(&s.count[bin], 1u);
  if (!masses) return;
  const Order o = one(p);
  if (o.high) atomicAdd(&s.high[bin], o.high);
  if (o.low) atomicAdd(&s.low[bin], o.low);
}

// The bin, from the last one down, in which the goal is reached. Sets s.total as well.
__device__ __noinline__ Crossing find_bin(Shared& s, const Order& above, const Goal& goal) {
  const int bin = kBins - 1 - 2 * threadIdx.x;
  const Order first{s.high[bin], s.low[bin], s.count[bin]};
  const Order second{s.high[bin - 1], s.low[bin - 1], s.count[bin - 1]};
  const Order upto = above + block_scan<kThreads>(first + second, s.scan);
  const Order middle = upto - second, before = middle - first;
  if (threadIdx.x == kThreads - 1) {
    s.total = upto;
    if (!goal.reached(upto)) s.crossing.found = false;
  }
  if (!goal.reached(before) && goal.reached(upto)) {
    const bool in_first = goal.reached(middle);
    s.crossing = {true, in_first ? bin : bin - 1, in_first ? first.count : second.count,
                  in_first ? before : middle};
  }
  __syncthreads();
  const Crossing found = s.crossing;
  __syncthreads();
  return found;
}

struct Token {
  double p;
  int32_t id;
  int at;  // in the list
};

// The tokens of a row that a selection looks at: those listed in shared memory, or all.
struct Tokens {
  const float* logit;
  const double* p;
  int n;
  bool listed;

  template <typename F>
  __device__ __forceinline__ void each(const Shared& s, const F& f) const {
    if (listed) {
      for (int i = threadIdx.x; i < n; i += kThreads) f(Token{s.p[i], s.id[i], i});
      return;
    }
    for (int first = threadIdx.x; first < n; first += 4 * kThreads) {
      double v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = first + j * kThreads;
        v[j] = i < n ? __ldcg(p + i) : 0;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = first + j * kThreads;
        if (i < n) f(Token{v[j], i, i});
      }
    }
  }
  __device__ __forceinline__ uint32_t rank(const Shared& s, const Token& t) const {
    return listed ? s.rank[t.at] : rank_key(logit[t.id]);
  }
};

// The tokens that top_k leaves: those above a logit, and of the ones that equal it the lowest ids.
struct Members {
  bool all = true;
  uint32_t rank = 0;
  int32_t last_id = 0;
  __device__ __forceinline__ bool has(const Shared& s, const Tokens& tokens, const Token& t) const {
    if (all) return true;
    const uint32_t here = tokens.rank(s, t);
    return here > rank || (here == rank && t.id <= last_id);
  }
};

// Tokens with the same key, at which the goal is reached in the order of descending keys.
struct Found {
  bool any;
  Word key;
  Order above;
  uint32_t ties;
};

// key(token, k) gives a token's key in [low, high], or false for one that takes no part.
template <typename Key>
__device__ __forceinline__ Found select(Shared& s, const Tokens& tokens, const Key& key, Word low, Word high,
                                        const Goal& goal) {
  Order above;
  for (;;) {
    const Word width = high - low;
    const int shift = width < kBins ? 0 : 64 - __clzll(static_cast<int64_t>(width)) - 11;
    clear_bins(s);
    tokens.each(s, [&](const Token& t) {
      Word k;
      if (key(t, k) && k >= low && k <= high) {
        add(s, static_cast<int>((k - low) >> shift), t.p, goal.kind != Goal::kCount);
      }
    });
    __syncthreads();
    const Crossing c = find_bin(s, above, goal);
    if (!c.found) return {false, 0, above, 0};
    low += static_cast<Word>(c.bin) << shift;
    const Word end = low + ((Word{1} << shift) - 1);
    high = end < high ? end : high;
    above = c.above;
    if (shift == 0) return {true, low, above, c.inside};
    if (c.inside > 1) continue;
    tokens.each(s, [&](const Token& t) {
      Word k;
      if (key(t, k) && k >= low && k <= high) s.word[0] = k;
    });
    __syncthreads();
    low = s.word[0];
    __syncthreads();
    return {true, low, above, 1};
  }
}

__device__ __noinline__ Found select_p(Shared& s, const Tokens& tokens, const Members& members, Word least,
                                       const Goal& goal) {
  const auto key = [&](const Token& t, Word& k) {
    k = bits_of(t.p);
    return members.has(s, tokens, t);
  };
  return select(s, tokens, key, least, kOne, goal);
}

__device__ __noinline__ Found select_rank(Shared& s, const Tokens& tokens, uint32_t count) {
  const auto key = [&](const Token& t, Word& k) {
    k = tokens.rank(s, t);
    return true;
  };
  return select(s, tokens, key, 0, 0xffffffffu, Goal{Goal::kCount, count - 1, 0});
}

// The n-th lowest id, from 0, of the members whose p, or whose logit, has a key.
__device__ __noinline__ int32_t nth_id(Shared& s, const Tokens& tokens, const Members& members, bool by_rank,
                                       Word value, uint32_t n) {
  const auto key = [&](const Token& t, Word& k) {
    k = ~static_cast<uint32_t>(t.id);
    if (by_rank) return tokens.rank(s, t) == value;
    return bits_of(t.p) == value && members.has(s, tokens, t);
  };
  const Found f =
      select(s, tokens, key, ~static_cast<uint32_t>(kMaxVocab), 0xffffffffu, Goal{Goal::kCount, n, 0});
  return static_cast<int32_t>(~static_cast<uint32_t>(f.key));
}

// Count and mass of the members with p no less than a value.
__device__ __noinline__ Order sum(Shared& s, const Tokens& tokens, const Members& members, double least) {
  Order mine;
  tokens.each(s, [&](const Token& t) {
    if (t.p >= least && members.has(s, tokens, t)) mine = mine + one(t.p);
  });
  mine = block_scan<kThreads>(mine, s.scan);
  if (threadIdx.x == kThreads - 1) s.total = mine;
  __syncthreads();
  const Order all = s.total;
  __syncthreads();
  return all;
}

// Of tokens with the same p, how many it takes to reach the goal. All of them do.
__device__ __forceinline__ uint32_t ties_needed(const Found& f, const Goal& goal) {
  const Order each = one(__longlong_as_double(static_cast<int64_t>(f.key)));
  uint32_t low = 1, high = f.ties;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (goal.reached(f.above + each * middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Lists the tokens from a bin up in shared memory, if they fit. The order of the list has no influence.
__device__ __noinline__ Tokens list_from(Shared& s, const Tokens& tokens, int bin, uint32_t count) {
  if (count > kListed) return tokens;
  if (threadIdx.x == 0) s.listed = 0;
  __syncthreads();
  const Word edge = lower_edge(bin);
  tokens.each(s, [&](const Token& t) {
    if (bits_of(t.p) < edge) return;
    const uint32_t at = atomicAdd(&s.listed, 1u);
    s.p[at] = t.p;
    s.id[at] = t.id;
    s.rank[at] = rank_key(tokens.logit[t.id]);
  });
  __syncthreads();
  return {tokens.logit, tokens.p, static_cast<int>(count), true};
}

__device__ __forceinline__ uint32_t count_from(Shared& s, int bin) {
  uint32_t count = 0;
  for (int b = threadIdx.x; b < kBins; b += kThreads) count += b >= bin ? s.count[b] : 0;
  Order mine;
  mine.count = count;
  mine = block_scan<kThreads>(mine, s.scan);
  if (threadIdx.x == kThreads - 1) s.total = mine;
  __syncthreads();
  count = s.total.count;
  __syncthreads();
  return count;
}

// The draw, by one block. The row's coarse histogram is in shared memory.
__device__ int32_t choose(Shared& s, const Tokens& every, const SamplingParams& sampling, double u) {
  const auto vocab = static_cast<uint32_t>(every.n), k = static_cast<uint32_t>(sampling.top_k);
  const double top_p = sampling.top_p, min_p = sampling.min_p;
  const bool limited = sampling.top_k > 0 && k < vocab;
  Crossing c = find_bin(s, {}, Goal{Goal::kCount, limited ? k - 1 : vocab - 1, 0});
  Order kept = s.total;
  int bin = c.bin;
  if (!limited && min_p > 0) {
    bin = bin_of(min_p);
  } else if (!limited) {
    // How far the walk can get at most.
    c = find_bin(
        s, {},
        top_p < 1 ? Goal{Goal::kAtLeast, 0, top_p * kept.mass()} : Goal{Goal::kAbove, 0, u * kept.mass()});
    bin = c.found ? c.bin : 0;
  }
  const Tokens tokens = list_from(s, every, bin, count_from(s, bin));
  const Word least = tokens.listed ? lower_edge(bin) : 0;

  Members members;
  if (limited) {
    const Found f = select_rank(s, tokens, k);
    const uint32_t wanted = k - f.above.count;
    members.last_id = wanted < f.ties ? nth_id(s, tokens, members, true, f.key, wanted - 1) : kMaxVocab;
    members.rank = static_cast<uint32_t>(f.key);
    members.all = false;
    kept = sum(s, tokens, members, 0);
  }
  const double total = kept.mass();
  if (min_p > 0) kept = sum(s, tokens, members, min_p);
  if (top_p < 1) {
    const Goal goal{Goal::kAtLeast, 0, top_p * total};
    const Found f = select_p(s, tokens, members, least, goal);
    if (f.any) {
      const Order leading =
          f.above + one(__longlong_as_double(static_cast<int64_t>(f.key))) * ties_needed(f, goal);
      if (leading.count < kept.count) kept = leading;
    }
  }
  const Goal goal{Goal::kAbove, 0, u * kept.mass()};
  Found f = select_p(s, tokens, members, least, goal);
  uint32_t at = f.any ? f.above.count + ties_needed(f, goal) - 1 : kept.count;
  if (at >= kept.count) {  // u * mass rounds up to the mass: the last one
    at = kept.count - 1;
    f = select_p(s, tokens, members, least, Goal{Goal::kCount, at, 0});
  }
  return nth_id(s, tokens, members, false, f.key, at - f.above.count);
}

}  // namespace rocket::cuda::draw
