// Attention in exact mode: a row's token list is cut into splits of fixed length, which blocks attend to on their own;
// a second kernel joins the splits in order. Where a list is cut depends on nothing but its tokens' places in it.
#include <cuda_bf16.h>

#include "base/error.h"
#include "ops/cuda_ops.h"
#include "ops/mla.cuh"

namespace rocket::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kTile = 32;  // tokens in shared memory, one for each lane
static_assert(kSplit % kTile == 0);
constexpr int64_t kScratch = 72 << 20;  // bytes of partial results in flight

// --- append ---

template <bool kBf16, bool kVector>
__global__ void __launch_bounds__(128) append_kernel(LatentAppendParams p) {
  wait_for_previous();
  start_next();
  const int row = blockIdx.x, index = find_segment(p.segment, p.segments, row);
  const Segment segment = p.segment[index];
  const PagedRows cache = p.cache[index];
  const int64_t position = segment.position + row - segment.first_row;
  const float* from = p.latent + row * p.ld;
  if constexpr (kVector) {
    for (int i = threadIdx.x; i < cache.width / 4; i += blockDim.x) {
      const float4 x = reinterpret_cast<const float4*>(from)[i];
      if constexpr (kBf16) {
        const __nv_bfloat162 low = __floats2bfloat162_rn(x.x, x.y), high = __floats2bfloat162_rn(x.z, x.w);
        uint2 packed;
        packed.x = *reinterpret_cast<const uint32_t*>(&low);
        packed.y = *reinterpret_cast<const uint32_t*>(&high);
        reinterpret_cast<uint2*>(cache.row_bf16(position))[i] = packed;
      } else {
        reinterpret_cast<float4*>(cache.row(position))[i] = x;
      }
    }
  } else {
    for (int i = threadIdx.x; i < cache.width; i += blockDim.x) {
      if constexpr (kBf16) {
        cache.row_bf16(position)[i] = __bfloat16_as_ushort(__float2bfloat16_rn(from[i]));
      } else {
        cache.row(position)[i] = from[i];
      }
    }
  }
}

// --- attention ---

// Shared memory of a block. `work` holds the queries, then the parts of logits that warps add up.
template <int kHeads>
struct Layout {
  int width;   // padded to whole pieces of four for each warp
  int stride;  // of tokens: 16-byte reads by neighbouring lanes meet all banks
  int work;
  __host__ __device__ explicit Layout(int w)
      : width((w + 4 * kWarps - 1) / (4 * kWarps) * (4 * kWarps)), stride(width + 4) {
    const int queries = kHeads * width, parts = kWarps * kHeads * kTile;
    work = queries > parts ? queries : parts;
  }
  __host__ __device__ size_t bytes() const {
    return sizeof(float) * (kTile * stride + work + kTile * kHeads + kHeads) + sizeof(char*) * kTile;
  }
};
constexpr int kNarrow = 512, kWide = 608;  // widths, up to which blocks take 16 heads, or 8
static_assert(sizeof(float) * (kTile * (kNarrow + 4) + 16 * kNarrow + 17 * kTile) + 8 * kTile <=
              kSharedLimit);
static_assert(sizeof(float) * (kTile * (kWide + 4) + 8 * kWide + 9 * kTile) + 8 * kTile <= kSharedLimit);

// One row of n floats into shared memory by a warp, zeros up to `padded`.
template <bool kVector>
__device__ __forceinline__ void load_floats(float* to, const float* from, int n, int padded, int lane) {
  if constexpr (kVector) {
    for (int i = lane; i < n / 4; i += kWarp) copy_async(to + 4 * i, from + 4 * i);
  } else {
    for (int i = lane; i < n; i += kWarp) to[i] = from[i];
  }
  for (int i = n + lane; i < padded; i += kWarp) to[i] = 0;
}

template <bool kVector>
__device__ __forceinline__ void load_bf16(float* to, const uint16_t* from, int n, int padded, int lane) {
  if constexpr (kVector) {
#pragma unroll 2
    for (int i = lane; i < n / 8; i += kWarp) {
      const uint4 x = reinterpret_cast<const uint4*>(from)[i];
      float4* out = reinterpret_cast<float4*>(to + 8 * i);
      out[0] = make_float4(bf16_low(x.x), bf16_high(x.x), bf16_low(x.y), bf16_high(x.y));
      out[1] = make_float4(bf16_low(x.z), bf16_high(x.z), bf16_low(x.w), bf16_high(x.w));
    }
  } else {
    for (int i = lane; i < n; i += kWarp) to[i] = __uint_as_float(static_cast<uint32_t>(from[i]) << 16);
  }
  for (int i = n + lane; i < padded; i += kWarp) to[i] = 0;
}

