// hyper_pre is two kernels. The first spreads the products with fn over the whole device, and the hyper_post of the block
// before: a block has one slice of the flattened axis and leaves that slice's sums in scratch. In the second a cluster of blocks has one row: each block adds
// up what it needs of the slices, collapses its part of the columns, and gets the others' sums of squares through
// distributed shared memory; meanwhile some warps of the first block balance the mixing matrix.
// Where a step has many rows, and a row's bits may depend on the kind of step, the second kernel has a block for each row.
// Else slices and parts depend on the shape only, so a row's bits do not depend on how many rows there are.
#include <cooperative_groups.h>

#include <algorithm>

#include "ops/cuda.cuh"
#include "ops/cuda_ops.h"
#include "ops/hyper_connection.cuh"
#include "ops/quad.cuh"

namespace rocket::cuda {
namespace {

// --- collapse and norm of one row by a cluster ---

constexpr int kParts = 8;  // blocks of a cluster
constexpr int kMaxCollapseWarps = 12;

struct Collapse {
  const float* x;  // [N, H] of the row
  const float* weight;
  float* y;  // [H]
  int streams, hidden;
  int first, quads;  // of this block
};

__device__ __forceinline__ Collapse part_of(const float* x, const float* weight, float* y, int streams,
                                            int hidden) {
  const int all = (hidden + 3) / 4, each = (all + kParts - 1) / kParts;
  const int first = min(all, static_cast<int>(blockIdx.x % kParts) * each);
  return {x, weight, y, streams, hidden, first, min(each, all - first)};
}

// The same four columns of all streams. kN = 8 holds any number of streams.
template <int kN>
struct Streams {
  float4 v[kN];
};

template <int kN, bool kVector>
__device__ __forceinline__ Streams<kN> load_streams(const Collapse& c, int quad) {
  Streams<kN> s;
  const int64_t at = 4 * static_cast<int64_t>(c.first + quad);
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const bool has = quad < c.quads && n < c.streams;
    s.v[n] = load_quad<kVector>(c.x + static_cast<int64_t>(n) * c.hidden + at, has ? c.hidden - at : 0);
  }
  return s;
}

template <int kN>
__device__ __forceinline__ float4 mixed(const Streams<kN>& s, const float (&factor)[kN], int streams) {
  float4 sum = scaled(factor[0], s.v[0]);
#pragma unroll
  for (int n = 1; n < kN; ++n) {
    if (kN == 4 || n < streams) sum = plus_scaled(sum, factor[n], s.v[n]);
  }
  return sum;
}

// Whole warps come to these barriers together.
__device__ __forceinline__ void cluster_arrive() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Called by the first `warps` warps of each block of a cluster, after the cluster has arrived at its first barrier; all
// other threads go through both barriers too. `square` [kParts * warps] gets every warp's sum of squares from every
// block. A thread's first quad stays in registers, any others wait in y.
template <int kN, bool kVector>
__device__ __forceinline__ void collapse(const Collapse& c, const Streams<kN>& mine, float4 weight,
                                         const float (&factor)[kN], float eps, float* square, int warps) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, threads = warps * kWarp;
  const int quad = threadIdx.x;
  const float4 kept = mixed<kN>(mine, factor, c.streams);
  float s = plus_dot(0, kept, kept);
  for (int q = quad + threads; q < c.quads; q += threads) {
    const float4 v = mixed<kN>(load_streams<kN, kVector>(c, q), factor, c.streams);
    s = plus_dot(s, v, v);
    const int64_t at = 4 * static_cast<int64_t>(c.first + q);
    store_quad<kVector>(c.y + at, v, c.hidden - at);
  }
  s = warp_sum(s);
  cluster_wait();
  const auto cluster = cooperative_groups::this_cluster();
  if (lane < kParts) cluster.map_shared_rank(square, lane)[cluster.block_rank() * warps + warp] = s;
  cluster_arrive();
  cluster_wait();
  float total = 0;
  for (int i = lane; i < kParts * warps; i += kWarp) total += square[i];
  const float r = rsqrtf(warp_sum(total) / static_cast<float>(c.hidden) + eps);
  for (int q = quad; q < c.quads; q += threads) {
    const int64_t at = 4 * static_cast<int64_t>(c.first + q), left = c.hidden - at;
    const float4 v = q == quad ? kept : load_quad<kVector>(c.y + at, left);
    const float4 w = q == quad ? weight : load_quad<kVector>(c.weight + at, left);
    store_quad<kVector>(c.y + at, make_float4(v.x * r * w.x, v.y * r * w.y, v.z * r * w.z, v.w * r * w.w),
                        left);
  }
}

