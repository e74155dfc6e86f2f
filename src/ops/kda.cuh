// What the kernels of KDA share: its gates, and a head's state in registers. A warp has 16 columns of the state, all Dk
// rows of them, so that the sums along Dk stay within the warp: lane 4 g + c has four columns of the g-th eighth of the
// rows.
#pragma once

#include "ops/cuda.cuh"
#include "ops/kda.h"

namespace rocket::cuda {

constexpr int kKdaTile = 16;   // columns of a warp
constexpr int kKdaGroups = 8;  // of rows, each with one lane for four columns

__device__ __forceinline__ float kda_decay(const KdaGatesParams& p, float f, float a) {
  if (p.bounded) return p.lower_bound * sigmoid(a * f);
  return -a * (f > 20.0f ? f : log1pf(expf(f)));
}

__device__ __forceinline__ float kda_gated(float o, float r, float w, float gate) {
  return o * r * w * sigmoid(gate);
}

// kRows: rows of a lane, at most; kExact: D = 8 kRows, else any smaller D.
template <int kRows, bool kExact>
struct KdaShape {
  static constexpr int kElements = (kKdaGroups * kRows + kWarp - 1) / kWarp;  // of a row's vector in a lane
  // Vectors over Dk lie in shared memory with a gap behind each group's part, so that groups read other banks.
  static constexpr int kPitch = kExact ? kRows + 4 : kRows + 1;
  static constexpr int kVector = kKdaGroups * kPitch;

  __device__ static int dim(const KdaRecurrenceParams& p) { return kExact ? kKdaGroups * kRows : p.head_dim; }
  __device__ static int slot(int i, int group_rows) { return i / group_rows * kPitch + i % group_rows; }
};

// Where a lane stands.
struct KdaPlace {
  int lane, column;     // first of its four columns
  int own;              // the column whose value, d and output it handles
  int64_t at;           // its first state element in a [heads, D, D] state
  int group_rows, dim;  // rows of a group, D
  bool inside, own_inside;
};

__device__ __forceinline__ KdaPlace kda_place(int tile, int head, int dim) {
  KdaPlace at;
  at.lane = threadIdx.x % kWarp;
  at.dim = dim;
  at.group_rows = dim / kKdaGroups;
  at.column = tile * kKdaTile + at.lane % 4 * 4;
  at.own = at.column + at.lane / 4 % 4;
  at.inside = at.column < dim;
  at.own_inside = at.own < dim;
  at.at = (static_cast<int64_t>(head) * dim + at.lane / 4 * at.group_rows) * dim + at.column;
  return at;
}

template <int kRows, bool kExact>
struct KdaStateTile {
  float4 s[kRows];

