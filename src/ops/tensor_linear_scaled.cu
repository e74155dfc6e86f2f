#include "ops/tensor_linear.cuh"

namespace rocket::cuda {

template <>
void run_tensor<WeightFormat::kNVFP4>(TensorParams& p, bool vector, Exec& exec) {
  return vector ? run_tensor_tiles<WeightFormat::kNVFP4, true>(p, exec)
                : run_tensor_tiles<WeightFormat::kNVFP4, false>(p, exec);
}
template <>
void run_tensor<WeightFormat::kFP8Block>(TensorParams& p, bool vector, Exec& exec) {
  return vector ? run_tensor_tiles<WeightFormat::kFP8Block, true>(p, exec)
                : run_tensor_tiles<WeightFormat::kFP8Block, false>(p, exec);
}
template <>
void run_tensor<WeightFormat::kMXFP8>(TensorParams& p, bool vector, Exec& exec) {
  return vector ? run_tensor_tiles<WeightFormat::kMXFP8, true>(p, exec)
                : run_tensor_tiles<WeightFormat::kMXFP8, false>(p, exec);
}

}  // namespace rocket::cuda
