// Experts in a bounded set of slots, brought there from somewhere else when they are asked for.
//
//   stream.begin_step();
//   for each MoE layer:
//     the router's choices, with router params that have look_up() as `slots`
//     const int32_t waves = stream.find(layer, ids, exec);
//     for (wave …) compute the pairs whose id is not -1 in stream.fetch(wave, exec), with the layer's table
//
// The table of a layer has an entry for each expert, which points into the expert's slot while that is in a wave that
// has been fetched.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/arena.h"
#include "experts/cache.h"
#include "experts/store.h"
#include "ops/exec.h"

namespace rocket {

struct SlotCache;  // ops/slot_cache.h

struct StreamStats {
  std::vector<CacheCounters> layers;  // MoE layers
  int64_t streamed_bytes = 0;
  double fetch_seconds = 0;  // while bytes were on their way
};

class ExpertStream {
 public:
  virtual ~ExpertStream() = default;

  virtual const char* store() const = 0;  // where experts are that have no slot
  // What the router looks its choices up in, in the same launch; null: find() does it.
  virtual const SlotCache* look_up() const { return nullptr; }

  virtual void begin_step() = 0;
  // The choices of all rows of a step in a layer, in the ops' memory, -1 is skipped; they must stay until the last wave
  // is fetched. Returns the number of waves, at least 1.
  virtual int32_t find(int32_t layer, std::span<const int32_t> ids, Exec& exec) = 0;
  // Brings a wave's misses into their slots; waves in order. Returns the choices that belong to the wave, -1 in place of
  // the others, in the ops' memory.
  virtual const int32_t* fetch(int32_t wave, Exec& exec) = 0;
  virtual StreamStats stats() = 0;
};

// Bytes of a slot that holds any of the experts.
int64_t slot_bytes_of(std::span<const ExpertWeights> table);

// In the host's memory, from a store, for ops that are done when their call returns: fetching a wave overwrites slots of
// earlier ones.
class HostStream : public ExpertStream {
 public:
  // tables: of each MoE layer, with formats, shapes and global scales; they outlive the stream.
  HostStream(const CacheConfig& config, std::unique_ptr<ExpertStore> store,
             std::vector<std::span<ExpertWeights>> tables);
  ~HostStream() override;

  const char* store() const override { return store_->name(); }
  void begin_step() override;
  int32_t find(int32_t layer, std::span<const int32_t> ids, Exec& exec) override;
  // Throws what the store throws: then nothing that was not fetched counts as there.
  const int32_t* fetch(int32_t wave, Exec& exec) override;
  StreamStats stats() override { return {cache_.layer_counters(), streamed_bytes_, fetch_seconds_}; }

  const ExpertCache& cache() const { return cache_; }

 private:
  void forget_missing();
  void bring(std::span<const ExpertFetch> fetches);
  void* slot(int32_t index) { return slots_base_ + int64_t{index} * slot_bytes_; }

  ExpertCache cache_;
  std::unique_ptr<ExpertStore> store_;
  std::vector<std::span<ExpertWeights>> tables_;
  std::vector<std::vector<SlotLayout>> layouts_;  // [layers][experts]
  int64_t slot_bytes_ = 0, streamed_bytes_ = 0;
  double fetch_seconds_ = 0;
  Arena slots_;
  char* slots_base_ = nullptr;

  // Of the look-up in hand.
  int32_t layer_ = 0;
  std::span<const int32_t> ids_;
  std::span<const ExpertWave> waves_;
  std::vector<ExpertKey> missing_;  // not fetched yet, the next last
  std::vector<bool> member_;        // [experts] of the wave
  std::vector<int32_t> wave_ids_;
  std::vector<ExpertRead> reads_;
};

}  // namespace rocket
