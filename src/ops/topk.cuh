// Sums over the threads of a block in thread order, and the k-th largest of many keys by one block.
#pragma once

#include <type_traits>

#include "ops/cuda.cuh"
#include "ops/float_key.h"

namespace rocket {

constexpr int kSelectThreads = 1024;
constexpr int kSelectBins = 2 * kSelectThreads;  // one digit: each thread looks at two

__device__ __forceinline__ uint32_t shuffle_up(uint32_t x, int step) {
  return __shfl_up_sync(0xffffffffu, x, step);
}

// Inclusive sums over the threads of a block. T has + and shuffle_up(); `shared` has kThreads / 32 entries. Two barriers.
template <int kThreads, typename T>
__device__ __forceinline__ T block_scan(T x, T* shared) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const T below = shuffle_up(x, step);
    if (lane >= step) x = x + below;
  }
  if (lane == kWarp - 1) shared[warp] = x;
  __syncthreads();
  T before{};
  if constexpr (std::is_same_v<T, uint32_t> && kThreads == kWarp * kWarp) {
    before = __reduce_add_sync(0xffffffffu, lane < warp ? shared[lane] : 0u);
  } else {
    for (int w = 0; w < warp; ++w) before = before + shared[w];
  }
  __syncthreads();
  return before + x;
}

// Where the k largest of n keys end: all keys above `key` and the first `equal` of those that equal it.
struct Threshold {
  uint32_t key;
  uint32_t equal;
};

struct SelectShared {
  uint32_t count[kSelectBins];
  uint32_t scan[kSelectThreads / kWarp];
  Threshold found;
  bool all;  // of a bin that the threshold lies in: whether it is taken whole
};

// keys(i) is key i, 0 < k < n. All threads of a block of kSelectThreads call it and get the same answer. Radix selection:
// the key is found digit by digit, from histograms of the keys that share the digits found so far.
template <typename Keys>
__device__ Threshold find_threshold(const Keys& keys, int n, uint32_t k, SelectShared& s) {
  Threshold t{0, k};
  int shift = 32;
#pragma unroll 1
  for (int level = 0; level < 3; ++level) {
    const uint32_t known = shift == 32 ? 0 : ~0u << shift;
    const int width = level < 2 ? 11 : 10;
    shift -= width;
    const uint32_t mask = (1u << width) - 1;
    s.count[threadIdx.x] = s.count[threadIdx.x + kSelectThreads] = 0;
    __syncthreads();
    for (int first = threadIdx.x; first < n; first += 4 * kSelectThreads) {
      uint32_t key[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = first + j * kSelectThreads;
        key[j] = i < n ? keys(i) : 0;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (first + j * kSelectThreads < n && (key[j] & known) == t.key) {
          atomicAdd(&s.count[(key[j] >> shift) & mask], 1u);
        }
      }
    }
    __syncthreads();
    // Largest digits first: thread 0 has the two largest.
    const int high = kSelectBins - 1 - 2 * threadIdx.x;
    const uint32_t in_high = s.count[high], in_low = s.count[high - 1];
    const uint32_t upto = block_scan<kSelectThreads>(in_high + in_low, s.scan);
    const uint32_t before = upto - in_high - in_low;
    if (before < t.equal && upto >= t.equal) {
      const bool first = before + in_high >= t.equal;
      s.found.key = t.key | static_cast<uint32_t>(first ? high : high - 1) << shift;
      s.found.equal = t.equal - before - (first ? 0 : in_high);
    }
    __syncthreads();
    t = s.found;
  }
  return t;
}

}  // namespace rocket
