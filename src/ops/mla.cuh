// What the exact and the tensor-core attention share.
#pragma once

#include "ops/cuda.cuh"
#include "ops/mla.h"

namespace rocket::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// 16 bytes from global to shared memory, both aligned to that.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Rows of 16-byte pieces. Pages are allocations, so that their start is aligned.
inline bool aligned16(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}
inline bool aligned_rows(const PagedParts& cache) {
  return cache.offset % 4 == 0 && cache.width % (cache.bf16 ? 8 : 4) == 0;
}

// A latent's row in its page, float32 or bfloat16.
__device__ __forceinline__ const char* latent_row(const PagedRows& cache, bool bf16, int64_t token) {
  return bf16 ? reinterpret_cast<const char*>(cache.row_bf16(token))
              : reinterpret_cast<const char*>(cache.row(token));
}

constexpr int kSplit = 64;  // tokens of a split in exact mode

// Partial results of a group of rows: of each row, split and head the largest logit, the sum of exponentials relative to
// it, and the values weighted with these.
struct MlaPartials {
  float2* top_sum = nullptr;  // [rows, splits, heads]
  float* value = nullptr;     // [rows, splits, heads, value_dim]
  int splits = 0;
  int first_row = 0;  // of the group
};

// mla_decode.cu: the splits of `rows` rows, for the shapes that it has; false where it has none.
bool sparse_mla_decode(const SparseMlaParams& p, const MlaPartials& partials, int rows, Exec& exec);
// mla_prefill.cu: by tensor cores, for the shapes that it has; false where it has none.
bool sparse_mla_tensor(const SparseMlaParams& p, Exec& exec);

}  // namespace rocket::cuda
