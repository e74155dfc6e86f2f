// Attention of many rows by tensor cores: queries, latents and weights rounded to bfloat16, sums in float32.
//
// A block has a row and 64 heads. Its tokens pass through shared memory in tiles, the next one arriving while one is
// worked on. Eight warps: four groups of 16 heads times two halves. For logits a half is half of the width, whose
// queries stay in registers, and halves exchange their sums; then both have the weights where the product with the
// values wants them, and a half is half of the values' dimensions.
#include <cuda_bf16.h>

#include "ops/mla.cuh"
#include "ops/mma.cuh"

namespace rocket::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kHeads = 64, kTile = 32, kDim = 512;  // heads of a block, tokens of a tile, width and value_dim
constexpr int kStride = kDim + 8;                   // of tokens in shared memory: ldmatrix meets all banks
constexpr int kHalf = kDim / 2, kSteps = kHalf / 16, kColumns = kHalf / 8;
constexpr int kGroups = kTile / 8;    // of tokens, as wide as a product's result
constexpr int kOwn = kTile / kWarps;  // tokens of a tile that a warp loads

struct Shared {
  __align__(16) uint16_t tile[2][kTile * kStride];
  float4 part[kWarps][kGroups][kWarp];
};
static_assert(sizeof(Shared) <= kSharedLimit);

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Where a warp's tokens of coming tiles lie. Lane j has the warp's token j % kOwn. An address is looked up one tile before
// its tile is loaded, a token's id two tiles before, so that neither is waited for.
template <bool kBf16>
struct Ahead {
  const int32_t* list;
  int count;
  const PagedRows& cache;
  int token = -1;
  const char* row = nullptr;

  __device__ __forceinline__ int token_at(int tile) const {
    const int i = tile * kTile + threadIdx.x / kWarp + kWarps * (threadIdx.x % kOwn);
    return i < count ? list[i] : -1;
  }
  __device__ __forceinline__ const char* row_of(int t) const {
    return t < 0 ? nullptr : latent_row(cache, kBf16, t);
  }
  // Brings the tile to shared memory, zeros behind the last token.
  __device__ __forceinline__ void load(int tile, uint16_t* to) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const char* from = reinterpret_cast<const char*>(
          __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(row), j));
      uint16_t* out = to + (warp + kWarps * j) * kStride;
#pragma unroll
      for (int i = 0; i < kDim / 8 / kWarp; ++i) {
        const int piece = lane + i * kWarp;
        if (!from) {
          reinterpret_cast<uint4*>(out)[piece] = make_uint4(0, 0, 0, 0);
        } else if constexpr (kBf16) {
          copy_async(out + 8 * piece, from + 16 * piece);
        } else {
          const float4 a = reinterpret_cast<const float4*>(from)[2 * piece];
          const float4 b = reinterpret_cast<const float4*>(from)[2 * piece + 1];
          reinterpret_cast<uint4*>(out)[piece] =
              make_uint4(pack(a.x, a.y), pack(a.z, a.w), pack(b.x, b.y), pack(b.z, b.w));
        }
      }
    }
    commit_copies();
    row = row_of(token);
    token = token_at(tile + 2);
  }
};

// The queries of 16 heads from `head` on, half of their width, as a product takes them.
__device__ __forceinline__ void load_queries(uint32_t (&q)[kSteps][4], const SparseMlaParams& p, int row,
                                             int head, int column) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int h = head + lane / 4 + i % 2 * 8, c = column + 16 * s + i / 2 * 8 + lane % 4 * 2;
      float2 x = make_float2(0, 0);
      if (h < p.heads) {
        x = *reinterpret_cast<const float2*>(p.q + row * p.ldq + static_cast<int64_t>(h) * kDim + c);
      }
      q[s][i] = pack(x.x, x.y);
    }
  }
}

// c[g] += queries times the tile's tokens of group g, over half of the width.
__device__ __forceinline__ void logits(float (&c)[kGroups][4], const uint32_t (&q)[kSteps][4],
                                       const uint16_t* tile, int column) {
  const int lane = threadIdx.x % kWarp;
  const uint32_t at = shared_address(tile + (lane / 16 * 8 + lane % 8) * kStride + column + lane / 8 % 2 * 8);
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int g = 0; g < kGroups; g += 2) {
      uint32_t b[4];
      load_matrices(b, at + (g * 8 * kStride + 16 * s) * 2);
      multiply_add(c[g], q[s], b[0], b[1]);
      multiply_add(c[g + 1], q[s], b[2], b[3]);
    }
  }
}

