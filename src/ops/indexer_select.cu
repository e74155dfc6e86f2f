// Which pools a row's list has, from their scores. Long rows are cut into chunks, and a block for each leaves the chunk's best
// pools in scratch; then a block for each row chooses, from the scores or from what chunks left.
#include <algorithm>

#include "ops/indexer.cuh"
#include "ops/topk.cuh"

namespace rocket::cuda {
namespace {

constexpr int kOwn = 16;                      // keys that a thread holds
constexpr int kHeld = kOwn * kSelectThreads;  // and a block
constexpr int kChunk = kHeld / 2;

// The best pools of a row's chunks, ascending: those of each chunk behind those of the one before.
struct Candidates {
  uint32_t* key = nullptr;  // [rows, ld]
  int32_t* pool = nullptr;  // [rows, ld]
  int64_t ld = 0;
  int chunks = 0;  // 0: none are made
};

// Keys in registers, each thread's those that follow each other.
struct HeldKeys {
  uint32_t key[kOwn];
  int own;           // of a thread, at most
  int first, count;  // of this thread

  // Sets the thread's share of n keys; quad(i) gives keys i … i + 3, where i is a multiple of 4 below n.
  template <typename Quad>
  __device__ __forceinline__ HeldKeys(int n, const Quad& quad) {
    own = (n + 4 * kSelectThreads - 1) / (4 * kSelectThreads) * 4;
    first = threadIdx.x * own;
    count = min(max(n - first, 0), own);
#pragma unroll
    for (int i = 0; i < kOwn; i += 4) {
      uint4 k = make_uint4(0, 0, 0, 0);
      if (i < count) k = quad(first + i);
      key[i] = k.x;
      key[i + 1] = k.y;
      key[i + 2] = k.z;
      key[i + 3] = k.w;
    }
  }
  // visit(key, its number) for the thread's keys.
  template <typename Visit>
  __device__ __forceinline__ void each(const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < kOwn; i += 4) {
      if (i >= own) break;  // all threads at once
#pragma unroll
      for (int j = i; j < i + 4; ++j) {
        if (j < count) visit(key[j], first + j);
      }
    }
  }
};

__device__ __forceinline__ uint4 score_keys(const float* score, int i) {
  const float4 x = *reinterpret_cast<const float4*>(score + i);
  return make_uint4(float_key(x.x), float_key(x.y), float_key(x.z), float_key(x.w));
}

// The smallest and the largest key of a block.
__device__ __forceinline__ uint2 key_range(const HeldKeys& keys, SelectShared& s) {
  constexpr unsigned kAll = 0xffffffffu;
  constexpr int kWarps = kSelectThreads / kWarp;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  uint32_t low = ~0u, high = 0;
  keys.each([&](uint32_t x, int) {
    low = min(low, x);
    high = max(high, x);
  });
  low = __reduce_min_sync(kAll, low);
  high = __reduce_max_sync(kAll, high);
  if (lane == 0) {
    s.count[warp] = low;
    s.count[kWarps + warp] = high;
  }
  __syncthreads();
  low = __reduce_min_sync(kAll, s.count[lane]);
  high = __reduce_max_sync(kAll, s.count[kWarps + lane]);
  __syncthreads();
  return {low, high};
}
static_assert(kSelectThreads == kWarp * kWarp);

// As find_threshold, of keys in registers: the digits are those of the keys' own range, so that few levels do and few
// keys meet in a bin.
__device__ __forceinline__ Threshold held_threshold(const HeldKeys& keys, uint32_t k, SelectShared& s) {
  const uint2 range = key_range(keys, s);
  uint32_t low = range.x, high = range.y, needed = k;
  for (;;) {
    const uint32_t width = high - low;
    const int shift = width < kSelectBins ? 0 : 21 - __clz(static_cast<int>(width));
    s.count[threadIdx.x] = s.count[threadIdx.x + kSelectThreads] = 0;
    __syncthreads();
    keys.each([&](uint32_t x, int) {
      if (x >= low && x <= high) atomicAdd(&s.count[(x - low) >> shift], 1u);
    });
    __syncthreads();
    const int bin = kSelectBins - 1 - 2 * threadIdx.x;  // the largest first: thread 0 has the two largest
    const uint32_t in_high = s.count[bin], in_low = s.count[bin - 1];
    const uint32_t upto = block_scan<kSelectThreads>(in_high + in_low, s.scan);
    const uint32_t before = upto - in_high - in_low;
    if (before < needed && upto >= needed) {
      const bool first = before + in_high >= needed;
      const uint32_t equal = needed - before - (first ? 0 : in_high);
      s.found.key = low + (static_cast<uint32_t>(first ? bin : bin - 1) << shift);
      s.found.equal = equal;
      s.all = equal == (first ? in_high : in_low);
    }
    __syncthreads();
    low = s.found.key;
    needed = s.found.equal;
    if (shift == 0) return {low, needed};
    if (s.all && low > 0) return {low - 1, 0};
    high = min(high, low + ((1u << shift) - 1));
  }
}

// emit(place, i) for the k best of the block's keys, ascending in i; k is smaller than their number.
template <typename Emit>
__device__ __forceinline__ void choose_held(const HeldKeys& keys, int k, SelectShared& s, const Emit& emit) {
  const Threshold t = held_threshold(keys, static_cast<uint32_t>(k), s);
  uint32_t mine = 0;  // larger ones, and above 16 bits those that equal the threshold
  keys.each([&](uint32_t x, int) { mine += x > t.key ? 1u : x == t.key ? 1u << 16 : 0u; });
  const uint32_t before = block_scan<kSelectThreads>(mine, s.scan) - mine;
  uint32_t larger = before & 0xffffu, equal = before >> 16;
  keys.each([&](uint32_t x, int i) {
    const bool is_larger = x > t.key, is_equal = x == t.key;
    if (is_larger || (is_equal && equal < t.equal)) {
      emit(static_cast<int>(larger + min(equal, t.equal)), i);
    }
    larger += is_larger;
    equal += is_equal;
  });
}
static_assert(kHeld < 1 << 16);

// The same, but neighbouring threads emit neighbouring places, so that what they write lies side by side.
template <typename Emit>
__device__ __forceinline__ void choose_side_by_side(const HeldKeys& keys, int k, SelectShared& s,
                                                    const Emit& emit) {
  if (k > kSelectBins) return choose_held(keys, k, s, emit);
  choose_held(keys, k, s, [&](int place, int i) { s.count[place] = static_cast<uint32_t>(i); });
  __syncthreads();
  for (int place = threadIdx.x; place < k; place += kSelectThreads) {
    emit(place, static_cast<int>(s.count[place]));
  }
}

// A block for each chunk of each row.
__global__ void __launch_bounds__(kSelectThreads)
    chunk_kernel(const __grid_constant__ IndexSelectParams p, const IndexScores in, const Candidates out) {
  __shared__ SelectShared shared;
  wait_for_previous();
  start_next();
  const int row = in.first_row + blockIdx.y, begin = blockIdx.x * kChunk;
  const int pools = visible_pools(p, p.segment[find_segment(p.segment, p.segments, row)], row);
  if (pools <= kHeld || begin >= pools) return;
  const int n = min(pools - begin, kChunk);
  const float* score = in.score + blockIdx.y * in.ld + begin;
  const int64_t to = blockIdx.y * out.ld + blockIdx.x * min(p.topk, kChunk);
  if (n <= p.topk) {
    for (int i = threadIdx.x; i < n; i += kSelectThreads) {
      out.key[to + i] = float_key(score[i]);
      out.pool[to + i] = begin + i;
    }
    return;
  }
  const HeldKeys keys(n, [&](int i) { return score_keys(score, i); });
  choose_side_by_side(keys, p.topk, shared, [&](int place, int i) {
    out.key[to + place] = float_key(score[i]);
    out.pool[to + place] = begin + i;
  });
}

// The tokens of a pool, at their place in the row's list.
__device__ __forceinline__ void list_pool(const IndexSelectParams& p, int32_t* token, int at, int pool) {
  const int first = pool * p.pool;
  if (p.pool == 4 && reinterpret_cast<uintptr_t>(token) % sizeof(int4) == 0) {
    reinterpret_cast<int4*>(token)[at] = make_int4(first, first + 1, first + 2, first + 3);
  } else {
    for (int t = 0; t < p.pool; ++t) token[at * p.pool + t] = first + t;
  }
}

// The same from any number of scores: each warp from a range of its own: first it counts, then it lists.
__device__ void list_chosen(const IndexSelectParams& p, const float* score, int pools, int32_t* token,
                            SelectShared& s) {
  const auto key = [&](int i) { return float_key(score[i]); };
  const Threshold t = find_threshold(key, pools, static_cast<uint32_t>(p.topk), s);
  constexpr int kWarps = kSelectThreads / kWarp;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int range = (pools + kSelectThreads - 1) / kSelectThreads * kWarp;
  const int begin = warp * range, end = min(begin + range, pools);
  uint32_t larger = 0, equal = 0;
#pragma unroll 4
  for (int i = begin + lane; i < end; i += kWarp) {
    const uint32_t k = key(i);
    larger += k > t.key;
    equal += k == t.key;
  }
  larger = __reduce_add_sync(0xffffffffu, larger);
  equal = __reduce_add_sync(0xffffffffu, equal);
  if (lane == 0) {
    s.count[warp] = larger;
    s.count[kWarps + warp] = equal;
  }
  __syncthreads();
  larger = equal = 0;  // of the warps before
  for (int w = 0; w < warp; ++w) {
    larger += s.count[w];
    equal += s.count[kWarps + w];
  }
  const uint32_t lower = (1u << lane) - 1;
  for (int base = begin; base < end; base += kWarp) {
    const int i = base + lane;
    const uint32_t k = i < end ? key(i) : 0;
    const uint32_t is_larger = __ballot_sync(0xffffffffu, i < end && k > t.key);
    const uint32_t is_equal = __ballot_sync(0xffffffffu, i < end && k == t.key);
    const uint32_t larger_before = larger + __popc(is_larger & lower);
    const uint32_t equal_before = equal + __popc(is_equal & lower);
    const bool taken = (is_larger >> lane & 1u) || ((is_equal >> lane & 1u) && equal_before < t.equal);
    if (taken) list_pool(p, token, static_cast<int>(larger_before + min(equal_before, t.equal)), i);
    larger += __popc(is_larger);
    equal += __popc(is_equal);
  }
}

// The candidates of a row that sees `pools` pools.
__device__ __forceinline__ int candidates_of(const IndexSelectParams& p, int pools) {
  const int each = min(p.topk, kChunk);
  return pools / kChunk * each + min(pools % kChunk, each);
}

// The chosen pools' tokens of a row that sees more than topk.
__device__ __forceinline__ void list_best(const IndexSelectParams& p, const IndexScores& in,
                                          const Candidates& candidates, int pools, int32_t* token,
                                          SelectShared& shared) {
  const float* score = in.score + blockIdx.x * in.ld;
  if (pools <= kHeld) {
    const HeldKeys keys(pools, [&](int i) { return score_keys(score, i); });
    choose_side_by_side(keys, p.topk, shared, [&](int place, int i) { list_pool(p, token, place, i); });
  } else if (candidates.chunks > 0) {
    const uint32_t* key = candidates.key + blockIdx.x * candidates.ld;
    const int32_t* pool = candidates.pool + blockIdx.x * candidates.ld;
    const HeldKeys keys(candidates_of(p, pools),
                        [&](int i) { return *reinterpret_cast<const uint4*>(key + i); });
    choose_side_by_side(keys, p.topk, shared, [&](int place, int i) { list_pool(p, token, place, pool[i]); });
  } else {
    list_chosen(p, score, pools, token, shared);
  }
}

// A block for each row.
__global__ void __launch_bounds__(kSelectThreads)
    select_kernel(const __grid_constant__ IndexSelectParams p, const IndexScores in,
                  const Candidates candidates) {
  __shared__ SelectShared shared;
  wait_for_previous();
  start_next();
  const int row = in.first_row + blockIdx.x;
  const int index = find_segment(p.segment, p.segments, row);
  const Segment segment = p.segment[index];
  const int pools = visible_pools(p, segment, row), chosen = min(pools, p.topk);
  int32_t* token = p.token + row * p.ldtoken;
  if (pools <= p.topk) {
    for (int i = threadIdx.x; i < pools * p.pool; i += kSelectThreads) token[i] = i;
  } else if (p.topk > 0) {
    list_best(p, in, candidates, pools, token, shared);
  }
  const int first = pools * p.pool;
  const int tail =
      p.select_tail ? static_cast<int>(segment.position) + row - segment.first_row + 1 - first : 0;
  for (int t = threadIdx.x; t < tail; t += kSelectThreads) token[chosen * p.pool + t] = first + t;
  if (threadIdx.x == 0) p.count[row] = chosen * p.pool + tail;
}

}  // namespace

void index_lists(const IndexSelectParams& p, const IndexScores& scores, int rows, Exec& exec) {
  ArenaScope scope(*exec.scratch);
  Candidates candidates;
  const int64_t chunks = (int64_t{p.max_pools} + kChunk - 1) / kChunk;
  const int64_t all = chunks * std::min(p.topk, kChunk);
  if (p.max_pools > kHeld && p.topk > 0 && all <= kHeld) {
    candidates.chunks = static_cast<int>(chunks);
    candidates.ld = (all + 3) / 4 * 4;
    candidates.key = exec.scratch->take<uint32_t>(rows * candidates.ld);
    candidates.pool = exec.scratch->take<int32_t>(rows * candidates.ld);
  }
  if (exec.measure) return;
  if (candidates.chunks > 0) {
    launch("index_select", chunk_kernel, dim3(static_cast<unsigned>(chunks), static_cast<unsigned>(rows)),
           kSelectThreads, 0, exec, p, scores, candidates);
  }
  launch("index_select", select_kernel, static_cast<unsigned>(rows), kSelectThreads, 0, exec, p, scores,
         candidates);
}

}  // namespace rocket::cuda
