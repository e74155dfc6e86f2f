// Attention to one split of a row's list in exact mode, by tensor cores with float32's precision (ops/tf32.cuh).
//
// A block has 16 heads. Its tokens pass through shared memory in tiles as they are stored, and the next tile arrives while
// one is worked on. A warp has an eighth of the width, for logits as for values, and brings just that part of the
// tiles: no other warp looks at it. Warps meet to add up their parts of the logits and to share the weights.
#include "ops/mla.cuh"
#include "ops/tf32.cuh"

namespace rocket::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kHeads = 16, kTile = 16, kDim = 512;  // heads of a block, tokens of a tile, width and value_dim
constexpr int kTiles = kSplit / kTile;
constexpr int kOwn = kDim / kWarps;  // columns of a warp
constexpr int kWeightStride = 20;    // of heads: lanes read a product's operand from all banks
constexpr int kColumns = kOwn / 8;   // results of the values' product, eight columns each
constexpr int kSteps = kOwn / 8;     // of the logits' product
static_assert(kThreads == kHeads * kTile && kSplit == 2 * kWarp);

// A tile's rows are two pieces of 16 bytes longer than they need be: lanes that read neighbouring rows meet all banks.
template <bool kBf16>
struct Shared {
  static constexpr int kPiece = kBf16 ? 8 : 4;  // columns in 16 bytes
  static constexpr int kOwnPieces = kOwn / kPiece;
  static constexpr int kStride = kDim / kPiece + 2;
  uint4 tile[2][kTile * kStride];
  float2 part[kWarps][kHeads][kTile / 2];
  float weight[kHeads * kWeightStride];
  float keep[kHeads];  // what earlier tiles are multiplied with
};
static_assert(sizeof(Shared<false>) <= kSharedLimit);

// Column n of a logits' product has this token of the tile: so ordered, lanes read rows from all banks.
__device__ __forceinline__ int token_of(int n) {
  return (n & ~3) | (n & 1) << 1 | (n >> 1 & 1);
}

// The numbers in 16 bytes of a row.
template <bool kBf16>
struct Piece {
  uint32_t word[4];
  __device__ __forceinline__ explicit Piece(const uint4& v) : word{v.x, v.y, v.z, v.w} {}
  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (kBf16) return i % 2 ? bf16_high(word[i / 2]) : bf16_low(word[i / 2]);
    return __uint_as_float(word[i % 4]);
  }
};

// small + large += a * b; a is cut already. Bfloat16 numbers are not cut.
template <bool kBf16>
__device__ __forceinline__ void multiply_small(float (&small)[4], const uint32_t (&high)[4],
                                               const uint32_t (&low)[4], float b0, float b1) {
  if constexpr (kBf16) {
    multiply_tf32(small, low, __float_as_uint(b0), __float_as_uint(b1));
  } else {
    uint32_t high0, low0, high1, low1;
    cut(b0, high0, low0);
    cut(b1, high1, low1);
    multiply_tf32(small, low, high0, high1);
    multiply_tf32(small, high, low0, low1);
  }
}
template <bool kBf16>
__device__ __forceinline__ void multiply_large(float (&large)[4], const uint32_t (&high)[4], float b0,
                                               float b1) {
  uint32_t high0 = __float_as_uint(b0), high1 = __float_as_uint(b1), rest;
  if constexpr (!kBf16) {
    cut(b0, high0, rest);
    cut(b1, high1, rest);
  }
  multiply_tf32(large, high, high0, high1);
}

// Where the split's tokens lie: lane l has tokens l and l + 32.
template <bool kBf16>
struct Rows {
  const char* row[2];
  __device__ __forceinline__ Rows(const PagedRows& cache, const int32_t* token, int count) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = threadIdx.x % kWarp + i * kWarp;
      row[i] = t < count ? latent_row(cache, kBf16, token[t]) : nullptr;
    }
  }
  // Brings the warp's columns of a tile, zeros behind the last token.
  __device__ __forceinline__ void load(int tile, uint4* to) const {
    constexpr int kPieces = Shared<kBf16>::kOwnPieces, kAtOnce = kWarp / kPieces;
    const int lane = threadIdx.x % kWarp, piece = threadIdx.x / kWarp * kPieces + lane % kPieces;
    const auto mine = reinterpret_cast<unsigned long long>(tile < kTiles / 2 ? row[0] : row[1]);
#pragma unroll
    for (int i = 0; i < kTile / kAtOnce; ++i) {
      const int t = i * kAtOnce + lane / kPieces;
      const auto* from =
          reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, mine, (tile * kTile + t) % kWarp));
      uint4* out = to + t * Shared<kBf16>::kStride + piece;
      if (from) {
        copy_async(out, from + 16 * piece);
      } else {
        *out = make_uint4(0, 0, 0, 0);
      }
    }
    commit_copies();
  }
};

