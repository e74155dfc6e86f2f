// The routed experts that a device's slots do not hold, in places of the host's memory, pinned so that the device reads
// and writes them by itself (exclusive tiers, ops/slot_cache.h). A place holds any expert.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "experts/host_bank.h"
#include "ops/slot_fetch.h"

namespace rocket {

class SplitBank {
 public:
  // Copies an expert into the device's slot; the bytes at `from` are free again when it returns.
  using ToSlot = std::function<void(int32_t slot, const char* from, int64_t bytes)>;

  // Takes the memory. tables: of each MoE layer, for formats and shapes. in_slots and in_places: keys (layer * experts of a
  // layer + expert), as of SlotState; each expert is in one of them. Throws what the memory throws.
  SplitBank(const HostBank::Tables& tables, std::vector<int32_t> in_slots, std::vector<int32_t> in_places,
            BankMemory memory);
  ~SplitBank();
  SplitBank(const SplitBank&) = delete;
  SplitBank& operator=(const SplitBank&) = delete;

  // Once. Reads the experts of the slots first, a few at a time in the first places, then those of the places, in order
  // and with progress as of HostBank. Throws what the store and to_slot throw.
  void fill(const ExpertStore& store, std::span<const BankPiece> order, ThreadPool& pool,
            const ToSlot& to_slot, const HostBank::Progress& progress);

  // Where each place lies, for the device.
  const std::vector<const char*>& places() const { return known_; }
  // For the host.
  char* place(int32_t index) const { return places_[static_cast<size_t>(index)]; }

 private:
  void read(const ExpertStore& store, std::span<const BankPiece> pieces, ThreadPool& pool);
  void fill_slots(const ExpertStore& store, std::span<const BankPiece> order, ThreadPool& pool,
                  const ToSlot& to_slot, const HostBank::Progress& progress);
  void fill_places(const ExpertStore& store, std::span<const BankPiece> order, ThreadPool& pool,
                   const HostBank::Progress& progress);
  void give_back();
  size_t key(const BankPiece& piece) const {
    return static_cast<size_t>(piece.layer) * experts_a_layer_ + static_cast<size_t>(piece.expert);
  }

  BankMemory memory_;
  size_t experts_a_layer_ = 0;
  std::vector<SlotLayout> layouts_;  // [layers * experts]
  std::vector<int32_t> in_slots_, in_places_;
  int64_t place_bytes_ = 0, done_ = 0, total_ = 0;
  std::vector<char*> chunks_, places_;
  std::vector<const char*> known_;
  std::vector<char*> at_;  // [layers * experts] where each is read to; null: not now
};

// What cuda::swap_slots() does with a wave's bytes, where slots and places are the host's.
void swap_on_host(const SlotCache& cache, const SlotBank& bank, int32_t wave);

}  // namespace rocket
