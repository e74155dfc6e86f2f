// What the kernels that bring a wave's misses share.
#pragma once

#include "ops/cuda.cuh"
#include "ops/slot_fetch.h"

namespace rocket::cuda {

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ __forceinline__ void start_clock(SlotFetchClock* clock) {
  if (threadIdx.x == 0)
    atomicMin(reinterpret_cast<unsigned long long*>(&clock->begin),
              static_cast<unsigned long long>(nanoseconds()));
}
// The last block to be done adds the time since the first began.
__device__ __forceinline__ void stop_clock(SlotFetchClock* clock) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(&clock->ticket, 1u) != gridDim.x - 1) return;
  clock->ticket = 0;
  const uint64_t begin = atomicExch(reinterpret_cast<unsigned long long*>(&clock->begin), ~0ull);
  const uint64_t now = nanoseconds();
  if (now > begin) clock->total += now - begin;
}

// The choices id[n] as a wave has them.
__device__ __forceinline__ void write_choices(const SlotCache& cache, const SlotRange& range,
                                              const int32_t* id, int64_t n) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step)
    cache.miss_id[i] = slot_wave_id(range, cache.rank, id[i]);
}

// On `stream`, or, where it is null, on the ops' stream.
template <typename Args>
void launch_on_side(void (*kernel)(Args), int blocks, int threads, size_t shared, const Args& a,
                    cudaStream_t stream, Exec& exec) {
  if (!stream) {
    launch("expert fetch", kernel, static_cast<unsigned>(blocks), threads, shared, exec, a);
    return;
  }
  if (shared > kSharedAsked) {
    cuda_check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
        "expert fetch");
  }
  kernel<<<static_cast<unsigned>(blocks), threads, shared, stream>>>(a);
  cuda_check(cudaGetLastError(), "expert fetch");
  if (exec.cuda->sync_each) cuda_check(cudaStreamSynchronize(stream), "expert fetch");
}

}  // namespace rocket::cuda
