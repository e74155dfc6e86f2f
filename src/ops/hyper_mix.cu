// The products with fn, spread over the whole device: a block has one slice of the flattened axis.
#include "ops/cuda.cuh"
#include "ops/hyper_connection.cuh"
#include "ops/quad.cuh"

namespace rocket::cuda {
namespace {

constexpr int kSlice = 4 * kWarp;  // columns of a slice that a warp reads at once
constexpr int kMixWarps = 8;       // and one that sums the squares
constexpr int kOutputs = 3;        // of a warp
constexpr int kRowsAtOnce = 4;

// The sums over all lanes of four values, in the tree of warp_sum; lane l gets value l / 8.
__device__ __forceinline__ float warp_sum4(const float (&v)[4], int lane) {
  constexpr unsigned kAll = 0xffffffffu;
  const bool high = lane & 16, odd = lane & 8;
  const float a = (high ? v[2] : v[0]) + __shfl_xor_sync(kAll, high ? v[0] : v[2], 16);
  const float b = (high ? v[3] : v[1]) + __shfl_xor_sync(kAll, high ? v[1] : v[3], 16);
  float s = (odd ? b : a) + __shfl_xor_sync(kAll, odd ? a : b, 8);
#pragma unroll
  for (int step = 4; step > 0; step /= 2) s += __shfl_xor_sync(kAll, s, step);
  return s;
}

// What x' of one row is made of in four columns of one of four streams, but for the block's output.
struct Before {
  float4 old[4];
  float post, comb[4];
  __device__ __forceinline__ void load(const HyperPreParams& p, int64_t row, int stream, int64_t column) {
    const float* x = p.x + row * 4 * p.hidden + column;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      old[m] = *reinterpret_cast<const float4*>(x + int64_t{m} * p.hidden);
      comb[m] = p.comb[row * 16 + 4 * m + stream];
    }
    post = p.post[row * 4 + stream];
  }
  // x', in the order of hyper_post.cu.
  __device__ __forceinline__ float4 add(const float4& block) const {
    float4 sum = scaled(post, block);
#pragma unroll
    for (int m = 0; m < 4; ++m) sum = plus_scaled(sum, comb[m], old[m]);
    return sum;
  }
};

// partial[row][sum][slice]. A slice is kChunks * kSlice columns. kPost: x' is worked out first, by each warp for itself,
// and stored by the one that sums the squares; a slice then lies within one of four streams. `early`: a single row's x,
// post and comb may be read before the wait.
template <bool kBf16, bool kVector, int kChunks, bool kPost, int kBatch>
__global__ void __launch_bounds__((kMixWarps + 1) * kWarp)
    mix_kernel(HyperPreParams p, float* partial, int slices, int rows_per_block, bool early) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int sums = sums_of(p.streams);
  const int64_t flat = static_cast<int64_t>(p.streams) * p.hidden;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kChunks * kSlice + 4 * lane;
  const int first = (blockIdx.y * kMixWarps + warp) * kOutputs;
  const bool squares = warp == kMixWarps;
  const int outputs = squares ? 0 : min(kOutputs, sums - 1 - first);
  start_next();
  float4 w[kOutputs][kChunks];
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int64_t at = column + c * kSlice;
      w[o][c] = load_stored_quad<kBf16, kVector>(static_cast<const unsigned char*>(p.fn.data),
                                                 (first + o) * flat + at, o < outputs ? flat - at : 0);
    }
  }
  const int stream = kPost ? static_cast<int>(blockIdx.x) * kSlice / p.hidden : 0;
  const int64_t in_stream = column - int64_t{stream} * p.hidden;
  Before before[kBatch];
  if (kPost && kBatch == 1 && early) before[0].load(p, 0, stream, in_stream);
  wait_for_previous();
  if (squares ? blockIdx.y > 0 : outputs <= 0) return;
  const int begin = blockIdx.z * rows_per_block, end = min(p.rows, begin + rows_per_block);
  for (int row = begin; row < end; row += kBatch) {
    float s[kOutputs][kBatch] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int64_t at = column + c * kSlice;
      float4 x[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if constexpr (kPost) {
          x[b] = make_float4(0, 0, 0, 0);
          if (row + b >= end) continue;
          if (kBatch > 1 || !early) before[b].load(p, row + b, stream, in_stream);
          x[b] = before[b].add(
              *reinterpret_cast<const float4*>(p.block + (row + b) * int64_t{p.hidden} + in_stream));
          if (squares) *reinterpret_cast<float4*>(p.next + (row + b) * flat + at) = x[b];
        } else {
          x[b] = load_quad<kVector>(p.x + (row + b) * flat + at, row + b < end ? flat - at : 0);
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (squares) {
          s[0][b] = plus_dot(s[0][b], x[b], x[b]);
        } else {
#pragma unroll
          for (int o = 0; o < kOutputs; ++o) s[o][b] = plus_dot(s[o][b], x[b], w[o][c]);
        }
      }
    }
    const int to = row + lane / 8;
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
      if (squares && o > 0) break;
      float four[4] = {};
#pragma unroll
      for (int b = 0; b < kBatch; ++b) four[b] = s[o][b];
      const float total = warp_sum4(four, lane);
      const int sum = squares ? sums - 1 : first + o;
      if (lane % 8 == 0 && to < end && (squares || o < outputs)) {
        partial[(static_cast<int64_t>(to) * sums + sum) * slices + blockIdx.x] = total;
      }
    }
  }
}