// --- pre, post, comb of one row ---

constexpr int kMixerWarps = 4;
constexpr int kMixerSums = 7;  // that a warp reads at once

// out[i] = the slices' sum number (first + i * step), for kSums of them that are below `sums`, in every lane.
template <int kSums>
__device__ __forceinline__ void add_slices(const float* partial, int slices, int first, int step, int sums,
                                           float (&out)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) out[i] = 0;
#pragma unroll 4
  for (int slice = threadIdx.x % kWarp; slice < slices; slice += kWarp) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int sum = first + i * step;
      if (sum < sums) out[i] += partial[static_cast<int64_t>(sum) * slices + slice];
    }
  }
#pragma unroll
  for (int i = 0; i < kSums; ++i) out[i] = warp_sum(out[i]);
}

// Within two units in the last place. Sinkhorn may use it: each half-step divides by what it has just summed, so only
// the last ones' errors are left in the result.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Sinkhorn keeps comb as r_i * K_ij * c_j: dividing a row by (its sum + eps) sets r_i to 1 / (sum_j K_ij c_j + eps / r_i),
// and the last denominator is 1 / r_i. Lane i has r_i and c_i, row i and column i of K, the latter two in the order
// i ^ 0, i ^ 1, … in which shuffles bring the other lanes' values. Lanes without a row hold a 1 that keeps them finite.
template <int kN>
__device__ __forceinline__ void sinkhorn(const float (&row)[kN], const float (&column)[kN], float eps,
                                         int iters, float& r, float& c) {
  const auto half_step = [eps](const float (&k)[kN], float other, float& denominator) {
    float s = fmaf(k[0], other, eps * denominator);
#pragma unroll
    for (int m = 1; m < kN; ++m) s = fmaf(k[m], __shfl_xor_sync(0xffffffffu, other, m), s);
    denominator = s;
    return reciprocal(s);
  };
  float row_denominator = 1, column_denominator = 1;
  r = 1;
  c = half_step(column, r, column_denominator);
  for (int i = 1; i < iters; ++i) {
    const float row_before = row_denominator, column_before = column_denominator;
    r = half_step(row, c, row_denominator);
    c = half_step(column, r, column_denominator);
    // Where nothing changes any more, nothing will.
    const bool still = row_denominator == row_before && column_denominator == column_before;
    if (i % 4 == 0 && __all_sync(0xffffffffu, still)) break;
  }
}

struct MixerShared {
  float sum[kMaxSums];
  float base[kMaxSums];
  float scale[3];
  float matrix[kMaxStreams * kMaxStreams];
};

// One warp. sum: the mix logits before their scale r.
template <int kN>
__device__ __forceinline__ void write_comb(const HyperPreParams& p, int64_t row, MixerShared& shared,
                                           float r) {
  const int lane = threadIdx.x % kWarp, n = p.streams;
  const float *sum = shared.sum, *base = shared.base;
  float* matrix = shared.matrix;
  if (lane < n) {
    float z[kN], top = -INFINITY, total = 0;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      if (j >= n) break;
      const int at = 2 * n + lane * n + j;
      z[j] = fmaf(shared.scale[2], sum[at] * r, base[at]);
      top = fmaxf(top, z[j]);
    }
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      if (j < n) total += z[j] = expf(z[j] - top);
    }
    const float share = 1.0f / total;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      if (j < n) matrix[lane * kMaxStreams + j] = fmaf(z[j], share, p.hc_eps);
    }
  }
  __syncwarp();
  float k_row[kN], k_column[kN], row_factor, column_factor;
#pragma unroll
  for (int m = 0; m < kN; ++m) {
    const int other = lane ^ m;
    const bool inside = lane < n && other < n;
    const float outside = m == 0 ? 1.0f : 0.0f;
    k_row[m] = inside ? matrix[lane * kMaxStreams + other] : outside;
    k_column[m] = inside ? matrix[other * kMaxStreams + lane] : outside;
  }
  sinkhorn<kN>(k_row, k_column, p.hc_eps, p.sinkhorn_iters, row_factor, column_factor);