// Grid: groups of heads, splits, rows. Logits: each lane has a token, each warp a part of the width; values: each thread
// has 2 * kChunks dimensions of all heads.
template <int kHeads, int kChunks, bool kBf16, bool kVector>
__global__ void __launch_bounds__(kThreads, 2) split_kernel(SparseMlaParams p, MlaPartials out) {
  extern __shared__ __align__(16) unsigned char memory[];
  const Layout<kHeads> layout(p.width);
  float* tile = reinterpret_cast<float*>(memory);
  float* work = tile + kTile * layout.stride;
  float* share = work + layout.work;      // [kTile, kHeads] weights of the tile's tokens
  float* decay = share + kTile * kHeads;  // [kHeads] what earlier tiles are multiplied with
  const char** latent = reinterpret_cast<const char**>(decay + kHeads);
  wait_for_previous();
  start_next();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int row = out.first_row + blockIdx.z, head = blockIdx.x * kHeads;
  const int count = p.count[row], begin = blockIdx.y * kSplit;
  if (begin >= count) return;
  const int heads = min(kHeads, p.heads - head);
  const PagedRows cache = p.cache[find_segment(p.segment, p.segments, row)];
  const float* q = p.q + row * p.ldq + static_cast<int64_t>(head) * p.width;

  constexpr int kOwn = kHeads / kWarps;  // heads whose softmax a warp does
  float top[kOwn], total[kOwn];
  float value[kChunks][kHeads][2] = {};
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    top[i] = -INFINITY;
    total[i] = 0;
  }
  const int end = min(count, begin + kSplit);
  for (int first = begin; first < end; first += kTile) {
    const int tokens = min(kTile, end - first);
    if (threadIdx.x < tokens) {
      latent[threadIdx.x] = latent_row(cache, kBf16, p.token[row * p.ldtoken + first + threadIdx.x]);
    }
    for (int h = warp; h < kHeads; h += kWarps) {
      load_floats<kVector>(work + h * layout.width, q + static_cast<int64_t>(h) * p.width,
                           h < heads ? p.width : 0, layout.width, lane);
    }
    __syncthreads();
    for (int t = warp; t < tokens; t += kWarps) {
      float* to = tile + t * layout.stride;
      if constexpr (kBf16) {
        load_bf16<kVector>(to, reinterpret_cast<const uint16_t*>(latent[t]), p.width, layout.width, lane);
      } else {
        load_floats<kVector>(to, reinterpret_cast<const float*>(latent[t]), p.width, layout.width, lane);
      }
    }
    commit_copies();
    wait_copies<0>();
    __syncthreads();

    float dot[kHeads] = {};
    const int part = layout.width / kWarps;
#pragma unroll 1
    for (int i = warp * part; i < (warp + 1) * part; i += 4) {
      const float4 x = *reinterpret_cast<const float4*>(tile + lane * layout.stride + i);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float4 y = *reinterpret_cast<const float4*>(work + h * layout.width + i);
        dot[h] = fmaf(x.x, y.x, dot[h]);
        dot[h] = fmaf(x.y, y.y, dot[h]);
        dot[h] = fmaf(x.z, y.z, dot[h]);
        dot[h] = fmaf(x.w, y.w, dot[h]);
      }
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < kHeads; ++h) work[(warp * kHeads + h) * kTile + lane] = dot[h];
    __syncthreads();

#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int h = warp * kOwn + i;
      float x = work[h * kTile + lane];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) x += work[(w * kHeads + h) * kTile + lane];
      x = lane < tokens ? x * p.scale : -INFINITY;
      const float next = fmaxf(top[i], warp_max(x));
      const float e = lane < tokens ? expf(x - next) : 0.0f;
      const float keep = first == begin ? 0.0f : expf(top[i] - next);
      total[i] = fmaf(total[i], keep, warp_sum(e));
      top[i] = next;
      share[lane * kHeads + h] = e;
      if (lane == 0) decay[h] = keep;
    }
    __syncthreads();

