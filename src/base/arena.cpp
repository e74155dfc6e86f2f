#include "base/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/memory.h"

namespace rocket {
namespace {

constexpr size_t kHuge = 2 << 20;

}  // namespace

Arena::Arena(size_t bytes, const char* what) : capacity_((bytes + kHuge - 1) / kHuge * kHuge), what_(what) {
  if (bytes == 0) {
    capacity_ = 0;
    return;
  }
  // Mapped with room to spare, so that the used part can start on a huge page.
  void* p = mmap(nullptr, capacity_ + kHuge, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    throw PlanError(
        std::string(what_) + ": the system refused " + format_bytes(static_cast<int64_t>(capacity_)),
        "lower --max-context, or free memory");
  }
  char* raw = static_cast<char*>(p);
  base_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(raw) + kHuge - 1) / kHuge * kHuge);
  if (base_ > raw) munmap(raw, static_cast<size_t>(base_ - raw));
  const size_t tail = static_cast<size_t>(raw + capacity_ + kHuge - (base_ + capacity_));
  if (tail > 0) munmap(base_ + capacity_, tail);
#ifdef MADV_HUGEPAGE
  if (bytes >= kHuge) madvise(base_, capacity_, MADV_HUGEPAGE);
#endif
}

Arena Arena::measuring() {
  Arena arena;
  arena.capacity_ = SIZE_MAX / 2;
  arena.what_ = "measuring arena";
  return arena;
}

Arena::Arena(size_t bytes, const char* what, MemorySpace& memory) {
  if (memory.host()) {
    *this = Arena(bytes, what);
    return;
  }
  capacity_ = bytes;
  what_ = what;
  if (bytes > 0) base_ = static_cast<char*>(memory.allocate(bytes, what));
  memory_ = &memory;
}

Arena::~Arena() {
  if (!base_) return;
  if (memory_) {
    memory_->release(base_);
  } else {
    munmap(base_, capacity_);
  }
}

Arena::Arena(Arena&& other) noexcept {
  *this = std::move(other);
}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(capacity_, other.capacity_);
  std::swap(used_, other.used_);
  std::swap(peak_, other.peak_);
  std::swap(what_, other.what_);
  std::swap(memory_, other.memory_);
  return *this;
}

void* Arena::take_bytes(size_t bytes) {
  const size_t size = padded(bytes);
  if (size > capacity_ - used_) {
    throw PlanError(std::string(what_) + ": planned " + std::to_string(capacity_) + " bytes, needs " +
                    std::to_string(used_ + size));
  }
  void* p = base_ + used_;
  used_ += size;
  peak_ = std::max(peak_, used_);
  return p;
}

}  // namespace rocket
