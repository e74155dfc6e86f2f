#include <climits>

#include "ops/cuda.cuh"
#include "ops/cuda_ops.h"
#include "ops/slot_cache.cuh"

namespace rocket::cuda {
namespace {

constexpr int kMaxExperts = 4096;
constexpr int kMaxTopk = 64;
constexpr int kMaxWarps = 16;
constexpr unsigned kAll = 0xffffffffu;

// Which experts a step chose, one bit each.
struct Seen {
  unsigned bits[kMaxExperts / 32];
};

__device__ __forceinline__ void clear(Seen& seen) {
  for (int i = threadIdx.x; i < kMaxExperts / 32; i += blockDim.x) seen.bits[i] = 0;
}
__device__ __forceinline__ void mark(Seen& seen, int id) {
  atomicOr(&seen.bits[id / 32], 1u << (id % 32));
}
// Adds their number to *distinct, by the first warp.
__device__ __forceinline__ void add_count(const Seen& seen, int64_t* distinct) {
  if (threadIdx.x >= kWarp) return;
  int n = 0;
  for (int i = threadIdx.x; i < kMaxExperts / 32; i += kWarp) n += __popc(seen.bits[i]);
  n = __reduce_add_sync(kAll, n);
  if (threadIdx.x == 0)  // nobody waits for the sum
    atomicAdd(reinterpret_cast<unsigned long long*>(distinct), static_cast<unsigned long long>(n));
}

// Whether a choice is of this rank's experts.
__device__ __forceinline__ bool is_own(const RouterParams& p, int id) {
  return !p.owner || p.owner[id] == p.rank;
}
// What is looked up and counted.
__host__ __device__ __forceinline__ const int32_t* own_choices(const RouterParams& p) {
  return p.owner ? p.own : p.id;
}

// Keys of candidates, one above float_key() so that 0 can stand for "none or taken".
__device__ __forceinline__ uint32_t key_of(float value) {
  if (value != value) return 1;
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return (bits & 0x80000000u ? ~bits : bits | 0x80000000u) + 1;
}

// The lowest id among the lanes' candidates with the largest key, in every lane.
__device__ __forceinline__ int best_of_warp(uint32_t key, int id) {
  const uint32_t largest = __reduce_max_sync(kAll, key);
  return __reduce_min_sync(kAll, key == largest ? id : INT_MAX);
}

__device__ __forceinline__ float group_score(const float* choice, int n) {
  if (n == 1) return choice[0];
  float first = -INFINITY, second = -INFINITY;
  for (int i = 0; i < n; ++i) {
    const float c = choice[i];
    if (c > first) {
      second = first;
      first = c;
    } else if (c > second) {
      second = c;
    }
  }
  return first + second;
}

// The best topk_group groups get key 0, by one warp.
__device__ __forceinline__ void open_groups(const RouterParams& p, const float* choice, uint32_t* group_key) {
  const int lane = threadIdx.x % kWarp, size = p.experts / p.groups;
  for (int g = lane; g < p.groups; g += kWarp) group_key[g] = key_of(group_score(choice + g * size, size));
  __syncwarp();
  const int count = min(p.topk_group, p.groups);
  for (int i = 0; i < count; ++i) {
    uint32_t key = 0;
    int id = INT_MAX;
    for (int g = lane; g < p.groups; g += kWarp) {
      if (group_key[g] > key) key = group_key[g], id = g;
    }
    const int best = best_of_warp(key, id);
    if (best % kWarp == lane) group_key[best] = 0;
    __syncwarp();
  }
}

// A warp a row: expert lane + 32 i lies in the lane's place i. Where one block does the whole step, it also counts the
// distinct experts. Dynamic shared memory, with groups: choices [experts] and keys [groups] of each warp.
template <int kPlaces>
__global__ void __launch_bounds__(kMaxWarps* kWarp) router_kernel(RouterParams p) {
  extern __shared__ float by_warp[];
  __shared__ int sorted[kMaxWarps][kMaxTopk];
  __shared__ Seen seen;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const bool count = p.distinct && gridDim.x == 1;
  if (count) clear(seen);
  __syncthreads();
  wait_for_previous();
  start_next();
  float* const choice = by_warp + warp * (p.experts + p.groups);
  uint32_t* const group_key = reinterpret_cast<uint32_t*>(choice + p.experts);
  for (int64_t row = int64_t{blockIdx.x} * warps + warp; row < p.rows; row += int64_t{gridDim.x} * warps) {
    const float* logit = p.logit + row * p.ld;
    uint32_t key[kPlaces];
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      const int e = lane + i * kWarp;
      key[i] = 0;
      if (e >= p.experts) continue;
      const float c = sigmoid(logit[e]) + p.bias[e];
      key[i] = key_of(c);
      if (p.groups > 1) choice[e] = c;
    }
    if (p.groups > 1) {
      __syncwarp();
      open_groups(p, choice, group_key);
      const int size = p.experts / p.groups;
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) {
        const int e = lane + i * kWarp;
        if (e < p.experts && group_key[e / size] != 0) key[i] = key_of(-INFINITY);
      }
    }
    int mine[2] = {INT_MAX, INT_MAX};  // the choices lane and lane + 32, best first
    for (int j = 0; j < p.topk; ++j) {
      uint32_t largest = 0;
      int place = 0;
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) {
        if (key[i] > largest) largest = key[i], place = i;
      }
      const int id = best_of_warp(largest, lane + place * kWarp);
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) {
        if (lane + i * kWarp == id) key[i] = 0;
      }
      if (j == lane) mine[0] = id;
      if (j == lane + kWarp) mine[1] = id;
    }
    int rank[2] = {0, 0};
    for (int j = 0; j < p.topk; ++j) {
      const int other = __shfl_sync(kAll, j < kWarp ? mine[0] : mine[1], j % kWarp);
      rank[0] += other < mine[0];
      rank[1] += other < mine[1];
    }
    if (lane < p.topk) sorted[warp][rank[0]] = mine[0];
    if (lane + kWarp < p.topk) sorted[warp][rank[1]] = mine[1];
    __syncwarp();
    float score[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (lane + k * kWarp < p.topk) score[k] = sigmoid(logit[sorted[warp][lane + k * kWarp]]);
    }
    float total = 0;
    for (int j = 0; j < p.topk; ++j) total += __shfl_sync(kAll, j < kWarp ? score[0] : score[1], j % kWarp);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int j = lane + k * kWarp;
      if (j >= p.topk) continue;
      const int id = sorted[warp][j];
      p.id[row * p.topk + j] = id;
      p.weight[row * p.topk + j] = (p.norm_topk_prob ? score[k] / (total + 1e-20f) : score[k]) * p.scaling;
      const bool mine = is_own(p, id);
      if (p.owner) p.own[row * p.topk + j] = mine ? id : -1;
      if (count && mine) mark(seen, id);
    }
    __syncwarp();  // `sorted` and `choice` are free for the warp's next row
  }
  if (!count) return;
  __syncthreads();
  add_count(seen, p.distinct);
}

