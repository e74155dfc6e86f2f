// Memory for tensors: one aligned block, handed out from the front.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/memory_space.h"

namespace rocket {

// A fixed block of zeroed memory, 2 MiB aligned where large (huge pages asked for), with a bump pointer.
// take() past the end throws PlanError: sizes come from the plan, so that is a fault of the plan.
class Arena {
 public:
  Arena() = default;
  Arena(size_t bytes, const char* what);                       // `what` names the arena in errors
  Arena(size_t bytes, const char* what, MemorySpace& memory);  // in that memory, if it is not the host's
  // An arena without memory: take() gives addresses that must not be used, peak() tells how much is needed.
  static Arena measuring();
  ~Arena();
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;

  void* take_bytes(size_t bytes);  // 64-byte aligned
  template <typename T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(static_cast<size_t>(count) * sizeof(T)));
  }

  size_t mark() const { return used_; }
  void release(size_t mark) { used_ = mark; }
  size_t used() const { return used_; }
  size_t peak() const { return peak_; }
  size_t capacity() const { return capacity_; }
  const char* data() const { return base_; }

  // Bytes that take_bytes(bytes) uses up.
  static constexpr size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

 private:
  char* base_ = nullptr;
  size_t capacity_ = 0, used_ = 0, peak_ = 0;
  const char* what_ = "";
  MemorySpace* memory_ = nullptr;  // that base_ is from, null for the host's
};

// Gives back at scope exit what was taken from an arena inside the scope.
class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~ArenaScope() { arena_.release(mark_); }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena& arena_;
  size_t mark_;
};

}  // namespace rocket
