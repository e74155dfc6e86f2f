#include "ops/cuda.cuh"
#include "ops/cuda_ops.h"
#include "ops/hyper_connection.cuh"
#include "ops/quad.cuh"

namespace rocket::cuda {
namespace {

constexpr int kThreads = 64;

// Ranges of weights that are asked for into the second-level cache, in pieces that blocks take in turns.
struct Ranges {
  const char* begin[Ahead::kMaxWeights] = {};
  int64_t bytes[Ahead::kMaxWeights] = {};
  int count = 0;
};
constexpr int kAheadBlocks = 32;
constexpr int64_t kPiece = 16 << 10;

// One instruction for each piece, and nothing waits for it.
__device__ __forceinline__ void ask_ahead(const Ranges& all, int thread) {
#if __CUDA_ARCH__ >= 900
  for (int i = 0; i < all.count; ++i) {
    for (int64_t at = thread * kPiece; at < all.bytes[i]; at += kAheadBlocks * kThreads * kPiece) {
      const auto bytes = static_cast<uint32_t>(min(kPiece, all.bytes[i] - at));
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(all.begin[i] + at), "r"(bytes)
                   : "memory");
    }
  }
#endif
}

// A thread has four columns of one row, in all streams. The last blocks of row 0 ask for the weights ahead instead.
template <int kN, bool kVector>
__global__ void __launch_bounds__(kThreads) post_kernel(HyperPostParams p, Ranges ahead, int blocks) {
  start_next();
  if (blockIdx.x >= blocks) {  // weights never change: nothing is waited for before they are asked for
    if (blockIdx.y == 0) ask_ahead(ahead, (blockIdx.x - blocks) * kThreads + threadIdx.x);
    wait_for_previous();
    return;
  }
  wait_for_previous();
  const int64_t row = blockIdx.y, at = 4 * (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x);
  const int64_t left = p.hidden - at;
  if (left <= 0) return;
  const int n = kN == 4 ? 4 : p.streams;
  float* x = p.x + row * n * p.hidden + at;
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
    if (j < n) store_quad<kVector>(x + static_cast<int64_t>(j) * p.hidden, sum[j], left);
  }
}

constexpr int kAheadRows = 16;  // with more, the op itself keeps the memory busy

Ranges ranges(const Ahead& ahead) {
  Ranges all;
  int64_t left = ahead.max_bytes;
  for (int i = 0; i < ahead.weights && left > 0; ++i) {
    // Block scales lie elsewhere and are a small part: they are left to the op.
    const Weight& w = ahead.weight[i];
    const int64_t bits = w.format == WeightFormat::kF32     ? 32
                         : w.format == WeightFormat::kBF16  ? 16
                         : w.format == WeightFormat::kNVFP4 ? 4
                                                            : 8;
    const int64_t bytes = (w.out * w.in * bits / 8 < left ? w.out * w.in * bits / 8 : left) / 16 * 16;
    if (bytes == 0 || reinterpret_cast<uintptr_t>(w.data) % 16 != 0) continue;
    all.begin[all.count] = static_cast<const char*>(w.data);
    all.bytes[all.count++] = bytes;
    left -= bytes;
  }
  return all;
}

}  // namespace

void hyper_post(const HyperPostParams& p, Exec& exec) {
  if (exec.measure || p.rows == 0) return;
  check_streams("hyper_post", p.streams);
  const bool vector = quads_aligned(p.x, p.hidden) && quads_aligned(p.block, p.hidden);
  const auto kernel = p.streams == 4 ? (vector ? post_kernel<4, true> : post_kernel<4, false>)
                                     : (vector ? post_kernel<8, true> : post_kernel<8, false>);
  const int quads = (p.hidden + 3) / 4, blocks = (quads + kThreads - 1) / kThreads;
  const Ranges ahead = p.rows <= kAheadRows ? ranges(p.ahead) : Ranges{};
  const dim3 grid(static_cast<unsigned>(blocks + (ahead.count > 0 ? kAheadBlocks : 0)),
                  static_cast<unsigned>(p.rows));
  launch("hyper_post", kernel, grid, kThreads, 0, exec, p, ahead, blocks);
}

}  // namespace rocket::cuda
