// What CUDA ops share: launches with checks, waiting for the kernel before, sums in a fixed order, streaming loads.
//
// All .cu files are compiled with --fmad=false: a sum uses fmaf where it means to, so that variants of a kernel for
// different numbers of rows give the same bits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <utility>

#include "base/error.h"
#include "ops/exec.h"
#include "ops/rows.h"

namespace rocket {

class CublasLt;

struct CudaContext {
  cudaStream_t stream = nullptr;
  int device = 0;
  int sm_count = 0;
  int arch = 0;  // 90, 121, …
  int64_t l2_bytes = 0;
  int64_t sm_shared = 0, block_shared = 0;  // bytes of shared memory: of an SM, and that a block may have
  CublasLt* cublas = nullptr;               // may be null: ops/cublas_lt.h
  bool behind_fence = false;  // whether the kernel that was launched last is a fence: launch_fence()
  bool after_join = false;    // the stream waits for another one: the next kernel must not be scheduled early
  bool sync_each = false;     // ROCKET_CUDA_SYNC: wait after each op, so that a failure names it
};

// Shared memory that a block may use on every GPU that we build for (GB10: 99 KiB, static and dynamic together).
constexpr size_t kSharedLimit = 99 * 1024;
// The same where a kernel has a variant for GPUs with more, chosen by CudaContext::block_shared (Hopper, GB300).
constexpr size_t kSharedMore = 227 * 1024;
constexpr size_t kSharedAsked = 16 * 1024;  // dynamic, from which on leave is asked for

// So much dynamic shared memory that an SM has room for this number of a kernel's blocks and no more. Kernels whose blocks
// do equal work ask for at least so much: they are scheduled while earlier kernels still hold parts of the device, and
// would crowd on the SMs that come free first.
inline size_t shared_to_spread(const CudaContext& cuda, int blocks) {
  return static_cast<size_t>(cuda.sm_shared / (blocks + 1));
}

// Throws DeviceError, also where memory ran out: in the midst of a step nothing can be refused any more. A kernel's failure
// is found by a later call.
inline void cuda_check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  const std::string why = std::string(": ") + cudaGetErrorName(status) + ", " + cudaGetErrorString(status);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // the device is well
    throw DeviceError(what + why, "lower --max-context, the streams or the expert cache");
  }
  throw DeviceError(
      what + why + " (found there: an op before may have caused it)",
      "run again with ROCKET_CUDA_SYNC=1 to see which op fails; see whether nvidia-smi finds the "
      "device well");
}

// After each op that was issued: with ROCKET_CUDA_SYNC it is waited for, so that a failure is its own.
inline void after_op(const char* op, Exec& exec) {
  if (!exec.cuda->sync_each) return;
  const cudaError_t status = cudaStreamSynchronize(exec.cuda->stream);
  if (status == cudaSuccess) return;
  throw DeviceError(
      std::string(op) + " failed: " + cudaGetErrorName(status) + ", " + cudaGetErrorString(status),
      "see whether nvidia-smi finds the device well");
}

// Launches a kernel that starts with wait_for_previous(): it may be scheduled while the kernel before it drains.
// `shared` is the dynamic shared memory; where it and the static might pass 48 KiB, the kernel gets leave for it here. The launcher states
// static_assert(its shared memory <= kSharedLimit) wherever that is a constant.
template <typename... Params, typename... Args>
void launch(const char* op, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared, Exec& exec,
            Args&&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (shared > kSharedAsked) {
    cuda_check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
        op);
  }
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = exec.cuda->stream;
  config.attrs = &early;
  config.numAttrs = exec.cuda->after_join ? 0 : 1;
  exec.cuda->after_join = false;
  cuda_check(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), op);
  exec.cuda->behind_fence = false;
  after_op(op, exec);
}

// The same for a kernel that calls start_next() only behind wait_for_previous(). Such a kernel is a fence: what is launched
// next starts when all that was launched before the fence is done, and may read what that wrote before it waits itself.
template <typename... Params, typename... Args>
void launch_fence(const char* op, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared, Exec& exec,
                  Args&&... args) {
  launch(op, kernel, grid, block, shared, exec, std::forward<Args>(args)...);
  exec.cuda->behind_fence = true;
}

// First of all in every kernel (weights alone may be read or prefetched before): everything that earlier kernels wrote
// is visible after it, and everything that they read may be overwritten.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// Lets the next kernel be scheduled as soon as all blocks have called this or ended. It still waits, in
// wait_for_previous(), until this kernel is done.
__device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

constexpr int kWarp = 32;

// The same value in every lane, by a tree whose shape is fixed.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// The same value in every thread of a block of kThreads; `shared` has kThreads / 32 floats. Two barriers.
template <int kThreads>
__device__ __forceinline__ float block_sum(float x, float* shared) {
  constexpr int kWarps = kThreads / kWarp;
  x = warp_sum(x);
  if constexpr (kWarps == 1) return x;
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  float total = shared[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) total += shared[w];
  __syncthreads();
  return total;
}

// The segment that a row belongs to. Segments cover the rows in order; empty ones may follow.
__device__ __forceinline__ int find_segment(const Segment* segment, int segments, int row) {
  int low = 0, high = segments - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (segment[middle].rows > 0 && segment[middle].first_row <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// 16 bytes of weights that are read once: no room in the first-level cache.
__device__ __forceinline__ uint4 load_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ float bf16_low(uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float bf16_high(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

__device__ __forceinline__ float sigmoid(float x) {
  return 1.0f / (1.0f + expf(-x));
}

}  // namespace rocket