#pragma unroll
  for (int m = 0; m < kN; ++m) {
    const float factor = __shfl_xor_sync(0xffffffffu, column_factor, m);
    const int other = lane ^ m;
    if (lane < n && other < n) p.comb[(row * n + lane) * n + other] = row_factor * k_row[m] * factor;
  }
}

// The weights that the mixer needs, read while the kernel before still runs.
__device__ __forceinline__ void load_mixer_weights(const HyperPreParams& p, int thread, MixerShared& shared) {
  if (thread < sums_of(p.streams) - 1) shared.base[thread] = p.base[thread];
  if (thread < 3) shared.scale[thread] = p.scale[thread];
}
static_assert(kMaxSums <= kMixerWarps * kWarp);

// The last kMixerWarps warps of a row's first block.
template <int kN>
__device__ __forceinline__ void mixer(const HyperPreParams& p, int64_t row, const float* partial, int slices,
                                      int warp, MixerShared& shared) {
  const int lane = threadIdx.x % kWarp, sums = sums_of(p.streams);
  for (int first = warp; first < sums; first += kMixerSums * kMixerWarps) {
    float s[kMixerSums];
    add_slices<kMixerSums>(partial, slices, first, kMixerWarps, sums, s);
#pragma unroll
    for (int i = 0; i < kMixerSums; ++i) {
      if (lane == 0 && first + i * kMixerWarps < sums) shared.sum[first + i * kMixerWarps] = s[i];
    }
  }
  __syncwarp();
  asm volatile("bar.sync 1, %0;" ::"n"(kMixerWarps * kWarp) : "memory");
  if (warp > 1) return;
  const float flat = static_cast<float>(static_cast<int64_t>(p.streams) * p.hidden);
  const float r = rsqrtf(shared.sum[sums - 1] / flat + p.rms_eps);
  if (warp == 0) {
    write_comb<kN>(p, row, shared, r);
    return;
  }
  const int n = p.streams;
  if (lane < n) {
    const float z = fmaf(shared.scale[1], shared.sum[n + lane] * r, shared.base[n + lane]);
    p.post[row * n + lane] = 2.0f * sigmoid(z);
  }
  if (!p.mix) return;
  for (int o = lane; o < sums - 1; o += kWarp) p.mix[row * (sums - 1) + o] = shared.sum[o] * r;
}

template <int kN, bool kVector>
__global__ void __cluster_dims__(kParts, 1, 1) __launch_bounds__((kMaxCollapseWarps + kMixerWarps) * kWarp)
    finish_kernel(HyperPreParams p, const float* partial, int slices, int warps) {
  __shared__ float square[kParts * kMaxCollapseWarps];
  __shared__ MixerShared mixer_shared;
  start_next();
  cluster_arrive();
  const int64_t row = blockIdx.x / kParts;
  const int warp = threadIdx.x / kWarp, n = p.streams, sums = sums_of(n);
  partial += row * sums * slices;
  if (warp >= warps) {
    const bool mixes = blockIdx.x % kParts == 0;
    if (mixes) load_mixer_weights(p, threadIdx.x - warps * kWarp, mixer_shared);
    wait_for_previous();
    cluster_wait();
    cluster_arrive();
    if (mixes) mixer<kN>(p, row, partial, slices, warp - warps, mixer_shared);
    cluster_wait();
    return;
  }
  const Collapse c =
      part_of(p.x + row * n * p.hidden, p.norm_weight, p.y + row * p.hidden, p.streams, p.hidden);
  const int64_t at = 4 * (static_cast<int64_t>(c.first) + threadIdx.x);
  const bool has = static_cast<int>(threadIdx.x) < c.quads;
  const float4 weight = load_quad<kVector>(p.norm_weight + at, has ? p.hidden - at : 0);
  const float scale = p.scale[0];
  float base[kN];
#pragma unroll
  for (int i = 0; i < kN; ++i) base[i] = i < n ? p.base[i] : 0.0f;
  wait_for_previous();
  const Streams<kN> mine = load_streams<kN, kVector>(c, threadIdx.x);
  float s[kN], square_sum[1], pre[kN];
  add_slices<kN>(partial, slices, 0, 1, n, s);
  add_slices<1>(partial, slices, sums - 1, 1, sums, square_sum);
  const float r = rsqrtf(square_sum[0] / static_cast<float>(static_cast<int64_t>(n) * p.hidden) + p.rms_eps);
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    pre[i] = i < n ? sigmoid(fmaf(scale, s[i] * r, base[i])) + p.hc_eps : 0.0f;
  }
  collapse<kN, kVector>(c, mine, weight, pre, p.rms_eps, square, warps);
}

