// Two launches, whatever a row's settings, which lie in device memory: the largest logit and cleared tables, then the
// probabilities with a coarse histogram of them, after which the row's last block draws the token.
#include "base/error.h"
#include "ops/cuda.cuh"
#include "ops/cuda_ops.h"
#include "ops/sample.cuh"

namespace rocket::cuda {
namespace {

using namespace draw;

// What a row has in scratch.
struct Scratch {
  Word* best = nullptr;       // [rows, blocks] largest logit of a block: its key, then ~id
  Word* high = nullptr;       // [rows, kBins]
  Word* low = nullptr;        // [rows, kBins]
  uint32_t* count = nullptr;  // [rows, kBins + 1], the last counts the blocks that are done
  double* p = nullptr;        // [rows, vocab]
};

__device__ __forceinline__ Word block_max(Word x, Word* shared) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const Word other = __shfl_xor_sync(0xffffffffu, x, step);
    x = other > x ? other : x;
  }
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  for (int w = 0; w < kThreads / kWarp; ++w) x = shared[w] > x ? shared[w] : x;
  __syncthreads();
  return x;
}

__global__ void __launch_bounds__(kThreads) best_kernel(SampleParams p, Scratch s) {
  __shared__ Word shared[kThreads / kWarp];
  wait_for_previous();
  start_next();
  const int64_t row = blockIdx.y;
  const float* logit = p.logits + row * p.ld;
  Word best = 0;
#pragma unroll
  for (int j = 0; j < kChunk / kThreads; ++j) {
    const int i = blockIdx.x * kChunk + j * kThreads + threadIdx.x;
    if (i < p.vocab) {
      const Word here = static_cast<Word>(rank_key(logit[i])) << 32 | ~static_cast<uint32_t>(i);
      best = here > best ? here : best;
    }
  }
  for (int i = blockIdx.x * kThreads + threadIdx.x; i <= kBins; i += gridDim.x * kThreads) {
    s.count[row * (kBins + 1) + i] = 0;
    if (i < kBins) s.high[row * kBins + i] = s.low[row * kBins + i] = 0;
  }
  best = block_max(best, shared);
  if (threadIdx.x == 0) s.best[row * gridDim.x + blockIdx.x] = best;
}

// Unnormalised probability of a logit. Equal logits give equal bits, and the largest gives 1, infinity included.
__device__ __forceinline__ double weight(float logit, float top, double temperature) {
  if (logit == top || top == -INFINITY) return 1;
  if (logit != logit) return 0;
  return exp(static_cast<double>(logit) / temperature - static_cast<double>(top) / temperature);
}

__device__ __forceinline__ uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}
__device__ __forceinline__ double uniform(uint64_t seed, uint64_t counter) {
  return static_cast<double>(splitmix64(splitmix64(seed) + counter) >> 11) * 0x1p-53;
}

// Whether this is the last block of its row to get here. What the others wrote before is visible to it then.
__device__ __forceinline__ bool is_last(uint32_t* done, Shared& s) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) s.last = atomicAdd(done, 1u) == gridDim.x - 1;
  __syncthreads();
  __threadfence();
  return s.last;
}

__global__ void __launch_bounds__(kThreads) draw_kernel(SampleParams p, Scratch scratch) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  wait_for_previous();
  start_next();
  const int64_t row = blockIdx.y;
  const SamplingParams sampling = p.sampling[row];
  const bool greedy = !(sampling.temperature > 0);
  if (greedy && blockIdx.x > 0) return;
  Word best = 0;
  for (int b = threadIdx.x; b < gridDim.x; b += kThreads) {
    const Word here = scratch.best[row * gridDim.x + b];
    best = here > best ? here : best;
  }
  best = block_max(best, s.word);
  if (greedy) {
    if (threadIdx.x == 0) p.token[row] = static_cast<int32_t>(~static_cast<uint32_t>(best));
    return;
  }
  const float top = from_key(static_cast<uint32_t>(best >> 32));
  const float* logit = p.logits + row * p.ld;
  double* weights = scratch.p + row * p.vocab;
  Word *high = scratch.high + row * kBins, *low = scratch.low + row * kBins;
  uint32_t* count = scratch.count + row * (kBins + 1);
  clear_bins(s);
