// Prints the compute capability of each GPU that CUDA sees, such as 9.0, a line each: see CudaChoice.cmake.
#include <cuda_runtime.h>

#include <cstdio>

int main() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return 1;
  for (int i = 0; i < count; ++i) {
    int major = 0;
    int minor = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, i) != cudaSuccess) return 1;
    if (cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, i) != cudaSuccess) return 1;
    std::printf("%d.%d\n", major, minor);
  }
  return 0;
}
