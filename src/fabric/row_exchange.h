// The exchange of a MoE layer: what every rank has computed with its own experts goes, unsummed, to every other, so that
// all of them add the same rows in the same order.
//
//   own   = exchange.begin(layer, ids)      the choices of this rank's experts, -1 for others; receives are posted
//   …       routed[r][j] for the choices that are its own
//           exchange.send(routed)           packed by rank, each rank's rows in the order of (row, choice)
//   …       anything that needs no rows of others
//           exchange.finish(routed)         waits, and puts the others' rows into their places
//
// All ranks route the same rows and so know without asking what comes from where. A block begins with a stamp of step,
// layer and choices: a rank that is out of step is found by the first block it sends.
//
// This one is for ops of the host. Those of a device issue the same calls, and end_step() waits for what was issued
// (device_exchange.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fabric/fabric.h"
#include "fabric/split.h"

namespace rocket {

class RowExchange {
 public:
  // numbers: the model's of its MoE layers, for messages. The fabric outlives the exchange.
  RowExchange(Fabric& fabric, ExpertSplit split, int32_t topk, int32_t hidden, std::vector<int32_t> numbers);
  virtual ~RowExchange() = default;
  RowExchange(const RowExchange&) = delete;
  RowExchange& operator=(const RowExchange&) = delete;

  // Floats of the buffer that a step of so many rows needs.
  static int64_t buffer_floats(int32_t ranks, int64_t rows, int64_t topk, int64_t hidden);

  bool owns(int32_t layer, int32_t expert) const { return split_.owner_of(layer, expert) == fabric_.rank(); }
  // [experts] which rank has each expert of a layer, in the ops' memory, where the router fills `own`; null: begin() does.
  virtual const int32_t* owners(int32_t /*layer*/) const { return nullptr; }

  virtual void begin_step();
  // ids: [rows, topk]. own: out [rows, topk]. The buffer and ids must stay until finish().
  virtual void begin(int32_t layer, std::span<const int32_t> ids, int32_t* own, float* buffer);
  virtual void send(const float* routed);  // [rows, topk, hidden]
  virtual void finish(float* routed);
  // What went wrong between ranks is thrown here at the latest, as DeviceError.
  virtual void end_step() {}

 protected:
  // Before a block's rows. They lie one behind the other, and blocks in the order of ranks.
  static constexpr int64_t kStampFloats = 16;

  // The blocks alone, in the host's memory: receives are posted; this rank's, whose rows are in their places, is sent;
  // those of the others are there, and theirs.
  void expect_blocks(int32_t layer, std::span<const int32_t> ids, float* buffer);
  void send_block();
  void wait_blocks();

  Fabric& fabric_;
  const ExpertSplit split_;
  const int32_t topk_, hidden_;

 private:
  struct Stamp {
    uint64_t step, layer, rows, choices;
    bool operator==(const Stamp&) const = default;
  };
  static_assert(sizeof(Stamp) <= kStampFloats * sizeof(float));
  Stamp stamp() const;
  void check(int32_t rank, const Stamp& expected) const;
  float* block(int32_t rank) const { return buffer_ + at_[static_cast<size_t>(rank)]; }
  int64_t rows_of(int32_t rank) const { return rows_[static_cast<size_t>(rank)]; }

  const std::vector<int32_t> numbers_;
  uint64_t step_ = 0;

  // Of the exchange in hand.
  int32_t layer_ = 0;
  std::span<const int32_t> ids_;
  float* buffer_ = nullptr;
  std::vector<int64_t> rows_;  // [ranks]
  std::vector<int64_t> at_;    // [ranks] where each one's block begins, in floats
};

}  // namespace rocket
