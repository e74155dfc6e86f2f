// Every routed expert of a model in slot layout in the host's memory, pinned so that a device reads it by itself.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/arena.h"
#include "base/thread_pool.h"
#include "experts/store.h"

namespace rocket {

// One tensor and its scales.
struct BankPiece {
  int32_t layer, expert, piece;
};

// How memory is pinned. Both throw PlanError or DeviceError.
struct BankPins {
  std::function<const char*(char* memory, size_t bytes)>
      pin;  // returns the address that the device knows it by
  std::function<void(char* memory)> unpin;
};

class HostBank {
 public:
  using Progress = std::function<void(int64_t done, int64_t total)>;
  using Tables = std::vector<std::span<const ExpertWeights>>;

  // tables: of each MoE layer, for formats and shapes. order: all pieces, in the order in which they are read from the
  // store, by all threads of the pool and a bounded number at a time. `progress` (may be empty) gets the bytes done and
  // in all; what it throws stops the fill. Throws what the store throws.
  HostBank(const Tables& tables, const ExpertStore& store, std::span<const BankPiece> order, BankPins pins,
           ThreadPool& pool, const Progress& progress);
  ~HostBank();
  HostBank(const HostBank&) = delete;
  HostBank& operator=(const HostBank&) = delete;

  static int64_t bytes(const Tables& tables);  // of all experts

  // [layers * experts] where each expert lies, for the device.
  const std::vector<const char*>& experts() const { return experts_; }

 private:
  struct Chunk {
    Arena memory;
    char* base = nullptr;
    size_t bytes = 0, first = 0, end = 0;  // experts [first, end)
    bool pinned = false;
  };
  void lay_out(const Tables& tables);
  void fill(const ExpertStore& store, std::span<const BankPiece> order, ThreadPool& pool,
            const Progress& progress);
  void pin(const Progress& progress);
  void unpin();

  BankPins pins_;
  size_t experts_a_layer_ = 0;
  std::vector<SlotLayout> layouts_;  // [layers * experts]
  std::vector<char*> places_;        // for the host
  std::vector<const char*> experts_;
  std::vector<Chunk> chunks_;
  int64_t total_ = 0;
};

}  // namespace rocket
