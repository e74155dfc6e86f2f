// Experts in a bounded set of slots of the host's memory, fetched from a store when they are asked for.
//
//   stream.begin_step();
//   for each MoE layer:
//     const int32_t waves = stream.find(layer, ids);
//     for (wave …) compute the pairs whose id is not -1 in stream.fetch(wave, pool), with the layer's table
//
// The table of a layer has an entry for each expert, which points into the expert's slot while that is in a wave that
// has been fetched. For ops that are done when their call returns: fetching a wave overwrites slots of earlier ones.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/arena.h"
#include "base/thread_pool.h"
#include "experts/cache.h"
#include "experts/store.h"

namespace rocket {

class ExpertStream {
 public:
  // tables: of each MoE layer, with formats, shapes and global scales; they outlive the stream.
  ExpertStream(const CacheConfig& config, std::unique_ptr<ExpertStore> store,
               std::vector<std::span<ExpertWeights>> tables);
  ~ExpertStream();

  // Bytes of a slot that holds any of the experts.
  static int64_t slot_bytes(std::span<const ExpertWeights> table);

  void begin_step();
  // The choices of all rows of a step in a layer, -1 is skipped; they must stay until the last wave is fetched. Returns
  // the number of waves, at least 1.
  int32_t find(int32_t layer, std::span<const int32_t> ids);
  // Brings a wave's misses into their slots; waves in order. Returns the choices that belong to the wave, -1 in place of
  // the others. Throws what the store throws: then nothing that was not fetched counts as there.
  const int32_t* fetch(int32_t wave, ThreadPool& pool);

  const ExpertCache& cache() const { return cache_; }
  const ExpertStore& store() const { return *store_; }
  int64_t streamed_bytes() const { return streamed_bytes_; }
  double fetch_seconds() const { return fetch_seconds_; }  // while bytes were on their way

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
