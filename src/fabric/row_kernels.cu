#include <algorithm>

#include "fabric/row_kernels.h"
#include "ops/cuda.cuh"

namespace rocket::cuda {
namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kMostPlaceThreads = 1024;
constexpr int kThreads = 256;

// The sum of `mine` over the threads before this one, and over all, of a block of whole warps. `sums` has a place for
// each warp. Two barriers.
__device__ __forceinline__ int2 count_before(int mine, int* sums) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  int up_to = mine;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int other = __shfl_up_sync(kAll, up_to, step);
    if (lane >= step) up_to += other;
  }
  if (lane == kWarp - 1) sums[warp] = up_to;
  __syncthreads();
  int before = 0, total = 0;
  for (int w = 0; w < warps; ++w) {
    if (w < warp) before += sums[w];
    total += sums[w];
  }
  __syncthreads();
  return make_int2(before + up_to - mine, total);
}

// Each thread has some choices that follow each other.
__global__ void __launch_bounds__(kMostPlaceThreads) place_kernel(RowPlaces p) {
  __shared__ int sums[kMostPlaceThreads / kWarp];
  wait_for_previous();
  const int64_t each = (p.n + blockDim.x - 1) / blockDim.x;
  const int64_t begin = min(p.n, static_cast<int64_t>(threadIdx.x) * each), end = min(p.n, begin + each);
  for (int64_t i = begin; i < end; ++i) p.host_copy[i] = p.id[i];
  int64_t at = 0;
  for (int r = 0; r < p.ranks; ++r) {
    int mine = 0;
    for (int64_t i = begin; i < end; ++i) mine += p.owner[p.id[i]] == r;
    const int2 counted = count_before(mine, sums);
    at += p.stamp_floats;
    int64_t next = at + int64_t{counted.x} * p.hidden;
    for (int64_t i = begin; i < end; ++i) {
      if (p.owner[p.id[i]] != r) continue;
      p.place[i] = next;
      next += p.hidden;
    }
    at += int64_t{counted.y} * p.hidden;
  }
}

// T: float, or float4 where the sizes and addresses allow.
template <typename T>
__global__ void __launch_bounds__(kThreads) pack_kernel(MovedRows p) {
  constexpr int kFloats = sizeof(T) / sizeof(float);
  wait_for_previous();
  const int64_t i = blockIdx.x;
  if (p.own[i] < 0) return;
  const T* from = reinterpret_cast<const T*>(p.routed + i * p.hidden);
  T* to = reinterpret_cast<T*>(p.buffer + p.place[i]);
  for (int u = threadIdx.x; u < p.hidden / kFloats; u += kThreads) to[u] = from[u];
}

// Others have written to the buffer: no cache may answer.
template <typename T>
__global__ void __launch_bounds__(kThreads) unpack_kernel(MovedRows p) {
  constexpr int kFloats = sizeof(T) / sizeof(float);
  wait_for_previous();
  start_next();
  const int64_t i = blockIdx.x;
  if (p.own[i] >= 0) return;
  const T* from = reinterpret_cast<const T*>(p.buffer + p.place[i]);
  T* to = reinterpret_cast<T*>(p.routed + i * p.hidden);
  for (int u = threadIdx.x; u < p.hidden / kFloats; u += kThreads) to[u] = __ldcv(from + u);
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// The first block, beside its row: counts choices, and compares them with the other rank's.
__device__ __forceinline__ void take_notes(const TakenRows& p) {
  __shared__ int own, others, wrong;
  if (threadIdx.x == 0) own = others = wrong = 0;
  __syncthreads();
  int my_own = 0, my_others = 0, my_wrong = 0;
  for (int64_t i = threadIdx.x; i < p.n; i += kThreads) {
    const int32_t id = p.id[i], owner = p.owner[id];
    my_own += owner == p.rank;
    my_others += owner == p.from;
    my_wrong += p.other_id[i] != id;
  }
  atomicAdd(&own, my_own);
  atomicAdd(&others, my_others);
  atomicAdd(&wrong, my_wrong);
  __syncthreads();
  if (threadIdx.x != 0) return;
  p.notes->own = own;
  p.notes->others = others;
  p.notes->wrong = wrong;
  p.notes->taken = nanoseconds();
}

template <typename T>
__global__ void __launch_bounds__(kThreads) take_kernel(TakenRows p) {
  constexpr int kFloats = sizeof(T) / sizeof(float);
  wait_for_previous();
  const int64_t i = blockIdx.x;
  if (i == 0) take_notes(p);
  if (p.owner[p.id[i]] != p.from) return;
  const T* from = reinterpret_cast<const T*>(p.rows + i * p.hidden);
  T* to = reinterpret_cast<T*>(p.routed + i * p.hidden);
  for (int u = threadIdx.x; u < p.hidden / kFloats; u += kThreads) to[u] = from[u];
}

__global__ void reached_kernel(uint64_t* reached) {
  wait_for_previous();
  start_next();
  if (threadIdx.x == 0) *reached = nanoseconds();
}

// By one thread of the kernel that is the first to need the parts.
template <typename Parts>
__device__ __forceinline__ void note_wait(const Parts& p) {
  const uint64_t waited = p.clock->waited + (nanoseconds() - p.clock->reached);
  p.clock->waited = waited;
  *p.waited = waited;
}

__global__ void __launch_bounds__(kThreads) sum_parts_kernel(PartSum p) {
  wait_for_previous();
  start_next();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i == 0 && p.clock) note_wait(p);
  if (i >= p.count) return;
  const float mine = p.x[i];
  float sum = 0;
  for (int r = 0; r < p.ranks; ++r) {
    const float part = r == p.rank ? mine : __ldcv(p.parts + r * p.stride + i);
    sum = r == 0 ? part : sum + part;
  }
  p.x[i] = sum;
}

