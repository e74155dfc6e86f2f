#include "ops/gemv_launch.cuh"

namespace rocket::cuda {

template <>
void run_gemv<WeightFormat::kNVFP4>(GemvParams& p, bool vector, Exec& exec) {
  return vector ? run_gemv_direct<WeightFormat::kNVFP4, true>(p, exec)
                : run_gemv_direct<WeightFormat::kNVFP4, false>(p, exec);
}

}  // namespace rocket::cuda
