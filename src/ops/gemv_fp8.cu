#include "ops/gemv_launch.cuh"

namespace rocket::cuda {

template <>
void run_gemv<WeightFormat::kFP8Block>(GemvParams& p, bool vector, Exec& exec) {
  return vector ? run_gemv_direct<WeightFormat::kFP8Block, true>(p, exec)
                : run_gemv_direct<WeightFormat::kFP8Block, false>(p, exec);
}

template <>
void run_gemv<WeightFormat::kMXFP8>(GemvParams& p, bool vector, Exec& exec) {
  return vector ? run_gemv_direct<WeightFormat::kMXFP8, true>(p, exec)
                : run_gemv_direct<WeightFormat::kMXFP8, false>(p, exec);
}

}  // namespace rocket::cuda
