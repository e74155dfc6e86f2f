// What the kernels of hyper-connections share.
#pragma once

#include "base/error.h"
#include "ops/cuda.cuh"
#include "ops/hyper_connection.h"

namespace rocket::cuda {

constexpr int kMaxStreams = 8;

inline void check_streams(const char* op, int32_t streams) {
  if (streams < 1 || streams > kMaxStreams) fail_op(op, "streams, at most", kMaxStreams, streams);
}

constexpr int kMaxSums = kMaxStreams * (kMaxStreams + 2) + 1;  // the outputs of fn, then the sum of squares

__host__ __device__ __forceinline__ int sums_of(int streams) {
  return streams * (streams + 2) + 1;
}

// partial[row][sum][slice]: the sums of slices of the flattened axis (hyper_mix.cu). With p.block, where
// hyper_mix_posts(), hyper_post comes first.
bool hyper_mix_posts(const HyperPreParams& p, const Exec& exec);
int hyper_mix_slices(const HyperPreParams& p, const Exec& exec);
void hyper_mix(const HyperPreParams& p, float* partial, int slices, Exec& exec);

constexpr int kMixSlice = 128;     // columns of a slice
constexpr int kTensorSlice = 512;  // the same where a row's bits may depend on the kind of step

// The same by tensor cores, for the shapes that it has; false where it has none (hyper_mix_tensor.cu).
bool hyper_mix_tensor(const HyperPreParams& p, float* partial, int slices, Exec& exec);

}  // namespace rocket::cuda
