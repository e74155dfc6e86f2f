#include "base/memory_space.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/memory.h"

namespace rocket {
namespace {

constexpr size_t kAlignment = 256;

class HostMemory : public MemorySpace {
 public:
  void* allocate(size_t bytes, const char* what) override {
    const size_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* memory = std::aligned_alloc(kAlignment, size);
    if (!memory) {
      throw PlanError(std::string(what) + ": the system refused " +
                      format_bytes(static_cast<int64_t>(bytes)));
    }
    std::memset(memory, 0, size);
    return memory;
  }
  void release(void* memory) override { std::free(memory); }
  void copy(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void read(void* host, const void* from, size_t bytes) override { std::memcpy(host, from, bytes); }
  void write(void* to, const void* host, size_t bytes) override { std::memcpy(to, host, bytes); }
  bool host() const override { return true; }
};

}  // namespace

MemorySpace& host_memory() {
  static HostMemory memory;
  return memory;
}

}  // namespace rocket
