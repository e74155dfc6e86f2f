// BF16 products of many rows through cuBLASLt, which is loaded when a device is opened.
//
// Its header is found at build time in the CUDA toolkit or in the nvidia-cublas wheel, its library at run time beside
// that header or by the loader's own search. Without either, products of many rows run in kernels of our own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "ops/exec.h"

namespace rocket {

class CublasLt;
struct CublasLtDeleter {
  void operator()(CublasLt* lt) const;
};
using CublasLtHandle = std::unique_ptr<CublasLt, CublasLtDeleter>;

// Null where it cannot be used; `why` then says what is missing.
CublasLtHandle open_cublas_lt(std::string* why);

constexpr size_t kCublasWorkspaceBytes = 32 << 20;

// y[r][o] = sum_i x[r][i] w[o][i] with float32 sums; with `add`, y[r][o] += that.
struct LibraryProduct {
  const uint16_t* x;  // BF16 [rows, in], rows ldx apart; x, w and their rows at multiples of 16 bytes
  int64_t ldx;
  const uint16_t* w;  // BF16 [out, in]
  int64_t out, in, rows;
  float* y;  // [rows, out], rows ldy apart
  int64_t ldy;
  bool add = false;
};

// `workspace` has kCublasWorkspaceBytes of device memory, at a multiple of 256 bytes. False, with nothing issued, if there is no cuBLASLt or it has no
// algorithm for this shape. The same shape, with y aligned alike, always runs the same algorithm.
bool cublas_lt_product(const LibraryProduct& p, void* workspace, Exec& exec);

}  // namespace rocket