bool mix_aligned(const HyperPreParams& p) {
  return quads_aligned(p.x, p.fn.in) && quads_aligned(p.fn.data, p.fn.in);
}

template <bool kBf16, int kChunks>
void launch_mix(const HyperPreParams& p, float* partial, int slices, Exec& exec) {
  const auto kernel = p.block && p.rows == 1 ? mix_kernel<kBf16, true, 1, true, 1>
                      : p.block              ? mix_kernel<kBf16, true, 1, true, kRowsAtOnce>
                      : mix_aligned(p)       ? mix_kernel<kBf16, true, kChunks, false, kRowsAtOnce>
                                             : mix_kernel<kBf16, false, kChunks, false, kRowsAtOnce>;
  // Few rows: a block for each batch of rows. Many: fewer blocks, so that each reads its weights for more rows.
  const int rows_per_block = p.rows <= 64 ? kRowsAtOnce : 4 * kRowsAtOnce;
  const int groups = (p.streams * (p.streams + 2) + kMixWarps * kOutputs - 1) / (kMixWarps * kOutputs);
  const dim3 grid(static_cast<unsigned>(slices), static_cast<unsigned>(groups),
                  static_cast<unsigned>((p.rows + rows_per_block - 1) / rows_per_block));
  launch("hyper_pre", kernel, grid, (kMixWarps + 1) * kWarp, 0, exec, p, partial, slices, rows_per_block,
         exec.cuda->behind_fence);
}

}  // namespace

bool hyper_mix_posts(const HyperPreParams& p, const Exec& exec) {
  return !exec.tensor_cores && p.streams == 4 && p.hidden % kSlice == 0 && mix_aligned(p) &&
         quads_aligned(p.block, p.hidden) && quads_aligned(p.next, p.hidden);
}

int hyper_mix_slices(const HyperPreParams& p, const Exec& exec) {
  const int64_t slice = exec.tensor_cores ? kTensorSlice : kMixSlice;
  return static_cast<int>((p.fn.in + slice - 1) / slice);
}

void hyper_mix(const HyperPreParams& p, float* partial, int slices, Exec& exec) {
  if (exec.tensor_cores && hyper_mix_tensor(p, partial, slices, exec)) return;
  static_assert(kSlice == kMixSlice);
  constexpr int kLong = kTensorSlice / kSlice;
  const bool bf16 = p.fn.format == WeightFormat::kBF16;
  const auto mix = exec.tensor_cores ? (bf16 ? launch_mix<true, kLong> : launch_mix<false, kLong>)
                                     : (bf16 ? launch_mix<true, 1> : launch_mix<false, 1>);
  mix(p, partial, slices, exec);
}

}  // namespace rocket::cuda
