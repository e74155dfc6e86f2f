// How an expert's bytes come into a slot while those of the expert before it go back, by blocks of kSwapThreads.
#pragma once

#include "ops/slot_fetch.cuh"

namespace rocket::cuda {

// Few blocks with many loads on their way, as of fetch_slots().
constexpr int kSwapBlocks = 24, kSwapThreads = 256, kSwapLoads = 8;
constexpr int64_t kSwapUnit = sizeof(uint4), kSwapPiece = int64_t{kSwapThreads} * kSwapLoads * kSwapUnit;

// A miss: it comes from `place`, and what was in `slot` goes there.
struct Trade {
  char *place, *slot;
  int64_t in, out;  // bytes
};

// Of a look-up's miss m, from places or, where the bank has all experts, from there.
__device__ __forceinline__ Trade read_trade(const SlotCache& c, const SlotBank& bank, int m) {
  const int2 miss = __ldcg(reinterpret_cast<const int2*>(c.miss + m));  // expert, slot
  const int64_t key = int64_t{__ldcg(&c.lookup->layer)} * c.experts + miss.x;
  char* const slot = c.base + miss.y * c.slot_bytes;
  if (!bank.place) return {const_cast<char*>(bank.expert[key]), slot, c.parts[key].bytes, 0};
  const int2 trade = __ldcg(reinterpret_cast<const int2*>(c.trade + m));  // place, key
  return {bank.place[trade.x], slot, c.parts[key].bytes, trade.y < 0 ? 0 : c.parts[trade.y].bytes};
}
static_assert(sizeof(SlotMiss) == sizeof(int2) && sizeof(SlotTrade) == sizeof(int2));

// Bytes that the same kernel overwrites: from the cache that all of the device shares.
__device__ __forceinline__ uint4 load_written(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// One piece, `at` bytes from the beginning. Each thread writes only where it has read.
__device__ __forceinline__ void swap_piece(const Trade& t, int64_t at) {
  uint4* const place = reinterpret_cast<uint4*>(t.place + at) + threadIdx.x;
  uint4* const slot = reinterpret_cast<uint4*>(t.slot + at) + threadIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const int in = static_cast<int>(max(int64_t{0}, min(kSwapPiece, t.in - at)) / kSwapUnit) - thread;
  const int out = static_cast<int>(max(int64_t{0}, min(kSwapPiece, t.out - at)) / kSwapUnit) - thread;
  uint4 come[kSwapLoads], go[kSwapLoads];
#pragma unroll
  for (int i = 0; i < kSwapLoads; ++i) {
    if (i * kSwapThreads < in) come[i] = load_written(place + i * kSwapThreads);
  }
#pragma unroll
  for (int i = 0; i < kSwapLoads; ++i) {
    if (i * kSwapThreads < out) go[i] = load_written(slot + i * kSwapThreads);
  }
#pragma unroll
  for (int i = 0; i < kSwapLoads; ++i) {
    if (i * kSwapThreads < in) slot[i * kSwapThreads] = come[i];
    if (i * kSwapThreads < out) place[i * kSwapThreads] = go[i];
  }
}

// A block's pieces of a trade: every gridDim.x-th. Which one is its first changes with `turn`, so that experts of few pieces
// keep all blocks at work.
__device__ __forceinline__ void swap_pieces(const Trade& t, unsigned turn) {
  const int64_t bytes = max(t.in, t.out);
  for (int64_t at = (blockIdx.x + turn) % gridDim.x * kSwapPiece; at < bytes; at += kSwapPiece * gridDim.x)
    swap_piece(t, at);
}

}  // namespace rocket::cuda
