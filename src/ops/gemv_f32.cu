#include "ops/gemv_launch.cuh"

namespace rocket::cuda {

template <>
void run_gemv<WeightFormat::kF32>(GemvParams& p, bool vector, Exec& exec) {
  return vector ? run_gemv_direct<WeightFormat::kF32, true>(p, exec)
                : run_gemv_direct<WeightFormat::kF32, false>(p, exec);
}

}  // namespace rocket::cuda