#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int d = 2 * (c * kThreads + threadIdx.x);
      if (d >= p.value_dim) continue;
      if (first > begin) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          value[c][h][0] *= decay[h];
          value[c][h][1] *= decay[h];
        }
      }
#pragma unroll 2
      for (int t = 0; t < tokens; ++t) {
        const float2 x = *reinterpret_cast<const float2*>(tile + t * layout.stride + d);
#pragma unroll
        for (int h = 0; h < kHeads; h += 4) {
          const float4 e = *reinterpret_cast<const float4*>(share + t * kHeads + h);
          const float weight[4] = {e.x, e.y, e.z, e.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            value[c][h + j][0] = fmaf(weight[j], x.x, value[c][h + j][0]);
            value[c][h + j][1] = fmaf(weight[j], x.y, value[c][h + j][1]);
          }
        }
      }
    }
    __syncthreads();
  }

  const int64_t at = (static_cast<int64_t>(blockIdx.z) * out.splits + blockIdx.y) * p.heads + head;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int h = warp * kOwn + i;
    if (lane == 0 && h < heads) out.top_sum[at + h] = make_float2(top[i], total[i]);
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int d = 2 * (c * kThreads + threadIdx.x);
    if (d >= p.value_dim) continue;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= heads) break;
      float* to = out.value + (at + h) * p.value_dim + d;
      to[0] = value[c][h][0];
      if (d + 1 < p.value_dim) to[1] = value[c][h][1];
    }
  }
}

// --- joining splits ---

constexpr int kGroups = 4, kLanes = 128;  // groups of threads; each adds up every fourth split
constexpr int kJoinThreads = kGroups * kLanes;
constexpr int kBatch = 9;  // splits of a group that are read at once

template <int kN>
struct Columns {
  float x[kN];
};
template <int kN>
__device__ __forceinline__ Columns<kN> load_columns(const float* from) {
  Columns<kN> c;
  if constexpr (kN == 4) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    c.x[0] = v.x;
    c.x[1] = v.y;
    c.x[2] = v.z;
    c.x[3] = v.w;
  } else {
    c.x[0] = *from;
  }
  return c;
}
template <int kN>
__device__ __forceinline__ void store_columns(float* to, const Columns<kN>& c) {
  if constexpr (kN == 4) {
    *reinterpret_cast<float4*>(to) = make_float4(c.x[0], c.x[1], c.x[2], c.x[3]);
  } else {
    *to = c.x[0];
  }
}

// The first warp: what each split counts, and the sum of all weights.
__device__ __forceinline__ void find_shares(const float2* part, int64_t step, int splits, float* share,
                                            float& total) {
  const int lane = threadIdx.x;
  float top = -INFINITY, sum = 0;
  for (int s = lane; s < splits; s += kWarp) top = fmaxf(top, part[s * step].x);
  top = warp_max(top);
  for (int s = lane; s < splits; s += kWarp) {
    const float2 x = part[s * step];
    const float e = expf(x.x - top);
    sum = fmaf(x.y, e, sum);
    share[s] = e;
  }
  sum = warp_sum(sum);
  if (lane == 0) total = sum;
}

// Joins the splits of a head, a block for each. A thread has kN columns at a time; value_dim is a multiple of kN.
template <int kN>
__global__ void __launch_bounds__(kJoinThreads) join_kernel(SparseMlaParams p, MlaPartials in) {
  extern __shared__ __align__(16) float share[];  // [splits]
  __shared__ Columns<kN> sum[kGroups - 1][kLanes];
  __shared__ float total;
  wait_for_previous();
  start_next();
  const int head = blockIdx.x, row = in.first_row + blockIdx.y, count = p.count[row];
  const int splits = (count + kSplit - 1) / kSplit, group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  float* o = p.o + row * p.ldo + static_cast<int64_t>(head) * p.value_dim;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * in.splits * p.heads + head;
  const float* value = in.value + first * p.value_dim;
  const int64_t step = static_cast<int64_t>(p.heads) * p.value_dim;
  if (threadIdx.x < kWarp) find_shares(in.top_sum + first, p.heads, splits, share, total);
  for (int begin = 0; begin < p.value_dim; begin += kLanes * kN) {
    const int d = begin + lane * kN;
    const bool inside = d < p.value_dim;
    Columns<kN> mine{};
    for (int s = group; s == group || s < splits; s += kBatch * kGroups) {
      Columns<kN> x[kBatch] = {};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (inside && s + i * kGroups < splits) x[i] = load_columns<kN>(value + (s + i * kGroups) * step + d);
      }
      if (begin == 0 && s == group) __syncthreads();  // for the shares
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (s + i * kGroups >= splits) break;
#pragma unroll
        for (int k = 0; k < kN; ++k) mine.x[k] = fmaf(x[i].x[k], share[s + i * kGroups], mine.x[k]);
      }
    }
    if (group > 0) sum[group - 1][lane] = mine;
    __syncthreads();
    if (group == 0 && inside) {
#pragma unroll
      for (int k = 0; k < kN; ++k) {
#pragma unroll
        for (int g = 1; g < kGroups; ++g) mine.x[k] += sum[g - 1][lane].x[k];
        mine.x[k] = splits > 0 ? mine.x[k] / total : 0.0f;
      }
      store_columns<kN>(o + d, mine);
    }
    __syncthreads();
  }
}

