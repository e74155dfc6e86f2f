#include "ops/gemv_launch.cuh"
#include "ops/gemv_ring.cuh"

namespace rocket::cuda {
namespace {

// Whether there is room for a group's sums beside the ring; else nothing is launched.
template <typename K>
bool launch_ring(GemvParams& p, Exec& exec) {
  gemv_slices(p.in, p.slices, p.slice);
  gemv_groups(p, K::G);
  const int64_t room = (static_cast<int64_t>(kSharedLimit) - K::kRingBytes) / K::table_bytes(p.slices);
  if (room < 1) return false;
  // One wave of blocks, or as many as the sums' room asks for.
  const int64_t sms = exec.cuda->sm_count, each = (p.groups + sms - 1) / sms;
  const int64_t most = sms * ((each + room - 1) / room), blocks = most < p.groups ? most : p.groups;
  p.block_groups = static_cast<int32_t>((p.groups + blocks - 1) / blocks);
  const size_t shared = K::kRingBytes + K::table_bytes(int64_t{p.slices} * p.block_groups);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>((p.rows + K::R - 1) / K::R));
  launch("linear", gemv_ring_kernel<K>, grid, K::kThreads, shared, exec, p);
  return true;
}

}  // namespace

// Few rows go through the ring. More of them want more of x than registers hold.
template <>
void run_gemv<WeightFormat::kBF16>(GemvParams& p, bool vector, Exec& exec) {
  constexpr WeightFormat kFormat = WeightFormat::kBF16;
  if (!vector) return run_gemv_direct<kFormat, false>(p, exec);
  if (p.rows <= 1 && launch_ring<GemvRing<1>>(p, exec)) return;
  if (p.rows == 2 && launch_ring<GemvRing<2>>(p, exec)) return;
  run_gemv_direct<kFormat, true>(p, exec);
}

}  // namespace rocket::cuda