// The same for many rows, which fill the device without clusters: a block for each row, kRowQuads quads a thread.
constexpr int kRowWarps = 8, kRowThreads = kRowWarps * kWarp, kRowQuads = 4;

__device__ __forceinline__ void sync_row_warps() {
  __syncwarp();
  asm volatile("bar.sync 2, %0;" ::"n"(kRowThreads) : "memory");
}

__global__ void __launch_bounds__(kRowThreads + kMixerWarps * kWarp)
    finish_rows_kernel(HyperPreParams p, const float* partial, int slices) {
  constexpr int kN = 4;
  __shared__ float square[kRowWarps];
  __shared__ MixerShared mixer_shared;
  start_next();
  const int64_t row = blockIdx.x;
  const int warp = threadIdx.x / kWarp, sums = sums_of(kN);
  partial += row * sums * slices;
  if (warp >= kRowWarps) {
    load_mixer_weights(p, threadIdx.x - kRowThreads, mixer_shared);
    wait_for_previous();
    mixer<kN>(p, row, partial, slices, warp - kRowWarps, mixer_shared);
    return;
  }
  const float scale = p.scale[0];
  float base[kN];
#pragma unroll
  for (int i = 0; i < kN; ++i) base[i] = p.base[i];
  wait_for_previous();
  const Collapse c{
      p.x + row * kN * p.hidden, p.norm_weight, p.y + row * p.hidden, kN, p.hidden, 0, p.hidden / 4};
  Streams<kN> x[kRowQuads];
#pragma unroll
  for (int q = 0; q < kRowQuads; ++q) x[q] = load_streams<kN, true>(c, q * kRowThreads + threadIdx.x);
  float s[kN], square_sum[1], pre[kN];
  add_slices<kN>(partial, slices, 0, 1, kN, s);
  add_slices<1>(partial, slices, sums - 1, 1, sums, square_sum);
  const float flat_r =
      rsqrtf(square_sum[0] / static_cast<float>(static_cast<int64_t>(kN) * p.hidden) + p.rms_eps);
#pragma unroll
  for (int i = 0; i < kN; ++i) pre[i] = sigmoid(fmaf(scale, s[i] * flat_r, base[i])) + p.hc_eps;
  float4 y[kRowQuads];
  float sum = 0;
#pragma unroll
  for (int q = 0; q < kRowQuads; ++q) {
    y[q] = mixed<kN>(x[q], pre, kN);
    sum = plus_dot(sum, y[q], y[q]);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) square[warp] = sum;
  sync_row_warps();
  float total = square[0];
#pragma unroll
  for (int w = 1; w < kRowWarps; ++w) total += square[w];
  const float r = rsqrtf(total / static_cast<float>(p.hidden) + p.rms_eps);
#pragma unroll
  for (int q = 0; q < kRowQuads; ++q) {
    const int64_t at = 4 * static_cast<int64_t>(q * kRowThreads + threadIdx.x), left = p.hidden - at;
    const float4 v = y[q], w = load_quad<true>(p.norm_weight + at, left);
    store_quad<true>(c.y + at, make_float4(v.x * r * w.x, v.y * r * w.y, v.z * r * w.z, v.w * r * w.w), left);
  }
}

template <int kN, bool kVector>
__global__ void __cluster_dims__(kParts, 1, 1) __launch_bounds__(kMaxCollapseWarps* kWarp)
    head_kernel(HyperHeadParams p, int warps) {
  __shared__ float square[kParts * kMaxCollapseWarps];
  start_next();
  cluster_arrive();
  wait_for_previous();
  const int64_t row = blockIdx.x / kParts, from = p.row_index[row];
  const Collapse c =
      part_of(p.x + from * p.streams * p.hidden, p.norm_weight, p.y + row * p.hidden, p.streams, p.hidden);
  const int64_t at = 4 * (static_cast<int64_t>(c.first) + threadIdx.x);
  const bool has = static_cast<int>(threadIdx.x) < c.quads;
  const float4 weight = load_quad<kVector>(p.norm_weight + at, has ? p.hidden - at : 0);
  const Streams<kN> mine = load_streams<kN, kVector>(c, threadIdx.x);
  float share[kN];
#pragma unroll
  for (int i = 0; i < kN; ++i) share[i] = 1.0f / static_cast<float>(p.streams);
  collapse<kN, kVector>(c, mine, weight, share, p.rms_eps, square, warps);
}