template <int kHeads, int kChunks>
void split(const SparseMlaParams& p, const MlaPartials& partials, int rows, bool vector, Exec& exec) {
  const dim3 grid(static_cast<unsigned>((p.heads + kHeads - 1) / kHeads),
                  static_cast<unsigned>(partials.splits), static_cast<unsigned>(rows));
  auto* kernel =
      p.cache.bf16
          ? (vector ? split_kernel<kHeads, kChunks, true, true> : split_kernel<kHeads, kChunks, true, false>)
          : (vector ? split_kernel<kHeads, kChunks, false, true>
                    : split_kernel<kHeads, kChunks, false, false>);
  launch("sparse_mla", kernel, grid, kThreads, Layout<kHeads>(p.width).bytes(), exec, p, partials);
}

}  // namespace

void latent_append(const LatentAppendParams& p, Exec& exec) {
  if (exec.measure || p.rows == 0) return;
  const bool vector =
      p.cache.width % 4 == 0 && p.cache.offset % 4 == 0 && p.ld % 4 == 0 && aligned16(p.latent);
  auto* kernel = p.cache.bf16 ? (vector ? append_kernel<true, true> : append_kernel<true, false>)
                              : (vector ? append_kernel<false, true> : append_kernel<false, false>);
  launch("latent_append", kernel, p.rows, 128, 0, exec, p);
}

void sparse_mla(const SparseMlaParams& p, Exec& exec) {
  if (p.width > kWide) fail_op("sparse_mla", "width, at most", kWide, p.width);
  if (p.value_dim > p.width) fail_op("sparse_mla", "value_dim, at most width", p.width, p.value_dim);
  if (exec.tensor_cores && sparse_mla_tensor(p, exec)) return;
  const int64_t splits = (p.ldtoken + kSplit - 1) / kSplit;
  const int64_t row_floats = splits * p.heads * (p.value_dim + 2);
  const int64_t fit = kScratch / static_cast<int64_t>(sizeof(float)) / (row_floats > 0 ? row_floats : 1);
  const int64_t group = fit < 1 ? 1 : fit < p.rows ? fit : p.rows;
  ArenaScope scope(*exec.scratch);
  MlaPartials partials;
  partials.splits = static_cast<int>(splits);
  partials.top_sum = exec.scratch->take<float2>(group * splits * p.heads);
  partials.value = exec.scratch->take<float>(group * splits * p.heads * p.value_dim);
  if (exec.measure || p.rows == 0) return;
  const bool vector = aligned_rows(p.cache) && p.width % 4 == 0 && p.ldq % 4 == 0 && aligned16(p.q);
  const bool wide = p.value_dim % 4 == 0 && p.ldo % 4 == 0 && aligned16(p.o);
  for (int64_t first = 0; first < p.rows; first += group) {
    const int rows = static_cast<int>(first + group < p.rows ? group : p.rows - first);
    partials.first_row = static_cast<int>(first);
    if (!sparse_mla_decode(p, partials, rows, exec)) {
      if (p.width <= kNarrow) {
        split<16, 1>(p, partials, rows, vector, exec);
      } else {
        split<8, 2>(p, partials, rows, vector, exec);
      }
    }
    launch("sparse_mla", wide ? join_kernel<4> : join_kernel<1>,
           dim3(static_cast<unsigned>(p.heads), static_cast<unsigned>(rows)), kJoinThreads,
           static_cast<size_t>(splits) * sizeof(float), exec, p, partials);
  }
}

}  // namespace rocket::cuda
