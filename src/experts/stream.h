// Experts in a bounded set of slots, brought there from somewhere else when they are asked for.
//
//   stream.begin_step();
//   stream.begin_pass();
//   for each MoE layer:
//     the router's choices, with router params that have look_up() as `slots`
//     const int32_t waves = stream.find(layer, ids, exec);
//     for (wave …) compute the pairs whose id is not -1 in stream.fetch(wave, exec), with the layer's table
//   stream.end_pass();
//
// The table of a layer has an entry for each expert, which points into the expert's slot while that is in a wave that
// has been fetched.
//
// Hints: hint(layer, experts) names experts that the layer's next look-up may ask for. Whether, and when, any of them is
// fetched changes no result: a hint uses a link that demand leaves idle, and slots as src/experts/cache.h says.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/arena.h"
#include "experts/cache.h"
#include "experts/hint_reads.h"
#include "experts/store.h"
#include "ops/exec.h"

namespace rocket {

struct SlotCache;  // ops/slot_cache.h

// Of hints that were taken: each has a slot, or was useful, late or wasted.
struct HintBytes {
  int64_t useful = 0;  // there when they were demanded
  int64_t late = 0;    // demanded before they were there, and waited for
  int64_t wasted = 0;  // read, and made way unused
};

struct StreamStats {
  std::vector<CacheCounters> layers;  // MoE layers
  int64_t streamed_bytes = 0;         // of misses
  double fetch_seconds = 0;           // while somebody waited for bytes
  HintBytes hint_bytes = {};
  int64_t hints_on_their_way = 0, hints_there = 0;  // that have a slot and were not demanded yet
};

class ExpertStream {
 public:
  virtual ~ExpertStream() = default;

  virtual const char* store() const = 0;  // where experts are that have no slot
  // What the router looks its choices up in, in the same launch; null: find() does it.
  virtual const SlotCache* look_up() const { return nullptr; }

  virtual void begin_step() = 0;
  // Around each pass of a step, recorded or not; before its results are used. Throws what went wrong with experts that the
  // pass asked for by itself, and may wait for it.
  virtual void begin_pass() {}
  virtual void end_pass() {}
  // The choices of all rows of a step in a layer, in the ops' memory, -1 is skipped; they must stay until the last wave
  // is fetched. Returns the number of waves, at least 1.
  virtual int32_t find(int32_t layer, std::span<const int32_t> ids, Exec& exec) = 0;
  // Brings a wave's misses into their slots; waves in order. Returns the choices that belong to the wave, -1 in place of
  // the others, in the ops' memory.
  virtual const int32_t* fetch(int32_t wave, Exec& exec) = 0;
  virtual StreamStats stats() = 0;

  // The most likely first. False: this stream takes no hints. Throws InputError, DeviceError.
  virtual bool hint(int32_t /*layer*/, std::span<const int32_t> /*experts*/) { return false; }
};

// Bytes of a slot that holds any of the experts.
int64_t slot_bytes_of(std::span<const ExpertWeights> table);

// In the host's memory, from a store, for ops that are done when their call returns: fetching a wave overwrites slots of
// earlier ones.
//
// A hinted expert is wished for until its layer's next look-up. Wishes get slots in the order in which they came, while
// fewer than kMostHints are on their way: in hint(), begin_step() and once the last wave of a look-up is fetched. In
// hint() and in begin_step() those that are there are kept from other hints. From a look-up with something to fetch to
// its last wave, no hinted read is begun and no slot is given: so demand waits for one hinted expert at most, and once
// that has come to its end nothing but demand writes into slots.
//
// A look-up that asks for a hinted expert which is not there takes it over: it waits for the read under way, else reads
// it itself. A hinted read that fails is dropped, and its wish with it.
class HostStream : public ExpertStream {
 public:
  static constexpr int kMostHints = 8;

  // tables: of each MoE layer, with formats, shapes and global scales; they outlive the stream.
  HostStream(const CacheConfig& config, std::unique_ptr<ExpertStore> store,
             std::vector<std::span<ExpertWeights>> tables);
  ~HostStream() override;

  const char* store() const override { return store_->name(); }
  void begin_step() override;
  int32_t find(int32_t layer, std::span<const int32_t> ids, Exec& exec) override;
  // Throws what the store throws: then nothing that was not fetched counts as there.
  const int32_t* fetch(int32_t wave, Exec& exec) override;
  StreamStats stats() override;
  bool hint(int32_t layer, std::span<const int32_t> experts) override;

  const ExpertCache& cache() const { return cache_; }

 private:
  using Hinted = std::shared_ptr<HintedRead>;
  struct Late {
    size_t wave;
    int32_t slot;
    Hinted read;
  };

  void forget_missing();
  void take_over_hints();
  void bring(size_t wave);
  void place(int32_t layer, int32_t expert, int32_t slot);
  void unplace(const ExpertKey& key);
  char* slot(int32_t index) { return slots_base_ + int64_t{index} * slot_bytes_; }
  const SlotLayout& layout(int32_t layer, int32_t expert) const {
    return layouts_[static_cast<size_t>(layer)][static_cast<size_t>(expert)];
  }

  // Of hints (stream_hints.cpp).
  size_t key(int32_t layer, int32_t expert) const {
    return static_cast<size_t>(layer) * member_.size() + static_cast<size_t>(expert);
  }
  void check(int32_t layer, std::span<const int32_t> experts) const;
  void collect_hints();
  void give_slots();
  void begin_read(const ExpertKey& wish, const HintedSlot& taken);
  void keep_wishes();
  void drop_wishes(int32_t layer);
  void waste_hint(int32_t slot);

  ExpertCache cache_;
  std::shared_ptr<const ExpertStore> store_;
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
  std::vector<Late> late_;          // hinted, demanded, not there
  std::vector<ExpertKey> missing_;  // not fetched yet, the next last
  std::vector<bool> member_;        // [experts] of the wave
  std::vector<int32_t> wave_ids_;
  std::vector<ExpertRead> reads_;

  std::vector<ExpertKey> wishes_;  // in the order in which they came
  std::vector<bool> wished_;       // [layers * experts] else the wish is over
  std::vector<Hinted> hinted_;     // [slots] the hint that has the slot, not demanded yet; null: none
  int on_their_way_ = 0;
  HintBytes hint_bytes_;
  HintReads hint_reads_;
};

}  // namespace rocket
