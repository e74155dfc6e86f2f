// The block of threads that looks experts up (slot_lookup.h), on the device.
#pragma once

#include "ops/cuda.cuh"
#include "ops/slot_lookup.h"

namespace rocket::cuda {

constexpr int kMostWarps = 32;

struct SlotBlockShared {
  SlotScratch scratch;
  int64_t oldest[2][kMostWarps];  // of each warp; in turn, so that a look needs one barrier
};

// A one-dimensional block of whole warps.
class SlotBlock {
 public:
  __device__ explicit SlotBlock(SlotBlockShared& shared) : shared_(shared) {}
  __device__ __forceinline__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ int threads() const { return static_cast<int>(blockDim.x); }
  __device__ __forceinline__ void sync() { __syncthreads(); }
  __device__ __forceinline__ int32_t load(const int32_t* p) const { return __ldcg(p); }
  __device__ __forceinline__ void mark(uint32_t* word, uint32_t bits) { atomicOr(word, bits); }
  __device__ __forceinline__ void add(int32_t* counter, int32_t n) { atomicAdd(counter, n); }
  __device__ __forceinline__ void add(uint64_t* counter, uint64_t n) {
    atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(n));
  }
  __device__ __forceinline__ int64_t oldest(int64_t stamp) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const int64_t other = __shfl_xor_sync(0xffffffffu, static_cast<long long>(stamp), step);
      if (other < stamp) stamp = other;
    }
    turn_ ^= 1;
    if (threadIdx.x % kWarp == 0) shared_.oldest[turn_][threadIdx.x / kWarp] = stamp;
    __syncthreads();
    for (int w = 0; w < threads() / kWarp; ++w) {
      const int64_t other = shared_.oldest[turn_][w];
      if (other < stamp) stamp = other;
    }
    return stamp;
  }

 private:
  SlotBlockShared& shared_;
  int turn_ = 0;
};

// Whether this block is the last of the grid to get here; what the others wrote before is visible then. Called once by
// every thread of every block.
__device__ __forceinline__ bool is_last_block(unsigned* ticket) {
  if (gridDim.x == 1) {
    __syncthreads();
    return true;
  }
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(ticket, 1u) == gridDim.x - 1;
    if (last) *ticket = 0;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

}  // namespace rocket::cuda