  __device__ __forceinline__ void load(const float* state, const KdaPlace& at) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool has = kExact || (at.inside && i < at.group_rows);
      s[i] = has ? *reinterpret_cast<const float4*>(state + at.at + static_cast<int64_t>(i) * at.dim)
                 : make_float4(0, 0, 0, 0);
    }
  }
  __device__ __forceinline__ void store(float* state, const KdaPlace& at) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (kExact || (at.inside && i < at.group_rows))
        *reinterpret_cast<float4*>(state + at.at + static_cast<int64_t>(i) * at.dim) = s[i];
    }
  }

  // Four values of a vector in shared memory, of this lane's group; zero behind the group's end.
  __device__ __forceinline__ static void get(const float* vector, int i, int group_rows, float (&to)[4]) {
    if constexpr (kExact) {
      const float4 v = *reinterpret_cast<const float4*>(vector + i);
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) to[j] = i + j < group_rows ? vector[i + j] : 0.0f;
    }
  }

  // One row; q, k, decay in shared memory. Lanes below 16 bring the value of their own column, the others return the
  // output of theirs. S is read once, as decayed: S^T q after the write is S'^T q + (k . q) d.
  __device__ __forceinline__ float row(const float* q, const float* k, const float* decay, float qk,
                                       float beta, float value, const KdaPlace& at) {
    const int lane = at.lane, group = lane / 4 * KdaShape<kRows, kExact>::kPitch;
    float seen[4] = {}, read[4] = {};
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      float q4[4], k4[4], w4[4];
      get(q + group, i, at.group_rows, q4);
      get(k + group, i, at.group_rows, k4);
      get(decay + group, i, at.group_rows, w4);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float4& x = s[i + j];
        x = make_float4(x.x * w4[j], x.y * w4[j], x.z * w4[j], x.w * w4[j]);
        seen[0] = fmaf(k4[j], x.x, seen[0]), read[0] = fmaf(q4[j], x.x, read[0]);
        seen[1] = fmaf(k4[j], x.y, seen[1]), read[1] = fmaf(q4[j], x.y, read[1]);
        seen[2] = fmaf(k4[j], x.z, seen[2]), read[2] = fmaf(q4[j], x.z, read[2]);
        seen[3] = fmaf(k4[j], x.w, seen[3]), read[3] = fmaf(q4[j], x.w, read[3]);
      }
    }
    const float sum = over_groups(seen, read, lane);
    const float d = beta * (value - sum);  // of lane's own column, in lanes below 16
    float4 write;
    write.x = __shfl_sync(0xffffffffu, d, lane % 4);
    write.y = __shfl_sync(0xffffffffu, d, lane % 4 + 4);
    write.z = __shfl_sync(0xffffffffu, d, lane % 4 + 8);
    write.w = __shfl_sync(0xffffffffu, d, lane % 4 + 12);
    const float own = __shfl_sync(0xffffffffu, d, lane % 16);
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      float k4[4];
      get(k + group, i, at.group_rows, k4);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float4& x = s[i + j];
        x = make_float4(fmaf(k4[j], write.x, x.x), fmaf(k4[j], write.y, x.y), fmaf(k4[j], write.z, x.z),
                        fmaf(k4[j], write.w, x.w));
      }
    }
    return fmaf(qk, own, sum);
  }

  // Sums over the eight groups. Lane l gets column l / 4 % 4 of its four: of `seen` below 16, of `read` from 16 on. At
  // each step a lane keeps half of its values and hands the other half to the lane that keeps those.
  __device__ __forceinline__ static float over_groups(const float (&seen)[4], const float (&read)[4],
                                                      int lane) {
    const bool b4 = lane & 16, b3 = lane & 8, b2 = lane & 4;
    float a[4], b[2];
#pragma unroll
    for (int c = 0; c < 4; ++c)
      a[c] = (b4 ? read[c] : seen[c]) + __shfl_xor_sync(0xffffffffu, b4 ? seen[c] : read[c], 16);
#pragma unroll
    for (int c = 0; c < 2; ++c)
      b[c] = (b3 ? a[c + 2] : a[c]) + __shfl_xor_sync(0xffffffffu, b3 ? a[c] : a[c + 2], 8);
    return (b2 ? b[1] : b[0]) + __shfl_xor_sync(0xffffffffu, b2 ? b[0] : b[1], 4);
  }
};

// Element lane + 32 i of a row's vectors.
template <int kElements>
struct KdaRowVectors {
  float q[kElements], k[kElements], g[kElements];

  __device__ __forceinline__ void load(const KdaRecurrenceParams& p, int64_t row, int head, int dim,
                                       int lane) {
    const int64_t at = row * p.ldqkv + static_cast<int64_t>(head) * dim;
    const int64_t at_g = (row * p.heads + head) * dim;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int e = lane + i * kWarp;
      const bool has = e < dim;
      q[i] = has ? p.q[at + e] : 0.0f;
      k[i] = has ? p.k[at + e] : 0.0f;
      g[i] = has ? p.g[at_g + e] : 0.0f;
    }
  }

  // Leaves l2norm(q) * D^-1/2, l2norm(k), exp(g), and returns the product of q and k.
  __device__ __forceinline__ float prepare(int dim) {
    float qq = 0, kk = 0, qk = 0;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      qq = fmaf(q[i], q[i], qq);
      kk = fmaf(k[i], k[i], kk);
    }
    // 1 / sqrt, not rsqrt: the compiler works a constant dim out, and must find what the device would.
    const float q_scale = rsqrtf(warp_sum(qq) + 1e-6f) * (1.0f / sqrtf(static_cast<float>(dim)));
    const float k_scale = rsqrtf(warp_sum(kk) + 1e-6f);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      q[i] *= q_scale;
      k[i] *= k_scale;
      g[i] = expf(g[i]);
      qk = fmaf(q[i], k[i], qk);
    }
    return warp_sum(qk);
  }
};

}  // namespace rocket::cuda
