#include "base/error.h"
#include "ops/cuda.cuh"
#include "ops/cuda_ops.h"

namespace rocket::cuda {
namespace {

constexpr int kThreads = 256;

template <bool kLayer>
__device__ __forceinline__ void norm_row(const NormPart& p, float* partial) {
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
  for (int i = threadIdx.x; i < p.dim; i += kThreads) {
    const float n = (x[i] - mean) * scale;
    y[i] = kLayer ? fmaf(n, p.weight[i], p.bias[i]) : n * p.weight[i];
  }
}

// One block a row of a part. The order of the sums depends on dim only.
__global__ void __launch_bounds__(kThreads) norm_kernel(const __grid_constant__ NormParams p) {
  __shared__ float partial[kThreads / kWarp];
  wait_for_previous();
  start_next();
  const NormPart& part = p.part[blockIdx.y];
  if (part.bias) {
    norm_row<true>(part, partial);
  } else {
    norm_row<false>(part, partial);
  }
}

}  // namespace

void norm(const NormParams& p, Exec& exec) {
  if (p.part_count < 1 || p.part_count > NormParams::kMaxParts)
    fail_op("norm", "parts, at most", NormParams::kMaxParts, p.part_count);
  if (exec.measure || p.rows == 0) return;
  const dim3 grid(static_cast<unsigned>(p.rows), static_cast<unsigned>(p.part_count));
  launch("norm", norm_kernel, grid, kThreads, 0, exec, p);
}

}  // namespace rocket::cuda