// o[n] += weights times the tile's values, half of the dimensions.
__device__ __forceinline__ void values(float (&o)[kColumns][4], const float (&weight)[kGroups][4],
                                       const uint16_t* tile, int column) {
  const int lane = threadIdx.x % kWarp;
  const uint32_t at = shared_address(tile + (lane / 8 % 2 * 8 + lane % 8) * kStride + column + lane / 16 * 8);
#pragma unroll
  for (int s = 0; s < kTile / 16; ++s) {
    const uint32_t a[4] = {pack(weight[2 * s][0], weight[2 * s][1]), pack(weight[2 * s][2], weight[2 * s][3]),
                           pack(weight[2 * s + 1][0], weight[2 * s + 1][1]),
                           pack(weight[2 * s + 1][2], weight[2 * s + 1][3])};
#pragma unroll
    for (int n = 0; n < kColumns; n += 2) {
      uint32_t b[4];
      load_transposed(b, at + (s * 16 * kStride + n * 8) * 2);
      multiply_add(o[n], a, b[0], b[1]);
      multiply_add(o[n + 1], a, b[2], b[3]);
    }
  }
}

// Of the two heads whose results a thread has (lane / 4, and 8 further): the largest logit so far, and the thread's part
// of the sum of exponentials.
struct Softmax {
  float top[2] = {-INFINITY, -INFINITY};
  float total[2] = {0, 0};

  // Logits become weights relative to the new largest logit; returns by what earlier results are to be multiplied.
  __device__ __forceinline__ float2 step(float (&c)[kGroups][4], float scale, int tokens) {
    const int column = threadIdx.x % 4 * 2;
    float keep[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = -INFINITY;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = c[g][2 * half + i];
          x = g * 8 + column + i < tokens ? x * scale : -INFINITY;
          largest = fmaxf(largest, x);
        }
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const float next = fmaxf(top[half], largest);
      keep[half] = exp2f(top[half] - next);
      top[half] = next;
      float sum = 0;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = c[g][2 * half + i];
          x = exp2f(x - next);
          sum += x;
        }
      }
      total[half] = fmaf(total[half], keep[half], sum);
    }
    return make_float2(keep[0], keep[1]);
  }
};

template <bool kBf16>
__global__ void __launch_bounds__(kThreads, 1) tensor_kernel(const __grid_constant__ SparseMlaParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  wait_for_previous();
  start_next();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int row = blockIdx.y, head = blockIdx.x * kHeads + warp % 4 * 16, column = warp / 4 * kHalf;
  const int count = p.count[row];
  const PagedRows cache = p.cache[find_segment(p.segment, p.segments, row)];
  const int tiles = (count + kTile - 1) / kTile;
  float o[kColumns][4] = {};
  Softmax softmax;
  if (tiles > 0) {
    Ahead<kBf16> ahead{p.token + row * p.ldtoken, count, cache};
    ahead.row = ahead.row_of(ahead.token_at(0));
    ahead.token = ahead.token_at(1);
    ahead.load(0, s.tile[0]);
    uint32_t q[kSteps][4];
    load_queries(q, p, row, head, column);
    const float scale = p.scale * 1.44269504089f;  // weights as powers of two
#pragma unroll 1
    for (int t = 0; t < tiles; ++t) {
      wait_copies<0>();
      __syncthreads();  // the tile is there, and all are done with the one before
      if (t + 1 < tiles) ahead.load(t + 1, s.tile[(t + 1) % 2]);
      const uint16_t* tile = s.tile[t % 2];
      float c[kGroups][4] = {};
      logits(c, q, tile, column);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        s.part[warp][g][lane] = make_float4(c[g][0], c[g][1], c[g][2], c[g][3]);
      }
      __syncthreads();
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const float4 other = s.part[warp ^ 4][g][lane];
        c[g][0] += other.x;
        c[g][1] += other.y;
        c[g][2] += other.z;
        c[g][3] += other.w;
      }
      const float2 keep = softmax.step(c, scale, count - t * kTile);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        o[n][0] *= keep.x;
        o[n][1] *= keep.x;
        o[n][2] *= keep.y;
        o[n][3] *= keep.y;
      }
      values(o, c, tile, column);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = softmax.total[half];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const float share = tiles > 0 ? 1.0f / total : 0.0f;
    const int h = head + lane / 4 + 8 * half;
    if (h >= p.heads) continue;
    float* to = p.o + row * p.ldo + static_cast<int64_t>(h) * kDim + column + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      *reinterpret_cast<float2*>(to + 8 * n) =
          make_float2(o[n][2 * half] * share, o[n][2 * half + 1] * share);
    }
  }
}

}  // namespace

bool sparse_mla_tensor(const SparseMlaParams& p, Exec& exec) {
  if (p.width != kDim || p.value_dim != kDim || !aligned_rows(p.cache)) return false;
  if (p.ldq % 4 != 0 || p.ldo % 4 != 0 || !aligned16(p.q) || !aligned16(p.o)) return false;
  if (exec.measure || p.rows == 0) return true;
  const dim3 grid(static_cast<unsigned>((p.heads + kHeads - 1) / kHeads), static_cast<unsigned>(p.rows));
  launch("sparse_mla", p.cache.bf16 ? tensor_kernel<true> : tensor_kernel<false>, grid, kThreads,
         sizeof(Shared), exec, p);
  return true;
}

}  // namespace rocket::cuda
