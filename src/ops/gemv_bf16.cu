#include <algorithm>

#include "ops/gemv_launch.cuh"
#include "ops/gemv_ring.cuh"

namespace rocket::cuda {
namespace {

// Whether there is room for a group's sums beside the ring; else nothing is launched.
template <typename K, size_t kLimit>
bool launch_ring(GemvParams& p, Exec& exec) {
  static_assert(K::kRingBytes + K::table_bytes(1) <= int64_t{kLimit});
  const int64_t slices = (p.slices + K::kSplit - 1) / K::kSplit;  // of a block, at most
  const int64_t room = (static_cast<int64_t>(kLimit) - K::kRingBytes) / K::table_bytes(slices);
  if (room < 1) return false;
  // One wave of clusters, or as many as the sums' room asks for.
  const int64_t wave = exec.cuda->sm_count > K::kSplit ? exec.cuda->sm_count / K::kSplit : 1;
  const int64_t each = (p.groups + wave - 1) / wave, most = wave * ((each + room - 1) / room);
  const int64_t clusters = most < p.groups ? most : p.groups;
  p.block_groups = static_cast<int32_t>((p.groups + clusters - 1) / clusters);
  const size_t shared = std::max<size_t>(K::kRingBytes + K::table_bytes(slices * p.block_groups),
                                         shared_to_spread(*exec.cuda, 1));
  const dim3 grid(static_cast<unsigned>(clusters * K::kSplit),
                  static_cast<unsigned>((p.rows + K::R - 1) / K::R));
  if constexpr (K::kSplit == 1) {
    launch_fence("linear", gemv_ring_kernel<K>, grid, K::kThreads, shared, exec, p);
  } else {
    launch_fence("linear", gemv_ring_cluster_kernel<K>, grid, K::kThreads, shared, exec, p);
  }
  return true;
}

// Two blocks share where `in` has more slices than a block has warps, so that most warps meet one slice, and where
// that leaves no SM without work.
template <int R, int kStages, size_t kLimit>
bool run_ring(GemvParams& p, Exec& exec) {
  using Alone = GemvRing<R, 1, kStages>;
  using Shared = GemvRing<R, 2, kStages>;
  gemv_slices(p.in, p.slices, p.slice);
  gemv_groups(p, Alone::G);
  if (p.slices > Alone::kWarps && p.groups >= exec.cuda->sm_count)
    return launch_ring<Shared, kLimit>(p, exec);
  return launch_ring<Alone, kLimit>(p, exec);
}

// As deep as shared memory allows, the sums beside it.
template <int R>
bool run_ring(GemvParams& p, Exec& exec) {
  if (exec.cuda->block_shared >= static_cast<int64_t>(kSharedMore))
    return run_ring<R, 9, kSharedMore>(p, exec);
  return run_ring<R, 5, kSharedLimit>(p, exec);
}

}  // namespace

// Few rows go through the ring. More of them want more of x than registers hold.
template <>
void run_gemv<WeightFormat::kBF16>(GemvParams& p, bool vector, Exec& exec) {
  constexpr WeightFormat kFormat = WeightFormat::kBF16;
  if (!vector) return run_gemv_direct<kFormat, false>(p, exec);
  if (p.rows <= 1 && run_ring<1>(p, exec)) return;
  if (p.rows == 2 && run_ring<2>(p, exec)) return;
  run_gemv_direct<kFormat, true>(p, exec);
}

}  // namespace rocket::cuda
