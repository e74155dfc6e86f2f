// This machine's streaming read rate, the limit that decode is held against, and its copy rate.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"

namespace rocket {

// GB/s (10^9 bytes) at which the pool's threads together read a buffer of `bytes` (0: four times the
// last-level cache, 128 MiB to 1 GiB), over about `seconds`: the median of its passes.
double read_rate_gb_s(ThreadPool& pool, int64_t bytes, double seconds);

// The same for copying one half of such a buffer to the other, counting bytes read and written.
double copy_rate_gb_s(ThreadPool& pool, int64_t bytes, double seconds);

}  // namespace rocket
