#include "ops/cuda.cuh"
#include "ops/cuda_ops.h"
#include "ops/hyper_connection.cuh"
#include "ops/quad.cuh"

namespace rocket::cuda {
namespace {

constexpr int kThreads = 64;

// A thread has four columns of one row, in all streams.
template <int kN, bool kVector>
__global__ void __launch_bounds__(kThreads) post_kernel(HyperPostParams p) {
  start_next();
  wait_for_previous();
  const int64_t row = blockIdx.y, at = 4 * (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x);
  const int64_t left = p.hidden - at;
  if (left <= 0) return;
  const int n = kN == 4 ? 4 : p.streams;
  const int64_t of_row = row * n * p.hidden + at;
  const float* x = p.x + of_row;
  const float *post = p.post + row * n, *comb = p.comb + row * n * n;
  float4 old[kN];
#pragma unroll
  for (int m = 0; m < kN; ++m) {
    if (m < n) old[m] = load_quad<kVector>(x + static_cast<int64_t>(m) * p.hidden, left);
  }
  const float4 block = load_quad<kVector>(p.block + row * p.hidden + at, left);
  float4 sum[kN];  // all of them before the first store, so that no load waits behind one
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    if (j >= n) break;
    sum[j] = scaled(post[j], block);
#pragma unroll
    for (int m = 0; m < kN; ++m) {
      if (m < n) sum[j] = plus_scaled(sum[j], comb[m * n + j], old[m]);
    }
  }
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    if (j < n) store_quad<kVector>(p.y + of_row + static_cast<int64_t>(j) * p.hidden, sum[j], left);
  }
}

}  // namespace

void hyper_post(const HyperPostParams& p, Exec& exec) {
  if (exec.measure || p.rows == 0) return;
  check_streams("hyper_post", p.streams);
  const bool vector =
      quads_aligned(p.x, p.hidden) && quads_aligned(p.y, p.hidden) && quads_aligned(p.block, p.hidden);
  const auto kernel = p.streams == 4 ? (vector ? post_kernel<4, true> : post_kernel<4, false>)
                                     : (vector ? post_kernel<8, true> : post_kernel<8, false>);
  const int quads = (p.hidden + 3) / 4;
  const dim3 grid(static_cast<unsigned>((quads + kThreads - 1) / kThreads), static_cast<unsigned>(p.rows));
  launch("hyper_post", kernel, grid, kThreads, 0, exec, p);
}

}  // namespace rocket::cuda
