// Marks small functions that device code may call too. Always inlined on the host, so that kernel files compiled for
// several instruction sets share no copy of them.
#pragma once

#ifdef __CUDACC__
#define ROCKET_HOST_DEVICE __host__ __device__ inline
#else
#define ROCKET_HOST_DEVICE [[gnu::always_inline]] inline
#endif
