// Products with NVFP4 weights on tensor cores.
//
// A warp multiplies sixteen weight rows with tiles of eight columns by mma.sync m16n8k16: weights are the A side, each
// lane decoding what it copied itself. An E2M1 value times its E4M3 block scale has at most six significant bits and is
// a multiple of 2^-24 after the factor 2^-14 that decoding leaves, so the product is exact in float16. Activations are
// the B side, from shared memory, in float16 after a power of two for each row that brings the row's largest magnitude
// into [2^14, 2^15):
//   exact rows   two columns for each, x = high + low, which keeps x to half a unit of 2^-22 of itself (float32: 2^-23)
//                or to 2^-39 of the row's largest: less than float32 products lose in the sum. One product is exact
//                in the tensor core; its sums are cut off, so only four in a row are made there, then added in float32.
//   rounded rows one column, eleven significant bits (BF16 has eight)
// A column's bits do not depend on its place or on the other columns.
//
// Columns of x come in steps of 128; a lane's 16 bytes of weights hold 32 of them. Unit w * 4 + t of a step (w, t of
// 0 … 3) holds columns t * 32 + w * 8 + {0, 4, 2, 6, 1, 5, 3, 7}: 16 bytes that one lane of a quad needs for two MMAs.
#pragma once

#include <cuda_fp16.h>

#include "ops/cuda.cuh"
#include "ops/weight.h"

