#include "ops/slot_fetch.cuh"

namespace rocket::cuda {
namespace {

struct FetchArgs {
  SlotCache cache;
  SlotBank bank;
  int wave;
  const int32_t* id;
  int64_t n;
};

// The pieces that a block copies: of each miss in turn, every gridDim.x-th. Which one is the block's first changes from
// miss to miss, so that experts of few pieces keep all blocks at work.
template <int64_t kPiece>
class Pieces {
 public:
  __device__ __forceinline__ Pieces(const FetchArgs& a, const SlotRange& range)
      : a_(a), miss_(range.begin), end_(range.end) {
    if (miss_ < end_) open();
  }
  // Moves to the next piece; false: there is none.
  __device__ __forceinline__ bool next() {
    while (miss_ < end_) {
      at_ = next_at_;
      next_at_ += kPiece * gridDim.x;
      if (at_ < bytes_) return true;
      if (++miss_ < end_) open();
    }
    return false;
  }
  __device__ __forceinline__ const char* from() const { return from_ + at_; }
  __device__ __forceinline__ char* to() const { return to_ + at_; }
  __device__ __forceinline__ int64_t bytes() const { return min(kPiece, bytes_ - at_); }

 private:
  __device__ __forceinline__ void open() {
    const SlotMiss miss = a_.cache.miss[miss_];
    const int64_t key = int64_t{a_.cache.lookup->layer} * a_.cache.experts + miss.expert;
    from_ = a_.bank.expert[key];
    to_ = a_.cache.base + miss.slot * a_.cache.slot_bytes;
    bytes_ = a_.cache.parts[key].bytes;
    next_at_ = (blockIdx.x + static_cast<unsigned>(miss_)) % gridDim.x * kPiece;
  }

  const FetchArgs& a_;
  int miss_, end_;
  const char* from_ = nullptr;
  char* to_ = nullptr;
  int64_t bytes_ = 0, at_ = 0, next_at_ = 0;
};

// Few blocks, so that most of the device is left to the ops of wave 0; each with many loads on their way, as the link is
// far.
constexpr int kLoadBlocks = 24, kLoadThreads = 256, kLoads = 8;
constexpr int64_t kLoadPiece = int64_t{kLoadThreads} * kLoads * sizeof(uint4);

__global__ void __launch_bounds__(kLoadThreads) fetch_by_loads(const __grid_constant__ FetchArgs a) {
  wait_for_previous();
  start_next();
  const SlotRange range = slot_wave(*a.cache.lookup, a.wave);
  if (a.wave > 1) write_choices(a.cache, range, a.id, a.n);
  if (range.begin == range.end) return;
  start_clock(a.bank.clock);
  Pieces<kLoadPiece> pieces(a, range);
  while (pieces.next()) {
    const uint4* from = reinterpret_cast<const uint4*>(pieces.from()) + threadIdx.x;
    uint4* to = reinterpret_cast<uint4*>(pieces.to()) + threadIdx.x;
    const int units = static_cast<int>(pieces.bytes() / static_cast<int64_t>(sizeof(uint4))) -
                      static_cast<int>(threadIdx.x);
    uint4 v[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (i * kLoadThreads < units) v[i] = load_once(from + i * kLoadThreads);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (i * kLoadThreads < units) to[i * kLoadThreads] = v[i];
    }
  }
  stop_clock(a.bank.clock);
}

// One thread of each block keeps a ring of pieces in shared memory going: loads fill it, stores drain it.
constexpr int kBulkBlocks = 16, kStages = 8;
constexpr int64_t kBulkPiece = 8192;
constexpr size_t kBulkShared = kStages * kBulkPiece;
static_assert(kBulkShared + kStages * sizeof(uint64_t) + 64 <= kSharedLimit);

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void load_piece(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void wait_piece(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(phase)
      : "memory");
}
__device__ __forceinline__ void store_piece(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

__device__ __forceinline__ void copy_pieces(const FetchArgs& a, const SlotRange& range, uint32_t ring,
                                            uint32_t barriers) {
  Pieces<kBulkPiece> loads(a, range), stores(a, range);
  const auto load = [&](int stage) {
    if (loads.next())
      load_piece(ring + stage * static_cast<uint32_t>(kBulkPiece), loads.from(),
                 static_cast<uint32_t>(loads.bytes()), barriers + stage * 8);
  };
  for (int stage = 0; stage < kStages; ++stage) load(stage);
  for (int64_t i = 0; stores.next(); ++i) {
    const int stage = static_cast<int>(i % kStages);
    wait_piece(barriers + stage * 8, static_cast<uint32_t>(i / kStages % 2));
    store_piece(stores.to(), ring + stage * static_cast<uint32_t>(kBulkPiece),
                static_cast<uint32_t>(stores.bytes()));
    if (i == 0) continue;
    // The store before has read its stage: that one may be filled again.
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    load((stage + kStages - 1) % kStages);
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__global__ void __launch_bounds__(kWarp) fetch_in_bulk(const __grid_constant__ FetchArgs a) {
  extern __shared__ __align__(128) char ring[];
  __shared__ __align__(8) uint64_t barriers[kStages];
  wait_for_previous();
  start_next();
  const SlotRange range = slot_wave(*a.cache.lookup, a.wave);
  if (a.wave > 1) write_choices(a.cache, range, a.id, a.n);
  if (range.begin == range.end) return;
  start_clock(a.bank.clock);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barriers + i)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    copy_pieces(a, range, shared_address(ring), shared_address(barriers));
  }
  stop_clock(a.bank.clock);
}

}  // namespace

void fetch_slots(const SlotCache& cache, const SlotBank& bank, int32_t wave, const int32_t* id, int64_t n,
                 SlotCopy copy, void* stream, Exec& exec) {
  if (exec.measure) return;
  const FetchArgs a = {cache, bank, wave, id, n};
  if (copy == SlotCopy::kBulk) {
    launch_on_side(fetch_in_bulk, kBulkBlocks, kWarp, kBulkShared, a, static_cast<cudaStream_t>(stream),
                   exec);
  } else {
    launch_on_side(fetch_by_loads, kLoadBlocks, kLoadThreads, 0, a, static_cast<cudaStream_t>(stream), exec);
  }
}

}  // namespace rocket::cuda