#pragma unroll 1
  for (int j = 0; j < kChunk / kThreads; ++j) {
    const int i = blockIdx.x * kChunk + j * kThreads + threadIdx.x;
    if (i >= p.vocab) break;
    const double w = weight(logit[i], top, sampling.temperature);
    weights[i] = w;
    add(s, bin_of(w), w, true);
  }
  __syncthreads();
  for (int b = threadIdx.x; b < kBins; b += kThreads) {
    if (s.count[b] == 0) continue;
    atomicAdd(count + b, s.count[b]);
    if (s.high[b]) atomicAdd(high + b, s.high[b]);
    if (s.low[b]) atomicAdd(low + b, s.low[b]);
  }
  if (!is_last(count + kBins, s)) return;
  for (int b = threadIdx.x; b < kBins; b += kThreads) {
    s.count[b] = __ldcg(count + b);
    s.high[b] = __ldcg(high + b);
    s.low[b] = __ldcg(low + b);
  }
  __syncthreads();
  const int32_t token =
      choose(s, Tokens{logit, weights, p.vocab, false}, sampling, uniform(sampling.seed, p.counter[row]));
  if (threadIdx.x == 0) p.token[row] = token;
}

// --- finite ---

__global__ void __launch_bounds__(kThreads) find_bad_kernel(FiniteParams p, int32_t* bad) {
  wait_for_previous();
  start_next();
  const float* x = p.x + blockIdx.y * p.ld;
  int any = 0;
#pragma unroll
  for (int j = 0; j < kChunk / kThreads; ++j) {
    const int i = blockIdx.x * kChunk + j * kThreads + threadIdx.x;
    if (i < p.dim) any |= (__float_as_uint(x[i]) & 0x7f800000u) == 0x7f800000u;
  }
  any = __syncthreads_or(any);
  if (threadIdx.x == 0) bad[blockIdx.y * gridDim.x + blockIdx.x] = any;
}

__global__ void __launch_bounds__(kWarp) any_bad_kernel(const int32_t* bad, int blocks, int32_t* out) {
  wait_for_previous();
  start_next();
  int any = 0;
  for (int b = threadIdx.x; b < blocks; b += kWarp) any |= bad[blockIdx.x * blocks + b];
  any = __any_sync(0xffffffffu, any);
  if (threadIdx.x == 0) out[blockIdx.x] = any;
}

}  // namespace

void sample(const SampleParams& p, Exec& exec) {
  if (p.vocab > kMaxVocab) fail_op("sample", "vocabulary, at most", kMaxVocab, p.vocab);
  constexpr int64_t kGroup = 32;  // rows whose probabilities are in scratch together
  const int64_t blocks = (int64_t{p.vocab} + kChunk - 1) / kChunk, group = p.rows < kGroup ? p.rows : kGroup;
  ArenaScope scope(*exec.scratch);
  Scratch s;
  s.best = exec.scratch->take<Word>(group * blocks);
  s.high = exec.scratch->take<Word>(group * kBins);
  s.low = exec.scratch->take<Word>(group * kBins);
  s.count = exec.scratch->take<uint32_t>(group * (kBins + 1));
  s.p = exec.scratch->take<double>(group * p.vocab);
  if (exec.measure) return;
  for (int64_t first = 0; first < p.rows; first += group) {
    SampleParams part = p;
    part.logits += first * p.ld;
    part.sampling += first;
    part.counter += first;
    part.token += first;
    const int64_t rows = first + group < p.rows ? group : p.rows - first;
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(rows));
    launch("sample", best_kernel, grid, kThreads, 0, exec, part, s);
    launch("sample", draw_kernel, grid, kThreads, sizeof(Shared), exec, part, s);
  }
}

void find_bad(const FiniteParams& p, Exec& exec) {
  const int64_t blocks = (int64_t{p.dim} + kChunk - 1) / kChunk, rows = p.rows;
  ArenaScope scope(*exec.scratch);
  int32_t* bad = exec.scratch->take<int32_t>(rows * blocks);
  if (exec.measure || rows == 0) return;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(rows));
  if (blocks == 1) {
    launch("find_bad", find_bad_kernel, grid, kThreads, 0, exec, p, p.bad);
    return;
  }
  launch("find_bad", find_bad_kernel, grid, kThreads, 0, exec, p, bad);
  launch("find_bad", any_bad_kernel, grid.y, kWarp, 0, exec, bad, static_cast<int>(blocks), p.bad);
}

}  // namespace rocket::cuda