namespace rocket::cuda {

constexpr int kFfnThreads = 256;
constexpr int kFfnWarps = kFfnThreads / kWarp;
constexpr int kStep = 128;     // columns of x
constexpr int kGroup = 4;      // steps whose scales a lane loads together
constexpr int kExactRows = 4;  // rows of a tile, two columns each

// Whether lanes can load this weight in 16 bytes of nibbles with two bytes of scales. All fields are asked for at once.
__device__ __forceinline__ bool loads_whole(const Weight& w) {
  return (w.format == WeightFormat::kNVFP4) & (w.in % 32 == 0) &
         (reinterpret_cast<uintptr_t>(w.data) % 16 == 0) &
         (reinterpret_cast<uintptr_t>(w.block_scale) % 2 == 0);
}

// Bit 7 of each byte from a, the others from b, in one instruction.
__device__ __forceinline__ uint32_t upper_bits(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, 0x80808080, 0xe4;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// Eight nibbles to float16 times 2^-14: out[0] columns 0 and 4, then 2 and 6, 1 and 5, 3 and 7. A nibble's sign goes to
// bit 15 of a float16, its exponent and mantissa bits to bits 11 to 9 (subnormals come out right): all of it lies in the
// upper byte. So four nibbles become such bytes together, which then go out two at a time. Logic and byte permutations
// share one half-rate pipeline, which limits this; shifts to the left are multiplications beside it.
__device__ __forceinline__ void decode_fp4(uint32_t word, uint32_t (&out)[4]) {
  constexpr uint32_t kUsed = 0x8e008e00u;
  const uint32_t even = upper_bits(word << 4, word << 1), odd = upper_bits(word, word >> 3);
  out[0] = (even << 8) & kUsed;
  out[1] = even & kUsed;
  out[2] = (odd << 8) & kUsed;
  out[3] = odd & kUsed;
}

__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// Two E4M3 codes to float16, the lower byte into the lower half; exact, NaN included.
__device__ __forceinline__ uint32_t e4m3_halves(uint32_t codes) {
  uint32_t d;
  asm("{\n.reg .b16 codes;\ncvt.u16.u32 codes, %1;\ncvt.rn.f16x2.e4m3x2 %0, codes;\n}"
      : "=r"(d)
      : "r"(codes));
  return d;
}

// Lanes walk along their rows, so the second-level cache may fetch ahead.
__device__ __forceinline__ uint32_t load_two_scales(const void* p) {
  uint16_t v;
  asm volatile("ld.global.nc.L2::256B.u16 %0, [%1];" : "=h"(v) : "l"(p));
  return v;
}

// d += a * b, a [16, 16] row major, b [16, 8]. The lane 4 * g + t has rows g and g + 8 of a and d, columns 2t and
// 2t + 1 of d, column g of b.
__device__ __forceinline__ void mma_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                        uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Asks for `bytes` (a multiple of 16) from a 16-byte aligned address on to be brought into the second-level cache. For
// one lane: the lanes of a warp would take turns.
__device__ __forceinline__ void prefetch_bytes(const void* p, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}

// 16 bytes of weights into shared memory past the first-level cache.
__device__ __forceinline__ void copy_weights(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// A lane's part of sixteen weight rows, its two rows. Nibbles come through a ring of copies into shared memory, kStages
// steps deep, each lane reading what it copied itself. Copies, unlike loads into registers, are waited for in the order
// in which they were asked for: the compiler gives the loads of a loop one counter to wait for, and with it each round
// would wait for the youngest load. So the scales, which are too small for copies, are loaded a whole group ahead.
//
// Where a row has no columns left, a lane keeps what it had: x is zero there, nibbles are always finite, and scales are
// zero or from the same row, where a NaN makes the row's sum NaN anyhow.
template <int kStages>
struct WeightStream {
  static_assert(kStages % kGroup == 0);
  static constexpr int kSlotBytes = 2 * kWarp * 16;                // of a warp and a step
  static constexpr int kBytes = kFfnWarps * kStages * kSlotBytes;  // of a block
  static constexpr int64_t kAhead = 4096;                          // see ask_ahead()

  const char* data[2];   // of the first step of the group to copy next
  const char* scale[2];  // of the group to load next
  int data_left;         // steps that this lane has columns in, counted from these
  int scale_left;
  uint32_t next[kGroup][2];
  uint32_t ring;  // this lane's place in the warp's first slot
  uint32_t at;    // of the group to take next, from there

  // Row a of one weight and row b of another or the same; both load whole, and are of one width. `memory`: kBytes.
  __device__ __forceinline__ void open(const Weight& wa, int64_t a, const Weight& wb, int64_t b,
                                       void* memory) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, t = lane % 4;
    const int64_t in = wa.in;
    data[0] = static_cast<const char*>(wa.data) + a * (in / 2) + t * 16;
    data[1] = static_cast<const char*>(wb.data) + b * (in / 2) + t * 16;
    scale[0] = static_cast<const char*>(wa.block_scale) + a * (in / 16) + t * 2;
    scale[1] = static_cast<const char*>(wb.block_scale) + b * (in / 16) + t * 2;
    data_left = scale_left = (static_cast<int>(in / 32) - t + 3) / 4;
    ring =
        static_cast<uint32_t>(__cvta_generic_to_shared(memory)) + warp * (kStages * kSlotBytes) + lane * 16;
    at = 0;
#pragma unroll
    for (int g = 0; g < kStages / kGroup; ++g) {
#pragma unroll
      for (int d = 0; d < kGroup; ++d) copy(d);
      advance();
    }
#pragma unroll
    for (int d = 0; d < kGroup; ++d) next[d][0] = next[d][1] = 0;
    load_scales();
  }

  // Asks for more of the warp's rows a, whole ones, which lie one behind the other, so that the memory is busy until the
  // first products are made. Right after open(). `rows`: of the weight from this lane's row a on.
  __device__ __forceinline__ void ask_ahead(int64_t in, int rows) const {
    const int64_t left = min(rows, 8) * (in / 2) - kStages * 64;
    if (threadIdx.x % kWarp == 0 && left > 0)
      prefetch_bytes(data[0], static_cast<uint32_t>(min(left, kAhead)));
  }

  // Step d of the group to copy next, into the place of step d of the group that is being taken. A group of copies of
  // its own, be it empty.
  __device__ __forceinline__ void copy(int d) {
    if (d < data_left) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        copy_weights(ring + at + d * kSlotBytes + i * (kSlotBytes / 2), data[i] + d * 64);
    }
    commit_copies();
  }
  // After all steps of a group.
  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int i = 0; i < 2; ++i) data[i] += kGroup * 64;
    data_left -= kGroup;
    at += kGroup * kSlotBytes;
    if (at == kStages * kSlotBytes) at = 0;
  }
  // Step d of the group. kYounger: groups of copies that may have been asked for since.
  template <int kYounger>
  __device__ __forceinline__ void take(int d, uint4 (&q)[2]) const {
    wait_copies<kYounger>();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(q[i].x), "=r"(q[i].y), "=r"(q[i].z), "=r"(q[i].w)
                   : "r"(ring + at + d * kSlotBytes + i * (kSlotBytes / 2))
                   : "memory");
    }
  }
  // The scales of a group, and asks for those of the one after.
  __device__ __forceinline__ void take_scales(uint32_t (&s)[kGroup][2]) {
#pragma unroll
    for (int d = 0; d < kGroup; ++d) s[d][0] = next[d][0], s[d][1] = next[d][1];
    load_scales();
  }
  __device__ __forceinline__ void load_scales() {
#pragma unroll
    for (int d = 0; d < kGroup; ++d) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (d < scale_left) next[d][i] = load_two_scales(scale[i] + d * 8);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) scale[i] += kGroup * 8;
    scale_left -= kGroup;
  }
};

__device__ __forceinline__ uint32_t word_of(const uint4& v, int w) {
  return w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w;
}