// Without groups: a block a row, a thread an expert. An expert's place in the order of choices is how many come before
// it, which every thread counts for itself: no chain of reductions, however many are chosen.
// The last block to be done looks the choices of all rows up, where p.slots says so.
constexpr int kRankExperts = 1024;

__global__ void __launch_bounds__(kRankExperts)
    rank_kernel(RouterParams p, const __grid_constant__ SlotCache slots) {
  __shared__ SlotBlockShared look_up;
  __shared__ __align__(16) uint32_t keys[kRankExperts];
  __shared__ int chosen_of_warp[kWarp], chosen_id[kMaxTopk];
  __shared__ float chosen_score[kMaxTopk];
  const int e = threadIdx.x, lane = e % kWarp, warp = e / kWarp, warps = blockDim.x / kWarp;
  const bool is_expert = e < p.experts;
  const float bias = is_expert ? p.bias[e] : 0.0f;  // a weight: read before the wait
  wait_for_previous();
  start_next();
  const float score = is_expert ? sigmoid(p.logit[blockIdx.x * p.ld + e]) : 0.0f;
  const uint32_t key = is_expert ? key_of(score + bias) : 0;  // below every expert's
  keys[e] = key;
  __syncthreads();
  int before = 0;
  for (int i = 0; i < warps * kWarp; i += 4) {
    const uint4 k = *reinterpret_cast<const uint4*>(keys + i);
    before += (k.x > key) | ((k.x == key) & (i < e));
    before += (k.y > key) | ((k.y == key) & (i + 1 < e));
    before += (k.z > key) | ((k.z == key) & (i + 2 < e));
    before += (k.w > key) | ((k.w == key) & (i + 3 < e));
  }
  const bool chosen = is_expert && before < p.topk;
  const unsigned in_warp = __ballot_sync(kAll, chosen);
  if (lane == 0) chosen_of_warp[warp] = __popc(in_warp);
  __syncthreads();
  if (chosen) {
    int place = __popc(in_warp & ((1u << lane) - 1));
    for (int w = 0; w < warp; ++w) place += chosen_of_warp[w];
    chosen_id[place] = e;
    chosen_score[place] = score;
  }
  __syncthreads();
  bool mine = false;
  if (e < p.topk) {
    float total = 0;
    for (int j = 0; j < p.topk; ++j) total += chosen_score[j];
    const int64_t at = int64_t{blockIdx.x} * p.topk + e;
    const int id = chosen_id[e];
    mine = is_own(p, id);
    p.id[at] = id;
    if (p.owner) p.own[at] = mine ? id : -1;
    p.weight[at] = (p.norm_topk_prob ? chosen_score[e] / (total + 1e-20f) : chosen_score[e]) * p.scaling;
  }
  // The choices of one row are distinct. Nobody waits for the sum.
  if (p.distinct && gridDim.x == 1 && warp * kWarp < p.topk) {
    const int n = __popc(__ballot_sync(kAll, mine));
    if (lane == 0 && n > 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(p.distinct), static_cast<unsigned long long>(n));
  }
  if (!p.slots || !is_last_block(slots.ticket)) return;
  SlotBlock block(look_up);
  slot_lookup(slots, p.layer, own_choices(p), int64_t{p.rows} * p.topk, look_up.scratch, block);
}

