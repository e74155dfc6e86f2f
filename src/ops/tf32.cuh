// Products of float32 numbers by tensor cores that keep float32's precision: a number is cut into two of eleven bits each,
// and three of the four products of these are added up in float32. What is left out is as small as a float32 rounding
// of the product. A number that fits into eleven bits (bfloat16 does) is its own first piece.
#pragma once

#include "ops/cuda.cuh"

namespace rocket::cuda {

// Tensor cores look at the leading 19 bits only, so `low` needs no rounding. A NaN gives a NaN in `low`.
__device__ __forceinline__ void cut(float x, uint32_t& high, uint32_t& low) {
  high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  low = __float_as_uint(x - __uint_as_float(high));
}

// The same number, but what follows from it is not computed ahead, outside of a loop.
__device__ __forceinline__ float here(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

// c += a * b for 16 x 8 times 8 x 8. With g = lane / 4 and j = lane % 4 a lane has of a: (g, j), (g + 8, j), (g, j + 4),
// (g + 8, j + 4); of b: (j, g), (j + 4, g); of c: (g, 2j), (g, 2j + 1), (g + 8, 2j), (g + 8, 2j + 1).
__device__ __forceinline__ void multiply_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four columns of a's rows g and g + 8, cut, for two products. The columns of 16 are dealt out so that lane j has 4j … 4j + 3:
// product 0 takes the first two of every lane, product 1 the others. With b dealt out in the same way that is a sum
// in another order.
struct CutQuads {
  uint32_t high[2][4], low[2][4];
  __device__ __forceinline__ CutQuads(const float4& a, const float4& b) {
    cut(here(a.x), high[0][0], low[0][0]);
    cut(here(b.x), high[0][1], low[0][1]);
    cut(here(a.y), high[0][2], low[0][2]);
    cut(here(b.y), high[0][3], low[0][3]);
    cut(here(a.z), high[1][0], low[1][0]);
    cut(here(b.z), high[1][1], low[1][1]);
    cut(here(a.w), high[1][2], low[1][2]);
    cut(here(b.w), high[1][3], low[1][3]);
  }
};

}  // namespace rocket::cuda
