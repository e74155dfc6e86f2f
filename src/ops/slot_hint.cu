#include "ops/slot_cache.cuh"
#include "ops/slot_hint.h"
#include "ops/slot_swap.cuh"

namespace rocket::cuda {
namespace {

struct HintArgs {
  SlotHints hints;
  SlotHintList list;
};

// All blocks of the grid get here before any goes on, and see what others have written. `target` is a block's own count.
__device__ __forceinline__ void meet(unsigned* met, unsigned& target) {
  __syncthreads();
  target += gridDim.x;
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(met, 1u);
    unsigned found;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(met) : "memory");
    } while (found < target);
    __threadfence();
  }
  __syncthreads();
}

// The last block to be done leaves the counts at 0.
__device__ __forceinline__ void part(unsigned* met) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(met + 1, 1u) != gridDim.x - 1) return;
  met[0] = 0;
  met[1] = 0;
}

constexpr int32_t kClosed = -1;  // in place of `room`: a step has begun

// By the first block.
__device__ __forceinline__ void choose(const HintArgs& a, int32_t expert, SlotBlockShared& shared,
                                       bool* open) {
  if (threadIdx.x == 0) {
    uint64_t steps;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(steps) : "l"(&a.hints.gate->steps) : "memory");
    *open = steps == a.list.steps;
  }
  __syncthreads();
  if (*open) {
    SlotBlock block(shared);
    slot_hint(a.hints.cache, a.list.layer, expert, block);
  } else if (threadIdx.x == 0) {
    *a.hints.cache.lookup = {a.list.layer, 0, 0, 0, kClosed};
  }
}

// Blocks wait for each other, so all of them must find a place: they are few, and no later kernel takes one before they are
// done.
__global__ void __launch_bounds__(kSwapThreads) hint_kernel(const __grid_constant__ HintArgs a) {
  __shared__ SlotBlockShared shared;
  __shared__ bool open;
  wait_for_previous();
  unsigned target = 0;
  for (int32_t i = 0; i < a.list.count; ++i) {
    if (blockIdx.x == 0) choose(a, a.list.expert[i], shared, &open);
    meet(a.hints.met, target);
    const SlotLookup* const lookup = a.hints.cache.lookup;
    if (__ldcg(&lookup->room) == kClosed) break;
    if (__ldcg(&lookup->misses) == 0) {
      meet(a.hints.met, target);
      continue;
    }
    swap_pieces(read_trade(a.hints.cache, a.hints.bank, 0), 0);
    meet(a.hints.met, target);
  }
  part(a.hints.met);
}

__global__ void begin_kernel(const int64_t* clock, int64_t* floor) {
  wait_for_previous();
  *floor = *clock;
}

}  // namespace

void hint_slots(const SlotHints& hints, const SlotHintList& list, Exec& exec) {
  const HintArgs a = {hints, list};
  launch("expert hint", hint_kernel, kSwapBlocks, kSwapThreads, 0, exec, a);
}

void begin_hints(const SlotCache& cache, Exec& exec) {
  launch("expert hint", begin_kernel, 1, 1, 0, exec, static_cast<const int64_t*>(cache.clock),
         cache.step_floor);
}

}  // namespace rocket::cuda
