#include "ops/tensor_linear.cuh"

namespace rocket::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) round_rows_kernel(RoundRowsParams p) {
  wait_for_previous();
  start_next();
  const int row = blockIdx.x, head = blockIdx.y, width = static_cast<int>(rounded_width(p.in));
  const float* x = p.x + row * p.ldx + head * p.hx;
  __nv_bfloat16* to = p.to + head * p.hto + row * p.ldto;
  for (int i = threadIdx.x * 2; i < width; i += kThreads * 2) {
    const float v0 = i < p.in ? x[i] : 0.0f, v1 = i + 1 < p.in ? x[i + 1] : 0.0f;
    *reinterpret_cast<__nv_bfloat162*>(to + i) = __floats2bfloat162_rn(v0, v1);
  }
}

}  // namespace

void round_rows(const RoundRowsParams& p, Exec& exec) {
  launch("rows to BF16", round_rows_kernel, dim3(p.rows, p.heads), kThreads, 0, exec, p);
}

template <>
void run_tensor<WeightFormat::kBF16>(TensorParams& p, bool vector, Exec& exec) {
  return vector ? run_tensor_tiles<WeightFormat::kBF16, true>(p, exec)
                : run_tensor_tiles<WeightFormat::kBF16, false>(p, exec);
}
template <>
void run_tensor<WeightFormat::kF32>(TensorParams& p, bool vector, Exec& exec) {
  return vector ? run_tensor_tiles<WeightFormat::kF32, true>(p, exec)
                : run_tensor_tiles<WeightFormat::kF32, false>(p, exec);
}

}  // namespace rocket::cuda
