#include "ops/indexer.cuh"
#include "ops/tf32.cuh"

namespace rocket::cuda {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * kWarp;
constexpr int kWarpPools = 16;  // of a warp at a time
constexpr int kTile = kWarps * kWarpPools;
constexpr int kBlocks = 3;  // of a multiprocessor: enough loads under way, without spills
constexpr int kHeads = 32;  // of a warp at a time
constexpr int kMaxDim = 128, kGroups = kMaxDim / 16;

__device__ __forceinline__ void store_score(const IndexSelectParams& p, const IndexScores& out, int row,
                                            int pool, float score) {
  out.score[(row - out.first_row) * out.ld + pool] = score;
  if (p.score) p.score[row * p.ldscore + pool] = score;
}
__device__ __forceinline__ float relu(float x) {
  return x < 0 ? 0 : x;
}  // a NaN passes

// Queries in shared memory, cut into pieces; so far apart, lanes read them from all banks.
__host__ __device__ __forceinline__ int query_stride(int dim) {
  return dim % 32 == 16 ? dim : dim + 16;
}

// Pool indices fit into 32 bits, which are quicker to divide.
__device__ __forceinline__ const float* key_row(const PagedRows& pooled, int pool) {
  const uint32_t index = pool, rows = pooled.page_rows, page = index / rows;
  return pooled.page[page] + pooled.offset + static_cast<int64_t>(index - page * rows) * pooled.width;
}

// By tensor cores with float32's precision: each warp has 16 pools at a time, whose keys it reads straight into registers,
// and all heads. Rows' bits do not depend on the grid.
__global__ void __launch_bounds__(kThreads, kBlocks)
    score_kernel(const __grid_constant__ IndexSelectParams p, const IndexScores out) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int stride = query_stride(p.dim), quads = p.dim / 4;
  uint32_t* high = reinterpret_cast<uint32_t*>(memory);  // [heads, stride]
  uint32_t* low = high + p.heads * stride;               // [heads, stride]
  float* weight = reinterpret_cast<float*>(low + p.heads * stride);
  wait_for_previous();
  start_next();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, j = lane % 4;
  const int row = out.first_row + blockIdx.y, index = find_segment(p.segment, p.segments, row);
  const int pools = visible_pools(p, p.segment[index], row);
  if (!scores_wanted(p, pools) || static_cast<int>(blockIdx.x) * kTile >= pools) return;
  const PagedRows pooled = p.pooled[index];
  for (int i = threadIdx.x; i < p.heads * quads; i += kThreads) {
    const float4 x = reinterpret_cast<const float4*>(p.q + row * p.ldq)[i];
    uint4 h, l;
    cut(x.x, h.x, l.x);
    cut(x.y, h.y, l.y);
    cut(x.z, h.z, l.z);
    cut(x.w, h.w, l.w);
    const int at = i / quads * stride + i % quads * 4;
    *reinterpret_cast<uint4*>(high + at) = h;
    *reinterpret_cast<uint4*>(low + at) = l;
  }
  for (int h = threadIdx.x; h < p.heads; h += kThreads) {
    weight[h] = p.head_weight[row * p.ldw + h] * p.head_weight_scale;
  }
  __syncthreads();

#pragma unroll 1
  for (int first = blockIdx.x * kTile + warp * kWarpPools; first < pools; first += gridDim.x * kTile) {
    float4 key[2][kGroups];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int pool = first + g + 8 * half;
      const float* from = pool < pools ? key_row(pooled, pool) + 4 * j : nullptr;
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        key[half][i] = make_float4(0, 0, 0, 0);
        if (from && 16 * i < p.dim) key[half][i] = *reinterpret_cast<const float4*>(from + 16 * i);
      }
    }
    float sum[2] = {};
#pragma unroll 1
    for (int head = 0; head < p.heads; head += kHeads) {
      float large[kHeads / 8][4] = {}, small[kHeads / 8][4] = {};
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        if (16 * i >= p.dim) break;
        const CutQuads k(key[0][i], key[1][i]);
#pragma unroll
        for (int n = 0; n < kHeads / 8; ++n) {
          const int at = (head + 8 * n + g) * stride + 16 * i + 4 * j;
          const uint4 h = *reinterpret_cast<const uint4*>(high + at);
          const uint4 l = *reinterpret_cast<const uint4*>(low + at);
          multiply_tf32(small[n], k.low[0], h.x, h.y);
          multiply_tf32(large[n], k.high[0], h.x, h.y);
          multiply_tf32(small[n], k.high[0], l.x, l.y);
          multiply_tf32(large[n], k.high[1], h.z, h.w);
          multiply_tf32(small[n], k.low[1], h.z, h.w);
          multiply_tf32(small[n], k.high[1], l.z, l.w);
        }
      }
#pragma unroll
      for (int n = 0; n < kHeads / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float dot = large[n][c] + small[n][c];
          sum[c / 2] = fmaf(weight[head + 8 * n + 2 * j + c % 2], relu(dot * p.scale), sum[c / 2]);
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
      const int pool = first + g + 8 * half;
      if (j == 0 && pool < pools) store_score(p, out, row, pool, sum[half]);
    }
  }
}

// Any shape: a thread for each pool.
__global__ void __launch_bounds__(kThreads)
    score_any_kernel(const __grid_constant__ IndexSelectParams p, const IndexScores out) {
  wait_for_previous();
  start_next();
  const int row = out.first_row + blockIdx.y;
  const int index = find_segment(p.segment, p.segments, row);
  const int pools = visible_pools(p, p.segment[index], row);
  if (!scores_wanted(p, pools)) return;
  const PagedRows pooled = p.pooled[index];
  const float *q = p.q + row * p.ldq, *weight = p.head_weight + row * p.ldw;
  for (int pool = blockIdx.x * kThreads + threadIdx.x; pool < pools; pool += gridDim.x * kThreads) {
    const float* key = pooled.row(pool);
    float score = 0;
    for (int h = 0; h < p.heads; ++h) {
      float dot = 0;
      for (int d = 0; d < p.dim; ++d) dot = fmaf(q[static_cast<int64_t>(h) * p.dim + d], key[d], dot);
      score = fmaf(weight[h] * p.head_weight_scale, relu(dot * p.scale), score);
    }
    store_score(p, out, row, pool, score);
  }
}

size_t score_bytes(const IndexSelectParams& p) {
  return sizeof(float) * (2 * int64_t{p.heads} * query_stride(p.dim) + p.heads);
}

bool fast_scores(const IndexSelectParams& p) {
  const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  return p.heads % kHeads == 0 && p.dim % 16 == 0 && p.dim <= kMaxDim && score_bytes(p) <= kSharedLimit &&
         p.ldq % 4 == 0 && aligned(p.q) && p.pooled.offset % 4 == 0;
}

}  // namespace

void index_scores(const IndexSelectParams& p, const IndexScores& scores, int rows, Exec& exec) {
  const bool fast = fast_scores(p);
  const int tile = fast ? kTile : kThreads;
  const int tiles = (p.max_pools + tile - 1) / tile;
  // Blocks beyond what fits on the device at once would only cost launches where contexts are short.
  const int most = (kBlocks * exec.cuda->sm_count + rows - 1) / rows;
  const dim3 grid(static_cast<unsigned>(tiles < most ? tiles : most), static_cast<unsigned>(rows));
  if (fast) {
    launch("index_select", score_kernel, grid, kThreads, score_bytes(p), exec, p, scores);
  } else {
    launch("index_select", score_any_kernel, grid, kThreads, 0, exec, p, scores);
  }
}

}  // namespace rocket::cuda
