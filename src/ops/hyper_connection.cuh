// What the kernels of hyper-connections share.
#pragma once

#include "base/error.h"
#include "ops/hyper_connection.h"

namespace rocket::cuda {

constexpr int kMaxStreams = 8;

inline void check_streams(const char* op, int32_t streams) {
  if (streams < 1 || streams > kMaxStreams) fail_op(op, "streams, at most", kMaxStreams, streams);
}

}  // namespace rocket::cuda
