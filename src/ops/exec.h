// Where and with what an op runs. Every op takes (const Params&, Exec&).
#pragma once

#include "base/arena.h"
#include "base/thread_pool.h"

namespace rocket {

struct Exec {
  ThreadPool* pool = nullptr;
  Arena* scratch = nullptr;       // host memory for an op's own temporaries; an op gives back what it takes
  void* device_stream = nullptr;  // cudaStream_t on the CUDA backend, else null
};

}  // namespace rocket
