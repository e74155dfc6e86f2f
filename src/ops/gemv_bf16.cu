#include "ops/gemv_launch.cuh"

namespace rocket::cuda {

// Few rows go through the ring. More of them need its room for x.
template <>
void run_gemv<WeightFormat::kBF16>(GemvParams& p, bool vector, Exec& exec) {
  constexpr WeightFormat kFormat = WeightFormat::kBF16;
  if (!vector) return run_gemv_direct<kFormat, false>(p, exec);
  if (p.rows <= 1) return launch_gemv<GemvKind<kFormat, true, true, 1>>(p, exec);
  if (p.rows <= 2) return launch_gemv<GemvKind<kFormat, true, true, 2>>(p, exec);
  run_gemv_direct<kFormat, true>(p, exec);
}

}  // namespace rocket::cuda