// The warp's columns of the block's queries, as a product takes them: product s multiplies the columns that lanes find at
// places 2s and 2s + 1 of what they read of a row.
struct Queries {
  float x[kSteps][4];  // cut where they are used: the pieces would take twice the registers

  template <bool kBf16>
  __device__ __forceinline__ void load(const float* q, int heads) {
    constexpr int kPiece = Shared<kBf16>::kPiece;
    const int lane = threadIdx.x % kWarp, column = threadIdx.x / kWarp * kOwn + lane % 4 * kPiece;
#pragma unroll
    for (int i = 0; i < kOwn / 16; ++i) {  // four columns each
      const int at = column + i * 4 / kPiece * 4 * kPiece + i * 4 % kPiece;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int head = lane / 4 + 8 * half;
        float4 v = make_float4(0, 0, 0, 0);
        if (head < heads) v = *reinterpret_cast<const float4*>(q + head * kDim + at);
        x[2 * i][half] = v.x;
        x[2 * i][2 + half] = v.y;
        x[2 * i + 1][half] = v.z;
        x[2 * i + 1][2 + half] = v.w;
      }
    }
  }
};

// The warp's part of the tile's logits.
template <bool kBf16>
__device__ __forceinline__ void logits(Shared<kBf16>& s, const Queries& q, const uint4* tile) {
  using S = Shared<kBf16>;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  constexpr int kGroups = kTile / 8;
  float large[kGroups][4] = {}, small[kGroups][4] = {};
#pragma unroll
  for (int i = 0; i < S::kOwnPieces / 4; ++i) {
    const uint4* at = tile + token_of(lane / 4) * S::kStride + warp * S::kOwnPieces + 4 * i + lane % 4;
    const Piece<kBf16> k[kGroups] = {Piece<kBf16>(at[0]), Piece<kBf16>(at[8 * S::kStride])};
#pragma unroll
    for (int j = 0; j < S::kPiece / 2; ++j) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) cut(here(q.x[i * S::kPiece / 2 + j][e]), high[e], low[e]);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        multiply_small<kBf16>(small[g], high, low, k[g][2 * j], k[g][2 * j + 1]);
        multiply_large<kBf16>(large[g], high, k[g][2 * j], k[g][2 * j + 1]);
      }
    }
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    float2* to = &s.part[warp][lane / 4][4 * g + lane % 4];
    to[0] = make_float2(large[g][0] + small[g][0], large[g][1] + small[g][1]);
    to[8 * kTile / 2] = make_float2(large[g][2] + small[g][2], large[g][3] + small[g][3]);
  }
}

// Of a thread's head: the largest logit so far and the sum of exponentials relative to it. 16 threads have a head.
struct Softmax {
  float top = -INFINITY, total = 0;

  template <bool kBf16>
  __device__ __forceinline__ void step(Shared<kBf16>& s, float scale, int tokens, bool first) {
    const int head = threadIdx.x / kTile, n = threadIdx.x % kTile, token = token_of(n);
    const float* part = reinterpret_cast<const float*>(s.part) + threadIdx.x;
    float x = part[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) x += part[w * kHeads * kTile];
    x = token < tokens ? x * scale : -INFINITY;
    float largest = x;
#pragma unroll
    for (int i = kTile / 2; i > 0; i /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, i));
    const float next = fmaxf(top, largest);
    const float e = token < tokens ? expf(x - next) : 0.0f;
    const float keep = first ? 0.0f : expf(top - next);
    float sum = e;
#pragma unroll
    for (int i = kTile / 2; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
    total = fmaf(total, keep, sum);
    top = next;
    s.weight[head * kWeightStride + token] = e;
    if (n == 0) s.keep[head] = keep;
  }
};

// o = o * keep + the tile's values times their weights, in the warp's columns.
template <bool kBf16>
__device__ __forceinline__ void values(float (&o)[kColumns][4], const Shared<kBf16>& s, const uint4* tile) {
  using S = Shared<kBf16>;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, j = lane % 4;
  constexpr int kHalves = kTile / 8;
  uint32_t high[kHalves][4], low[kHalves][4];
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      cut(s.weight[(g + i % 2 * 8) * kWeightStride + 8 * h + j + i / 2 * 4], high[h][i], low[h][i]);
    }
  }
  const float keep[2] = {s.keep[g], s.keep[g + 8]};
