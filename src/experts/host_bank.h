// Every routed expert that a rank owns in slot layout in the host's memory, pinned so that a device reads it by itself.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "experts/store.h"

namespace rocket {

// One tensor and its scales.
struct BankPiece {
  int32_t layer, expert, piece;
};

// Memory of the host that a device may read. take() throws PlanError or DeviceError.
struct BankMemory {
  std::function<char*(size_t bytes)> take;
  std::function<const char*(char* memory)> known_as;  // the address that the device knows it by
  std::function<void(char* memory)> give_back;
};

class HostBank {
 public:
  using Progress = std::function<void(int64_t done, int64_t total)>;
  using Tables = std::vector<std::span<const ExpertWeights>>;

  // tables: of each MoE layer, for formats and shapes. order: all pieces of the experts that are to be there, in the
  // order in which they are read from the store, by all threads of the pool and a bounded number at a time. `progress`
  // (may be empty) gets the bytes read and in all, 0 while memory is taken; what it throws stops the fill. Throws what the
  // store and the memory throw.
  HostBank(const Tables& tables, const ExpertStore& store, std::span<const BankPiece> order,
           BankMemory memory, ThreadPool& pool, const Progress& progress);
  ~HostBank();
  HostBank(const HostBank&) = delete;
  HostBank& operator=(const HostBank&) = delete;

  static int64_t bytes(const Tables& tables, std::span<const BankPiece> order);

  // [layers * experts] where each expert lies, for the device; null: it is not there.
  const std::vector<const char*>& experts() const { return experts_; }

 private:
  size_t index(const BankPiece& p) const {
    return static_cast<size_t>(p.layer) * experts_a_layer_ + static_cast<size_t>(p.expert);
  }
  void take(std::span<const size_t> wanted, const Progress& progress);
  void fill(const ExpertStore& store, std::span<const BankPiece> order, ThreadPool& pool,
            const Progress& progress);
  void give_back();

  BankMemory memory_;
  size_t experts_a_layer_ = 0;
  std::vector<SlotLayout> layouts_;  // [layers * experts]
  std::vector<char*> places_;        // for the host
  std::vector<const char*> experts_;
  std::vector<char*> chunks_;  // of whole experts
  int64_t total_ = 0;
};

}  // namespace rocket
