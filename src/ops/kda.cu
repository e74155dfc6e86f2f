// KDA around the recurrence: convolution, gates, gated norm. All of them are short in decode: one launch each, every
// thread with a few 16-byte loads in flight, weights read before the kernel in front is done.
#include <algorithm>

#include "ops/cuda.cuh"
#include "ops/cuda_ops.h"
#include "ops/kda.cuh"
#include "ops/quad.cuh"

namespace rocket::cuda {
namespace {

constexpr int kThreads = 64;  // few, so that one row reaches many multiprocessors
constexpr int kMaxTaps = 8;

unsigned blocks(int64_t items, int64_t each) {
  return static_cast<unsigned>((items + each - 1) / each);
}

// --- convolution ---

// Four channels of one thread: the taps' weights and a window of raw rows, oldest first. kTaps = 0: any number.
template <int kTaps, bool kVector>
struct ConvQuad {
  static constexpr int kRoom = kTaps ? kTaps : kMaxTaps;
  const KdaConvParams& p;
  int64_t at, left;  // first channel, channels from there on
  float4 weight[kRoom];
  float4 u[kRoom];

  __device__ __forceinline__ int taps() const { return kTaps ? kTaps : p.taps; }

  __device__ __forceinline__ void load_weights() {
#pragma unroll
    for (int j = 0; j < kRoom; ++j) {
      if (j < taps())
        weight[j] = load_quad<kVector>(p.weight + static_cast<int64_t>(j) * p.channels + at, left);
    }
  }
  __device__ __forceinline__ float4 raw(int64_t row) const {
    return load_quad<kVector>(p.x + row * p.ldx + at, left);
  }
  // u[0 …] = rows from `row` on, `count` of them.
  __device__ __forceinline__ void load_rows(int64_t row, int count) {
#pragma unroll
    for (int j = 0; j < kRoom; ++j) {
      if (j < count) u[j] = raw(row + j);
    }
  }
  __device__ __forceinline__ void load_tail(const float* tail) {
#pragma unroll
    for (int j = 0; j < kRoom; ++j) {
      if (j < taps() - 1) u[j] = load_quad<kVector>(tail + static_cast<int64_t>(j) * p.channels + at, left);
    }
  }
  // The window's rows from the one at `from` on become a tail.
  template <int kFrom>
  __device__ __forceinline__ void store_tail(float* tail) const {
#pragma unroll
    for (int j = 0; j + kFrom < kRoom; ++j) {
      if (j < taps() - 1)
        store_quad<kVector>(tail + static_cast<int64_t>(j) * p.channels + at, u[j + kFrom], left);
    }
  }
  // The output of the window's last row, and a checkpoint if one is asked for.
  __device__ __forceinline__ void finish(int64_t row) const {
    float4 s =
        make_float4(weight[0].x * u[0].x, weight[0].y * u[0].y, weight[0].z * u[0].z, weight[0].w * u[0].w);
#pragma unroll
    for (int j = 1; j < kRoom; ++j) {
      if (j >= taps()) break;
      s = make_float4(fmaf(weight[j].x, u[j].x, s.x), fmaf(weight[j].y, u[j].y, s.y),
                      fmaf(weight[j].z, u[j].z, s.z), fmaf(weight[j].w, u[j].w, s.w));
    }
    s = make_float4(s.x * sigmoid(s.x), s.y * sigmoid(s.y), s.z * sigmoid(s.z), s.w * sigmoid(s.w));
    store_quad<kVector>(p.y + row * p.ldy + at, s, left);
    float* checkpoint = p.checkpoint ? p.checkpoint[row] : nullptr;
    if (checkpoint) store_tail<1>(checkpoint);
  }
  // u[taps-1] = the next row, before the window moves on.
  __device__ __forceinline__ void put_last(float4 v) {
#pragma unroll
    for (int j = 0; j < kRoom; ++j) {
      if (j == taps() - 1) u[j] = v;
    }
  }
  __device__ __forceinline__ void shift() {
#pragma unroll
    for (int j = 0; j + 1 < kRoom; ++j) u[j] = u[j + 1];
  }
};

// The rows of a segment that see its tail, up to taps-1 of them, and then the tail itself. One thread does all this for
// its channels, so nobody else reads the tail that it overwrites.
template <int kTaps, bool kVector>
__device__ __forceinline__ void conv_start(ConvQuad<kTaps, kVector>& quad, const Segment& segment,
                                           float* tail) {
  const int seen = min(segment.rows, quad.taps() - 1);
  quad.load_tail(tail);
  for (int t = 0; t < seen; ++t) {
    quad.put_last(quad.raw(segment.first_row + t));
    quad.finish(segment.first_row + t);
    quad.shift();
  }
  if (segment.rows > seen)
    quad.load_rows(segment.first_row + segment.rows - (quad.taps() - 1), quad.taps() - 1);
  quad.template store_tail<0>(tail);
}

template <int kTaps, bool kVector>
__global__ void __launch_bounds__(kThreads) conv_kernel(KdaConvParams p, int rows_per_block) {
  start_next();
  const int64_t at = 4 * (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x);
  ConvQuad<kTaps, kVector> quad{p, at, p.channels - at, {}, {}};
  quad.load_weights();
  wait_for_previous();
  if (quad.left <= 0) return;
  const int begin = blockIdx.y * rows_per_block;
  int index = find_segment(p.segment, p.segments, begin);
  for (int row = begin; row < begin + rows_per_block; ++row) {
    while (index + 1 < p.segments && p.segment[index + 1].rows > 0 && p.segment[index + 1].first_row <= row)
      ++index;
    const Segment segment = p.segment[index];
    const int t = row - segment.first_row;
    if (t < 0 || t >= segment.rows) return;  // behind the last row of the step
    if (t == 0) {
      conv_start(quad, segment, p.tail[index]);
    } else if (t >= quad.taps() - 1) {
      quad.load_rows(row - (quad.taps() - 1), quad.taps());
      quad.finish(row);
    }
  }
}

// --- gates ---

// The first `quads` blocks of a row have four channels a thread, of one head (kVector) or of several; the rest have
// beta.
template <bool kVector>
__global__ void __launch_bounds__(kThreads) gates_kernel(KdaGatesParams p, int quad_blocks) {
  start_next();
  const int64_t row = blockIdx.y, width = static_cast<int64_t>(p.heads) * p.head_dim;
  if (blockIdx.x >= quad_blocks) {
    wait_for_previous();
    const int head = (blockIdx.x - quad_blocks) * kThreads + threadIdx.x;
    if (head < p.heads) p.beta[row * p.heads + head] = sigmoid(p.b[row * p.heads + head]);
    return;
  }
  const int64_t at = 4 * (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x), left = width - at;
  const float4 bias = load_quad<kVector>(p.dt_bias + at, left);
  float a[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < left) a[i] = expf(p.a_log[(static_cast<int>(at) + (kVector ? 0 : i)) / p.head_dim]);
  }
  wait_for_previous();
  const float4 f = load_quad<kVector>(p.f + row * width + at, left);
  const float4 g = make_float4(kda_decay(p, f.x + bias.x, a[0]), kda_decay(p, f.y + bias.y, a[1]),
                               kda_decay(p, f.z + bias.z, a[2]), kda_decay(p, f.w + bias.w, a[3]));
  store_quad<kVector>(p.g + row * width + at, g, left);
}

// --- gated norm ---

// A warp for each row and head. kQuad: Dv is 128, a quad for each lane; else any Dv, a lane takes every 32nd element.
template <bool kQuad>
__global__ void __launch_bounds__(kThreads) gated_norm_kernel(GatedNormParams p) {
  start_next();
  const int lane = threadIdx.x % kWarp;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  const int64_t base = item * p.head_dim;
  float4 w = make_float4(0, 0, 0, 0);
  if constexpr (kQuad) w = load_quad<true>(p.weight + 4 * lane, 4);
  wait_for_previous();
  if (item >= static_cast<int64_t>(p.rows) * p.heads) return;
  const float dim = static_cast<float>(p.head_dim);
  if constexpr (kQuad) {
    const float4 o = load_quad<true>(p.o + base + 4 * lane, 4);
    const float4 gate = load_quad<true>(p.gate + base + 4 * lane, 4);
    const float r = rsqrtf(warp_sum(plus_dot(0, o, o)) / dim + p.eps);
    store_quad<true>(p.y + base + 4 * lane,
                     make_float4(kda_gated(o.x, r, w.x, gate.x), kda_gated(o.y, r, w.y, gate.y),
                                 kda_gated(o.z, r, w.z, gate.z), kda_gated(o.w, r, w.w, gate.w)),
                     4);
  } else {
    float squares = 0;
    for (int i = lane; i < p.head_dim; i += kWarp) squares = fmaf(p.o[base + i], p.o[base + i], squares);
    const float r = rsqrtf(warp_sum(squares) / dim + p.eps);
    for (int i = lane; i < p.head_dim; i += kWarp)
      p.y[base + i] = kda_gated(p.o[base + i], r, p.weight[i], p.gate[base + i]);
  }
}

}  // namespace

