#include <algorithm>

#include "ops/cuda.cuh"
#include "ops/cuda_ops.h"

namespace rocket::cuda {
namespace {

constexpr int kThreads = 128, kBlocks = 32;
constexpr int64_t kLine = 128;

struct Range {
  const char* begin = nullptr;
  int64_t bytes = 0;
};
struct Ranges {
  Range range[PrefetchParams::kMaxWeights];
  int count = 0;
};

// Weights never change, so nothing is waited for before the requests are made.
__global__ void __launch_bounds__(kThreads) prefetch_kernel(Ranges all) {
  for (int i = 0; i < all.count; ++i) {
    const Range range = all.range[i];
    for (int64_t at = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kLine; at < range.bytes;
         at += int64_t{kBlocks} * kThreads * kLine) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(range.begin + at));
    }
  }
  wait_for_previous();
}

}  // namespace

void prefetch(const PrefetchParams& p, Exec& exec) {
  if (exec.measure || p.weights == 0) return;
  Ranges all;
  int64_t left = p.max_bytes;
  for (int i = 0; i < p.weights && left > 0; ++i) {
    // Block scales are a ninth of NVFP4's bytes and lie elsewhere: they are left to the op.
    const Weight& w = p.weight[i];
    const int64_t scales = w.block_scale ? w.out * w.in / 16 : 0;
    const int64_t bytes = std::min(left, weight_bytes(w) - scales);
    all.range[all.count++] = {static_cast<const char*>(w.data), bytes};
    left -= bytes;
  }
  launch("prefetch", prefetch_kernel, kBlocks, kThreads, 0, exec, all);
}

}  // namespace rocket::cuda