#pragma unroll
  for (int i = 0; i < S::kOwnPieces / 8; ++i) {
    const uint4* at = tile + j * S::kStride + warp * S::kOwnPieces + 8 * i + g;
    const Piece<kBf16> v[kTile / 4] = {Piece<kBf16>(at[0]), Piece<kBf16>(at[4 * S::kStride]),
                                       Piece<kBf16>(at[8 * S::kStride]), Piece<kBf16>(at[12 * S::kStride])};
#pragma unroll
    for (int c = 0; c < S::kPiece; ++c) {
      float sum[4] = {};  // the small ones first
#pragma unroll
      for (int h = 0; h < kHalves; ++h)
        multiply_small<kBf16>(sum, high[h], low[h], v[2 * h][c], v[2 * h + 1][c]);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) multiply_large<kBf16>(sum, high[h], v[2 * h][c], v[2 * h + 1][c]);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float& to = o[i * S::kPiece + c][k];
        to = fmaf(to, keep[k / 2], sum[k]);
      }
    }
  }
}

// Grid: groups of heads, splits, rows.
template <bool kBf16>
__global__ void __launch_bounds__(kThreads, 2)
    decode_kernel(const __grid_constant__ SparseMlaParams p, const MlaPartials out) {
  using S = Shared<kBf16>;
  extern __shared__ __align__(16) unsigned char memory[];
  S& s = *reinterpret_cast<S*>(memory);
  wait_for_previous();
  start_next();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int row = out.first_row + blockIdx.z, head = blockIdx.x * kHeads, begin = blockIdx.y * kSplit;
  const int tokens = min(p.count[row] - begin, kSplit), heads = min(kHeads, p.heads - head);
  if (tokens <= 0) return;
  const PagedRows cache = p.cache[find_segment(p.segment, p.segments, row)];
  const Rows<kBf16> rows(cache, p.token + row * p.ldtoken + begin, tokens);
  const int tiles = (tokens + kTile - 1) / kTile;
  rows.load(0, s.tile[0]);
  if (tiles > 1) rows.load(1, s.tile[1]);
  Queries q;
  q.load<kBf16>(p.q + row * p.ldq + static_cast<int64_t>(head) * kDim, heads);
  float o[kColumns][4] = {};
  Softmax softmax;
#pragma unroll 1
  for (int t = 0; t < tiles; ++t) {
    if (t + 1 < tiles) {
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncwarp();
    const uint4* tile = s.tile[t % 2];
    logits<kBf16>(s, q, tile);
    __syncthreads();
    softmax.step(s, p.scale, tokens - t * kTile, t == 0);
    __syncthreads();
    values<kBf16>(o, s, tile);
    __syncwarp();  // all lanes have read the tile
    if (t + 2 < tiles) rows.load(t + 2, s.tile[t % 2]);
  }

  const int64_t at = (static_cast<int64_t>(blockIdx.z) * out.splits + blockIdx.y) * p.heads + head;
  const int own = threadIdx.x / kTile;
  if (threadIdx.x % kTile == 0 && own < heads)
    out.top_sum[at + own] = make_float2(softmax.top, softmax.total);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int h = lane / 4 + 8 * half;
    if (h >= heads) continue;
    float* to = out.value + (at + h) * kDim + warp * kOwn + 2 * (lane % 4) * S::kPiece;
#pragma unroll
    for (int i = 0; i < kColumns; i += 4) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {  // the two columns of a result
        *reinterpret_cast<float4*>(to + i / S::kPiece * 8 * S::kPiece + k * S::kPiece + i % S::kPiece) =
            make_float4(o[i][2 * half + k], o[i + 1][2 * half + k], o[i + 2][2 * half + k],
                        o[i + 3][2 * half + k]);
      }
    }
  }
}

}  // namespace

bool sparse_mla_decode(const SparseMlaParams& p, const MlaPartials& partials, int rows, Exec& exec) {
  if (p.width != kDim || p.value_dim != kDim || !aligned_rows(p.cache)) return false;
  if (p.ldq % 4 != 0 || !aligned16(p.q)) return false;
  const dim3 grid(static_cast<unsigned>((p.heads + kHeads - 1) / kHeads),
                  static_cast<unsigned>(partials.splits), static_cast<unsigned>(rows));
  if (p.cache.bf16) {
    launch("sparse_mla", decode_kernel<true>, grid, kThreads, sizeof(Shared<true>), exec, p, partials);
  } else {
    launch("sparse_mla", decode_kernel<false>, grid, kThreads, sizeof(Shared<false>), exec, p, partials);
  }
  return true;
}

}  // namespace rocket::cuda
