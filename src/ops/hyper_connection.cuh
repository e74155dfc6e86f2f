// What the kernels of hyper-connections share.
#pragma once

#include "base/error.h"
#include "ops/exec.h"
#include "ops/hyper_connection.h"

namespace rocket::cuda {

constexpr int kMaxStreams = 8;

inline void check_streams(const char* op, int32_t streams) {
  if (streams < 1 || streams > kMaxStreams) fail_op(op, "streams, at most", kMaxStreams, streams);
}

constexpr int kMixSlice = 512;  // columns of a slice where a row's bits may depend on the kind of step

// hyper_mix.cu: the slices' sums partial[row][sum][slice] of many rows, for the shapes that it has; false where it has
// none.
bool hyper_mix_tensor(const HyperPreParams& p, float* partial, int slices, Exec& exec);

}  // namespace rocket::cuda