// One step's weights of two rows against the step's units of x, [4 words, kColumns, 4] as staged. `x` is where this
// lane's part of the first begins; lanes of columns that do not count may read those of another. kExact: at most eight
// columns, else whole tiles of eight.
template <int kColumns, bool kExact>
__device__ __forceinline__ void multiply_step(const uint4 (&q)[2], const uint32_t (&s)[2], const uint4* x,
                                              float (&acc)[(kColumns + 7) / 8][4]) {
  constexpr int kTiles = (kColumns + 7) / 8;
  static_assert(!kExact || kTiles == 1);
  const uint32_t scales[2] = {e4m3_halves(s[0]), e4m3_halves(s[1])};
  float part[2][4] = {};
  __syncwarp();  // the products want the whole warp, and lanes may have fetched by themselves
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    uint32_t a[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t scale = __byte_perm(scales[i], 0, w < 2 ? 0x1010 : 0x3232);
      decode_fp4(word_of(q[i], w), a[i]);
#pragma unroll
      for (int k = 0; k < 4; ++k) a[i][k] = multiply_halves(a[i][k], scale);
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const uint4 b = x[(w * kColumns + n * 8) * 4];
      float (&first)[4] = kExact ? part[0] : acc[n];
      float (&second)[4] = kExact ? part[1] : acc[n];
      mma_f16(first, a[0][0], a[1][0], a[0][1], a[1][1], b.x, b.y);
      mma_f16(second, a[0][2], a[1][2], a[0][3], a[1][3], b.z, b.w);
    }
  }
  if constexpr (kExact) {
#pragma unroll
    for (int k = 0; k < 4; ++k) acc[0][k] += part[0][k] + part[1][k];
  }
}

// ---- activations to float16

// The power of two for a row whose largest magnitude has these bits, as its exponent: the row times 2^exponent has its
// largest magnitude in [2^14, 2^15) (below that where 2^exponent would overflow). 0 for a row that is not finite: then
// high + low is NaN or infinite somewhere, low NaN, and so are all its sums.
__device__ __forceinline__ int row_exponent(uint32_t largest_bits) {
  const int exponent = static_cast<int>(largest_bits >> 23);
  if (exponent == 255) return 0;
  const int e = 14 + 127 - exponent;
  return e < 127 ? e : 127;
}
__device__ __forceinline__ float power_of_two(int exponent) {  // -126 … 127
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}
// What a sum has to be multiplied with for it: the row's factor back, and the 2^14 of decode_fp4.
__device__ __forceinline__ float back_factor(int exponent) {
  return power_of_two(14 - exponent);
}

// The first column of a unit of a row, and the unit from its columns in ascending order.
__device__ __forceinline__ int unit_column(int unit) {
  return unit / 16 * kStep + unit % 4 * 32 + unit / 4 % 4 * 8;
}
__device__ __forceinline__ uint32_t two_halves(float low, float high) {
  const __half2 v = __halves2half2(__float2half_rn(low), __float2half_rn(high));
  return *reinterpret_cast<const uint32_t*>(&v);
}
__device__ __forceinline__ uint4 unit_of(const float (&v)[8]) {
  return make_uint4(two_halves(v[0], v[4]), two_halves(v[2], v[6]), two_halves(v[1], v[5]),
                    two_halves(v[3], v[7]));
}

// A row in float32, by the whole block: a thread has units threadIdx.x + i * kFfnThreads. The first two stay in
// registers, which is all of a row of up to 4096.
struct RowReader {
  static constexpr int kHeld = 2;
  const float* x;
  int dim, units;
  bool whole;
  float held[kHeld][8];

  __device__ __forceinline__ void load(int i, float (&v)[8]) const {
    const int column = unit_column(threadIdx.x + i * kFfnThreads);
    if (whole) {
      float4 a = make_float4(0, 0, 0, 0), b = a;
      if (column < dim) {
        a = *reinterpret_cast<const float4*>(x + column);
        b = *reinterpret_cast<const float4*>(x + column + 4);
      }
      v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
      v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k) v[k] = column + k < dim ? x[column + k] : 0.0f;
    }
  }
  __device__ __forceinline__ void open(const float* row, int row_dim) {
    x = row;
    dim = row_dim;
    units = (dim + kStep - 1) / kStep * 16;
    whole = reinterpret_cast<uintptr_t>(x) % 16 == 0 && dim % 8 == 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) load(i, held[i]);
  }
  // The bits of the largest magnitude in this warp's units; a NaN's are larger than all.
  __device__ __forceinline__ uint32_t largest() const {
    uint32_t most = 0;
    const auto see = [&](const float (&v)[8]) {
#pragma unroll
      for (int k = 0; k < 8; ++k) most = max(most, __float_as_uint(v[k]) & 0x7fffffffu);
    };
#pragma unroll
    for (int i = 0; i < kHeld; ++i) see(held[i]);
    for (int i = kHeld; i * kFfnThreads < units; ++i) {
      float v[8];
      load(i, v);
      see(v);
    }
    return __reduce_max_sync(0xffffffffu, most);
  }
  // f(unit, its eight values in ascending columns)
  template <typename F>
  __device__ __forceinline__ void each(F f) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int unit = threadIdx.x + i * kFfnThreads;
      if (unit < units) f(unit, held[i]);
    }
    for (int unit = threadIdx.x + kHeld * kFfnThreads; unit < units; unit += kFfnThreads) {
      float v[8];
      load(unit / kFfnThreads, v);
      f(unit, v);
    }
  }
};

}  // namespace rocket::cuda
