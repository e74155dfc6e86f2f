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

}  // namespace rocket::cuda
