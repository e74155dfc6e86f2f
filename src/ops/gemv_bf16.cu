#include <algorithm>

#include "ops/gemv_launch.cuh"
#include "ops/gemv_mma.cuh"

namespace rocket::cuda {
namespace {

template <typename K, size_t kLimit>
void launch_mma(GemvParams& p, Exec& exec) {
  constexpr int64_t kRoom = static_cast<int64_t>(kLimit) - K::kTableAt;
  constexpr int64_t kMostSlices = K::kSplit == 1 ? 8 : kMmaSlices / K::kSplit;  // of a block
  static_assert(K::table_bytes(kMostSlices) <= kRoom);
  const int64_t slices = (p.slices + K::kSplit - 1) / K::kSplit;
  const int64_t wave = std::max<int64_t>(exec.cuda->sm_count / K::kSplit, 1);
  const int64_t clusters = std::min<int64_t>(wave, p.groups);
  // Rounds of equal size, as many as the sums' room asks for.
  const int64_t each = (p.groups + clusters - 1) / clusters, room = kRoom / K::table_bytes(slices);
  const int64_t rounds = (each + room - 1) / room;
  p.block_groups = static_cast<int32_t>((each + rounds - 1) / rounds);
  p.each_groups = static_cast<int32_t>(p.groups / clusters);
  p.more_groups = static_cast<int32_t>(p.groups % clusters);
  const size_t shared = std::max<size_t>(K::kTableAt + K::table_bytes(slices * p.block_groups),
                                         shared_to_spread(*exec.cuda, 1));
  const dim3 grid(static_cast<unsigned>(clusters * K::kSplit),
                  static_cast<unsigned>((p.rows + K::R - 1) / K::R));
  if constexpr (K::kSplit == 1) {
    launch_fence("linear", gemv_mma_kernel<K>, grid, K::kThreads, shared, exec, p);
  } else {
    launch_fence("linear", gemv_mma_cluster_kernel<K>, grid, K::kThreads, shared, exec, p);
  }
}

// Blocks share a range of groups where `in` is wide, so that most warps meet one slice, and where groups are few.
template <int R, int kStages, size_t kLimit>
void run_mma(GemvParams& p, Exec& exec) {
  int64_t out = 0;
  for (int i = 0; i < p.part_count; ++i) out += p.part[i].out;
  gemv_mma_slices(p.in, out, p.slices, p.slice);
  gemv_groups(p, GemvMma<R, 1, kStages>::G);
  const int sms = exec.cuda->sm_count;
  if (p.groups <= sms / 6) return launch_mma<GemvMma<R, 4, kStages>, kLimit>(p, exec);
  if (p.in > kMmaWide || out <= kMmaFew || p.groups <= sms / 2)
    return launch_mma<GemvMma<R, 2, kStages>, kLimit>(p, exec);
  launch_mma<GemvMma<R, 1, kStages>, kLimit>(p, exec);
}

// As deep as shared memory allows, the sums beside it.
template <int R>
void run_mma(GemvParams& p, Exec& exec) {
  if (exec.cuda->block_shared >= static_cast<int64_t>(kSharedMore))
    return run_mma<R, 9, kSharedMore>(p, exec);
  run_mma<R, R == 2 ? 3 : 5, kSharedLimit>(p, exec);
}

}  // namespace

// The order of sums is chosen by alignment and `in`; then the number of rows makes no difference to the bits.
template <>
void run_gemv<WeightFormat::kBF16>(GemvParams& p, bool vector, Exec& exec) {
  constexpr WeightFormat kFormat = WeightFormat::kBF16;
  if (!vector) return run_gemv_direct<kFormat, false>(p, exec);
  if (p.in < kMmaLeast) return run_gemv_direct<kFormat, true>(p, exec);
  if (!p.vector_x) return run_mma<16>(p, exec);  // the others load x in fours
  if (p.rows <= 2) return run_mma<2>(p, exec);
  if (p.rows <= 4) return run_mma<4>(p, exec);
  if (p.rows <= 8) return run_mma<8>(p, exec);
  run_mma<16>(p, exec);
}

}  // namespace rocket::cuda
