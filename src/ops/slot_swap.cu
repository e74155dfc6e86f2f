#include "ops/slot_swap.cuh"

namespace rocket::cuda {
namespace {

struct SwapArgs {
  SlotCache cache;
  SlotBank bank;
  int wave;
  const int32_t* id;
  int64_t n;
};

__global__ void __launch_bounds__(kSwapThreads) swap_kernel(const __grid_constant__ SwapArgs a) {
  wait_for_previous();
  start_next();
  const SlotRange range = slot_wave(*a.cache.lookup, a.wave);
  if (a.wave > 1) write_choices(a.cache, range, a.id, a.n);
  if (range.begin == range.end) return;
  start_clock(a.bank.clock);
  for (int m = range.begin; m < range.end; ++m)
    swap_pieces(read_trade(a.cache, a.bank, m), static_cast<unsigned>(m));
  stop_clock(a.bank.clock);
}

}  // namespace

void swap_slots(const SlotCache& cache, const SlotBank& bank, int32_t wave, const int32_t* id, int64_t n,
                void* stream, Exec& exec) {
  if (exec.measure) return;
  const SwapArgs a = {cache, bank, wave, id, n};
  launch_on_side(swap_kernel, kSwapBlocks, kSwapThreads, 0, a, static_cast<cudaStream_t>(stream), exec);
}

}  // namespace rocket::cuda
