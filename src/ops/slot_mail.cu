#include "ops/slot_fetch.cuh"
#include "ops/slot_mail.h"

namespace rocket::cuda {
namespace {

constexpr int kThreads = 128;
constexpr unsigned kPauseNs = 1000;  // between two looks

struct PostArgs {
  SlotCache cache;
  SlotPost post;
  int wave;
  const int32_t* id;
  int64_t n;
  bool wait;
};

__device__ __forceinline__ uint64_t load_shared_word(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void store_shared_word(uint64_t* to, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

// Returns when all that was wanted has arrived, or when nothing has come for the limit.
__device__ __forceinline__ void wait_for_all(const SlotPost& post, uint64_t request, uint64_t wanted) {
  uint64_t arrived = load_shared_word(&post.desk->arrived), since = nanoseconds();
  while (arrived < wanted) {
    __nanosleep(kPauseNs);
    const uint64_t now = nanoseconds(), found = load_shared_word(&post.desk->arrived);
    if (found != arrived) {
      arrived = found;
      since = now;
    } else if (now > since && now - since > post.limit_ns) {
      post.desk->late = 1;
      store_shared_word(&post.mail->late, request);
      return;
    }
  }
}

// One block: it writes the request together, and one thread waits. It does not let the next kernel start early, whose
// blocks would take the place of those that the wait is to leave it to.
__global__ void __launch_bounds__(kThreads) post_kernel(const __grid_constant__ PostArgs a) {
  wait_for_previous();
  const SlotRange range = slot_wave(*a.cache.lookup, a.wave);
  if (a.wave > 1) write_choices(a.cache, range, a.id, a.n);
  const int32_t count = range.end - range.begin;
  if (count == 0 || !a.wait) return;
  SlotMail* const mail = a.post.mail;
  SlotDesk* const desk = a.post.desk;
  if (desk->late != 0) return;  // earlier kernels wrote it, or none of this one yet: see the barrier
  for (int32_t m = threadIdx.x; m < count; m += kThreads) mail->miss[m] = a.cache.miss[range.begin + m];
  __threadfence_system();
  __syncthreads();
  start_clock(a.post.clock);
  if (threadIdx.x == 0) {
    mail->layer = a.cache.lookup->layer;
    mail->count = count;
    const uint64_t request = desk->posted + 1, wanted = desk->wanted + static_cast<uint64_t>(count);
    desk->posted = request;
    desk->wanted = wanted;
    store_shared_word(&mail->posted, request);
    wait_for_all(a.post, request, wanted);
  }
  stop_clock(a.post.clock);
}

}  // namespace

void post_slots(const SlotCache& cache, const SlotPost& post, int32_t wave, const int32_t* id, int64_t n,
                bool wait, void* stream, Exec& exec) {
  if (exec.measure) return;
  const PostArgs a = {cache, post, wave, id, n, wait};
  launch_on_side(post_kernel, 1, kThreads, 0, a, static_cast<cudaStream_t>(stream), exec);
}

}  // namespace rocket::cuda
