#include "ops/cuda.cuh"
#include "ops/cuda_ops.h"
#include "ops/quad.cuh"

namespace rocket::cuda {
namespace {

constexpr int kThreads = 128;

// A thread copies four columns of one row into all streams. kVector: the table's rows and x are aligned for that; a
// ready-made embedding is looked at where it lies.
template <bool kBf16, bool kVector>
__global__ void __launch_bounds__(kThreads) embed_kernel(EmbedParams p) {
  start_next();
  wait_for_previous();
  const int64_t hidden = p.table.in, row = blockIdx.y;
  const int64_t at = 4 * (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x);
  const int64_t left = hidden - at;
  if (left <= 0) return;
  const float* ready = p.embedding ? p.embedding[row] : nullptr;
  float4 v;
  if (ready) {
    const bool aligned = kVector && reinterpret_cast<uintptr_t>(ready) % 16 == 0;
    v = aligned ? load_quad<true>(ready + at, left) : load_quad<false>(ready + at, left);
  } else {
    const auto* table = static_cast<const unsigned char*>(p.table.data);
    v = load_stored_quad<kBf16, kVector>(table, p.token[row] * hidden + at, left);
  }
  float* x = p.x + row * p.streams * hidden + at;
  for (int n = 0; n < p.streams; ++n) store_quad<kVector>(x + n * hidden, v, left);
}

}  // namespace

void embed(const EmbedParams& p, Exec& exec) {
  if (exec.measure || p.rows == 0) return;
  const bool bf16 = p.table.format == WeightFormat::kBF16;
  if (!bf16 && p.table.format != WeightFormat::kF32) {
    fail_op("embed", "table format (kF32 or kBF16)", static_cast<int64_t>(WeightFormat::kBF16),
            static_cast<int64_t>(p.table.format));
  }
  const bool vector = quads_aligned(p.table.data, p.table.in) && quads_aligned(p.x, p.table.in);
  const auto kernel = bf16 ? (vector ? embed_kernel<true, true> : embed_kernel<true, false>)
                           : (vector ? embed_kernel<false, true> : embed_kernel<false, false>);
  const int64_t quads = (p.table.in + 3) / 4;
  const dim3 grid(static_cast<unsigned>((quads + kThreads - 1) / kThreads), static_cast<unsigned>(p.rows));
  launch("embed", kernel, grid, kThreads, 0, exec, p);
}

}  // namespace rocket::cuda