void kda_conv(const KdaConvParams& p, Exec& exec) {
  if (p.taps < 2 || p.taps > kMaxTaps) fail_op("kda_conv", "taps, 2 to", kMaxTaps, p.taps);
  if (exec.measure || p.rows == 0) return;
  const bool vector = p.taps == 4 && quads_aligned(p.x, p.ldx) && quads_aligned(p.y, p.ldy) &&
                      quads_aligned(p.weight, p.channels) && p.tail.offset % 4 == 0 &&
                      p.checkpoint.offset % 4 == 0;  // blocks themselves are aligned, as all allocations are
  const int rows_per_block = p.rows <= 64 ? 1 : 8;
  const dim3 grid(blocks((p.channels + 3) / 4, kThreads), blocks(p.rows, rows_per_block));
  launch("kda_conv", vector ? conv_kernel<4, true> : conv_kernel<0, false>, grid, kThreads, 0, exec, p,
         rows_per_block);
}

void kda_gates(const KdaGatesParams& p, Exec& exec) {
  if (exec.measure || p.rows == 0) return;
  const bool vector =
      p.head_dim % 4 == 0 && quads_aligned(p.f, 4) && quads_aligned(p.g, 4) && quads_aligned(p.dt_bias, 4);
  const int64_t width = static_cast<int64_t>(p.heads) * p.head_dim;
  const unsigned quads = blocks((width + 3) / 4, kThreads);
  const dim3 grid(quads + blocks(p.heads, kThreads), static_cast<unsigned>(p.rows));
  launch("kda_gates", vector ? gates_kernel<true> : gates_kernel<false>, grid, kThreads, 0, exec, p,
         static_cast<int>(quads));
}

void gated_norm(const GatedNormParams& p, Exec& exec) {
  if (exec.measure || p.rows == 0) return;
  const bool quad = p.head_dim == 4 * kWarp && quads_aligned(p.o, 4) && quads_aligned(p.gate, 4) &&
                    quads_aligned(p.weight, 4) && quads_aligned(p.y, 4);
  const unsigned grid = blocks(static_cast<int64_t>(p.rows) * p.heads, kThreads / kWarp);
  launch("gated_norm", quad ? gated_norm_kernel<true> : gated_norm_kernel<false>, grid, kThreads, 0, exec, p);
}

}  // namespace rocket::cuda
