// Where tensors live: the host's memory, or a device's.
#pragma once

#include <cstddef>

namespace rocket {

// Calls on one space take effect in order, and in order with the ops that are issued on it. Only read() waits for
// its result.
class MemorySpace {
 public:
  virtual ~MemorySpace() = default;

  // At least `bytes` bytes, zeroed, 256-byte aligned. Throws PlanError that names `what`.
  virtual void* allocate(size_t bytes, const char* what) = 0;
  virtual void release(void* memory) = 0;

  virtual void copy(void* to, const void* from, size_t bytes) = 0;    // both in this space
  virtual void read(void* host, const void* from, size_t bytes) = 0;  // from this space
  virtual void write(void* to, const void* host, size_t bytes) = 0;   // into this space; `host` is free again
  virtual bool host() const = 0;  // whether the CPU can follow its pointers
};

MemorySpace& host_memory();

}  // namespace rocket
