// Where and with what an op runs. Every op takes (const Params&, Exec&).
#pragma once

#include "base/arena.h"
#include "base/thread_pool.h"

namespace rocket {

struct CudaContext;  // ops/cuda.cuh

struct Exec {
  ThreadPool* pool = nullptr;
  Arena* scratch = nullptr;     // an op's own temporaries, in the ops' memory; an op gives back what it takes
  CudaContext* cuda = nullptr;  // on the CUDA backend, else null
  bool tensor_cores = false;    // rows may be rounded; else each row's bits depend on that row only
  bool measure = false;         // CUDA ops take and give back their scratch, and do no more
};

}  // namespace rocket