constexpr int kLookUpThreads = 1024;

__global__ void __launch_bounds__(kLookUpThreads)
    look_up_kernel(RouterParams p, const __grid_constant__ SlotCache slots) {
  __shared__ SlotBlockShared look_up;
  wait_for_previous();
  start_next();
  SlotBlock block(look_up);
  slot_lookup(slots, p.layer, own_choices(p), int64_t{p.rows} * p.topk, look_up.scratch, block);
}
static_assert(sizeof(SlotBlockShared) + sizeof(uint32_t) * kRankExperts + 1024 <= 48 * 1024);
static_assert(kMaxExperts <= kSlotExperts);

constexpr int kCountThreads = 1024;

__global__ void __launch_bounds__(kCountThreads)
    count_kernel(const int32_t* id, int64_t n, int64_t* distinct) {
  __shared__ Seen seen;
  clear(seen);
  __syncthreads();
  wait_for_previous();
  start_next();
  for (int64_t i = threadIdx.x; i < n; i += kCountThreads) {
    if (id[i] >= 0) mark(seen, id[i]);
  }
  __syncthreads();
  add_count(seen, distinct);
}

[[noreturn]] void refuse(const char* what, int64_t expected, int64_t found) {
  throw InputError(
      std::string("router: ") + what + " " + std::to_string(expected) + ", found " + std::to_string(found),
      "the model's config asks for more than this op has room for");
}

template <int kPlaces>
void launch_router(const RouterParams& p, int blocks, int warps, size_t shared, Exec& exec) {
  launch("router", router_kernel<kPlaces>, static_cast<unsigned>(blocks), warps * kWarp, shared, exec, p);
}

}  // namespace

void router(const RouterParams& p, Exec& exec) {
  if (exec.measure || p.rows <= 0) return;
  if (p.experts > kMaxExperts) refuse("experts, at most", kMaxExperts, p.experts);
  if (p.topk > kMaxTopk) refuse("topk, at most", kMaxTopk, p.topk);
  if (p.topk > p.experts) refuse("topk, at most the number of experts", p.experts, p.topk);
  if (p.groups < 1 || p.experts % p.groups != 0)
    refuse("groups that divide the experts", p.experts, p.groups);
  const SlotCache slots = p.slots ? *p.slots : SlotCache{};
  if (p.slots && slots.experts != p.experts)
    refuse("as many experts as the cache has", slots.experts, p.experts);
  const auto count = [&] {
    launch("router", count_kernel, 1, kCountThreads, 0, exec, own_choices(p), int64_t{p.rows} * p.topk,
           p.distinct);
  };
  if (p.groups == 1 && p.experts <= kRankExperts) {
    const int threads = (p.experts + kWarp - 1) / kWarp * kWarp;
    launch("router", rank_kernel, static_cast<unsigned>(p.rows), threads, 0, exec, p, slots);
    if (p.distinct && p.rows > 1) count();
    return;
  }
  const size_t row = p.groups > 1 ? static_cast<size_t>(p.experts + p.groups) * sizeof(float) : 0;
  constexpr size_t kStatic = sizeof(int) * kMaxWarps * kMaxTopk + sizeof(Seen) + 64;
  static_assert(kStatic + 2 * kMaxExperts * sizeof(float) <= kSharedLimit);
  // One block counts the distinct experts as it goes; many rows are spread over blocks and counted afterwards.
  const bool one = p.rows <= kMaxWarps;
  int warps = one ? p.rows : 4;
  while (warps > 1 && kStatic + static_cast<size_t>(warps) * row > kSharedLimit) --warps;
  const int blocks = one ? 1 : (p.rows + warps - 1) / warps;
  const size_t shared = static_cast<size_t>(warps) * row;
  if (p.experts <= 4 * kWarp) {
    launch_router<4>(p, blocks, warps, shared, exec);
  } else if (p.experts <= 12 * kWarp) {
    launch_router<12>(p, blocks, warps, shared, exec);
  } else if (p.experts <= 32 * kWarp) {
    launch_router<32>(p, blocks, warps, shared, exec);
  } else {
    launch_router<kMaxExperts / kWarp>(p, blocks, warps, shared, exec);
  }
  if (p.distinct && blocks > 1) count();
  if (p.slots) launch("router", look_up_kernel, 1, kLookUpThreads, 0, exec, p, slots);
}

}  // namespace rocket::cuda