__global__ void __launch_bounds__(kThreads) join_parts_kernel(PartJoin p) {
  wait_for_previous();
  start_next();
  const int64_t width = p.ranks * p.columns, i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i == 0 && p.clock) note_wait(p);
  if (i >= p.rows * width) return;
  const int64_t row = i / width, column = i % width, rank = column / p.columns;
  const int64_t at = row * p.columns + column % p.columns;
  p.all[i] = rank == p.rank ? p.mine[at] : __ldcv(p.parts + rank * p.stride + at);
}

// On a stream of its own nothing starts early; on the ops' stream as all ops do.
template <typename Args>
void launch_on(const char* what, void (*kernel)(Args), int64_t blocks, int threads, const Args& args,
               void* stream, Exec& exec) {
  if (!stream) {
    launch(what, kernel, static_cast<unsigned>(blocks), threads, 0, exec, args);
    return;
  }
  const auto on = static_cast<cudaStream_t>(stream);
  kernel<<<static_cast<unsigned>(blocks), threads, 0, on>>>(args);
  cuda_check(cudaGetLastError(), what);
  if (exec.cuda->sync_each) cuda_check(cudaStreamSynchronize(on), what);
}

bool in_fours(const MovedRows& p) {
  return p.hidden % 4 == 0 && p.stamp_floats % 4 == 0 && reinterpret_cast<uintptr_t>(p.routed) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(p.buffer) % 16 == 0;
}

}  // namespace

void place_rows(const RowPlaces& p, void* stream, Exec& exec) {
  if (exec.measure || p.n <= 0) return;
  const int64_t warps = std::min<int64_t>((p.n + kWarp - 1) / kWarp, kMostPlaceThreads / kWarp);
  launch_on("rows for other ranks", place_kernel, 1, static_cast<int>(warps) * kWarp, p, stream, exec);
}

void pack_rows(const MovedRows& p, void* stream, Exec& exec) {
  if (exec.measure || p.n <= 0) return;
  const auto kernel = in_fours(p) ? pack_kernel<float4> : pack_kernel<float>;
  launch_on("rows for other ranks", kernel, p.n, kThreads, p, stream, exec);
}

void unpack_rows(const MovedRows& p, Exec& exec) {
  if (exec.measure || p.n <= 0) return;
  const auto kernel = in_fours(p) ? unpack_kernel<float4> : unpack_kernel<float>;
  launch_on("rows of other ranks", kernel, p.n, kThreads, p, nullptr, exec);
}

void take_rows(const TakenRows& p, void* stream, Exec& exec) {
  if (exec.measure || p.n <= 0) return;
  const bool fours = p.hidden % 4 == 0 && reinterpret_cast<uintptr_t>(p.rows) % 16 == 0 &&
                     reinterpret_cast<uintptr_t>(p.routed) % 16 == 0;
  const auto kernel = fours ? take_kernel<float4> : take_kernel<float>;
  launch_on("rows of other ranks", kernel, p.n, kThreads, p, stream, exec);
}

void note_reached(ExchangeNotes* notes, Exec& exec) {
  if (exec.measure) return;
  launch("rows of other ranks", reached_kernel, 1, kWarp, 0, exec, &notes->reached);
}

void note_reached(PartClock* clock, Exec& exec) {
  if (exec.measure) return;
  launch("parts of all ranks", reached_kernel, 1, kWarp, 0, exec, &clock->reached);
}

void sum_parts(const PartSum& p, Exec& exec) {
  if (exec.measure || p.count <= 0) return;
  launch_on("parts of all ranks", sum_parts_kernel, (p.count + kThreads - 1) / kThreads, kThreads, p, nullptr,
            exec);
}

void join_parts(const PartJoin& p, Exec& exec) {
  if (exec.measure || p.rows <= 0 || p.columns <= 0) return;
  const int64_t count = p.rows * p.ranks * p.columns;
  launch_on("parts of all ranks", join_parts_kernel, (count + kThreads - 1) / kThreads, kThreads, p, nullptr,
            exec);
}

}  // namespace rocket::cuda