static_assert(sizeof(MixerShared) + kParts * kMaxCollapseWarps * sizeof(float) <= kSharedLimit);

// Warps of a block that collapse: one quad a thread where there are enough.
int collapse_warps(int64_t hidden) {
  const int64_t quads = ((hidden + 3) / 4 + kParts - 1) / kParts;
  return static_cast<int>(std::min<int64_t>((quads + kWarp - 1) / kWarp, kMaxCollapseWarps));
}

void check_pre(const HyperPreParams& p) {
  check_streams("hyper_pre", p.streams);
  if (p.fn.out != p.streams * (p.streams + 2))
    fail_op("hyper_pre", "fn rows", p.streams * (p.streams + 2), p.fn.out);
  if (p.fn.in != static_cast<int64_t>(p.streams) * p.hidden) {
    fail_op("hyper_pre", "fn columns", static_cast<int64_t>(p.streams) * p.hidden, p.fn.in);
  }
  if (p.fn.format != WeightFormat::kF32 && p.fn.format != WeightFormat::kBF16) {
    fail_op("hyper_pre", "fn format (kF32 or kBF16)", static_cast<int64_t>(WeightFormat::kF32),
            static_cast<int64_t>(p.fn.format));
  }
}

}  // namespace

void hyper_pre(const HyperPreParams& given, Exec& exec) {
  HyperPreParams p = given;
  if (p.rows == 0) return;
  check_pre(p);
  ArenaScope scope(*exec.scratch);
  // As much for every kind of step.
  const int64_t most = (p.fn.in + kMixSlice - 1) / kMixSlice;
  float* partial = exec.scratch->take<float>(p.rows * (p.fn.out + 1) * most);
  if (exec.measure) return;
  if (p.block && !hyper_mix_posts(p, exec)) {
    hyper_post(post_before(p), exec);
    p.x = p.next;
    p.block = nullptr;
  }
  const int slices = hyper_mix_slices(p, exec);
  hyper_mix(p, partial, slices, exec);
  if (p.block) p.x = p.next;
  const bool vector =
      quads_aligned(p.x, p.hidden) && quads_aligned(p.y, p.hidden) && quads_aligned(p.norm_weight, p.hidden);
  if (exec.tensor_cores && p.streams == 4 && vector && p.hidden <= 4 * kRowQuads * kRowThreads) {
    launch("hyper_pre", finish_rows_kernel, static_cast<unsigned>(p.rows), kRowThreads + kMixerWarps * kWarp,
           0, exec, p, static_cast<const float*>(partial), slices);
    return;
  }
  const auto finish = p.streams == 4 ? (vector ? finish_kernel<4, true> : finish_kernel<4, false>)
                                     : (vector ? finish_kernel<8, true> : finish_kernel<8, false>);
  const int warps = collapse_warps(p.hidden);
  launch("hyper_pre", finish, static_cast<unsigned>(p.rows) * kParts, (warps + kMixerWarps) * kWarp, 0, exec,
         p, static_cast<const float*>(partial), slices, warps);
}

void hyper_head(const HyperHeadParams& p, Exec& exec) {
  if (exec.measure || p.rows == 0) return;
  check_streams("hyper_head", p.streams);
  const bool vector =
      quads_aligned(p.x, p.hidden) && quads_aligned(p.y, p.hidden) && quads_aligned(p.norm_weight, p.hidden);
  const auto kernel = p.streams == 4 ? (vector ? head_kernel<4, true> : head_kernel<4, false>)
                                     : (vector ? head_kernel<8, true> : head_kernel<8, false>);
  const int warps = collapse_warps(p.hidden);
  launch("hyper_head", kernel, static_cast<unsigned>(p.rows) * kParts, warps * kWarp, 0, exec, p, warps);
}

}  // namespace rocket::cuda
