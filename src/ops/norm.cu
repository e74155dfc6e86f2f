#include "ops/cuda.cuh"
#include "ops/cuda_ops.h"

namespace rocket::cuda {
namespace {

constexpr int kThreads = 256;

// One block a row. The order of the sums depends on dim only.
template <bool kLayer>
__global__ void __launch_bounds__(kThreads) norm_kernel(NormParams p) {
  __shared__ float partial[kThreads / kWarp];
  wait_for_previous();
  const float* x = p.x + blockIdx.x * p.ldx;
  float* y = p.y + blockIdx.x * p.ldy;
  float mean = 0;
  if constexpr (kLayer) {
    for (int i = threadIdx.x; i < p.dim; i += kThreads) mean += x[i];
    mean = block_sum<kThreads>(mean, partial) / static_cast<float>(p.dim);
  }
  float squares = 0;
  for (int i = threadIdx.x; i < p.dim; i += kThreads) {
    const float d = x[i] - mean;
    squares = fmaf(d, d, squares);
  }
  const float scale = rsqrtf(block_sum<kThreads>(squares, partial) / static_cast<float>(p.dim) + p.eps);
  start_next();
  for (int i = threadIdx.x; i < p.dim; i += kThreads) {
    const float n = (x[i] - mean) * scale;
    y[i] = kLayer ? fmaf(n, p.weight[i], p.bias[i]) : n * p.weight[i];
  }
}

}  // namespace

void norm(const NormParams& p, Exec& exec) {
  if (exec.measure || p.rows == 0) return;
  launch("norm", p.bias ? norm_kernel<true> : norm_kernel<false>, p.rows, kThreads, 0, exec, p);
}

}  // namespace rocket::cuda
