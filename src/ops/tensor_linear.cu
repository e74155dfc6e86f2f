#include "ops/tensor_linear.cuh"

namespace rocket::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) cut_rows_kernel(CutRowsParams p) {
  wait_for_previous();
  start_next();
  const int row = blockIdx.x, head = blockIdx.y, width = static_cast<int>(term_width(p.in));
  const float* x = p.x + row * p.ldx + head * p.hx;
  __nv_bfloat16* to = p.to + (int64_t{head} * p.rows + row) * 2 * width;
  for (int i = threadIdx.x * 2; i < width; i += kThreads * 2) {
    const float v0 = i < p.in ? x[i] : 0.0f, v1 = i + 1 < p.in ? x[i + 1] : 0.0f;
    const __nv_bfloat162 first = __floats2bfloat162_rn(v0, v1);
    *reinterpret_cast<__nv_bfloat162*>(to + i) = first;
    *reinterpret_cast<__nv_bfloat162*>(to + width + i) =
        __floats2bfloat162_rn(second_term(v0, first.x), second_term(v1, first.y));
  }
}

}  // namespace

void cut_rows(const CutRowsParams& p, Exec& exec) {
  launch("rows to BF16", cut_rows_kernel, dim3(p.rows, p.heads), kThreads, 0, exec, p);
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
