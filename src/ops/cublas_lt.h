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

// y[r][o] = sum_i x[r][i] w[o][i] for BF16 x [rows, in], ldx apart, and BF16 w [out, in]; float32 sums and y, rows ldy
// apart. `workspace` has kCublasWorkspaceBytes of device memory. False, with nothing issued, if there is no cuBLASLt or
// it has no algorithm for this shape. The same shape always runs the same algorithm.
bool cublas_lt_product(const uint16_t* x, int64_t ldx, const uint16_t* w, int64_t out, int64_t in,
                       int64_t rows, float* y, int64_t ldy, void* workspace, Exec& exec);

}  // namespace rocket
