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

  // Floats of the buffer that a step of so many rows needs.
  static int64_t buffer_floats(int32_t ranks, int64_t rows, int64_t topk, int64_t hidden);

  bool owns(int32_t layer, int32_t expert) const { return split_.owner_of(layer, expert) == fabric_.rank(); }

  void begin_step();
  // ids: [rows, topk]. own: out [rows, topk]. The buffer and ids must stay until finish().
  void begin(int32_t layer, std::span<const int32_t> ids, int32_t* own, float* buffer);
  void send(const float* routed);  // [rows, topk, hidden]
  void finish(float* routed);

 private:
  static constexpr int64_t kStampFloats = 16;
  struct Stamp {
    uint64_t step, layer, rows, choices;
    bool operator==(const Stamp&) const = default;
  };
  Stamp stamp() const;
  void check(int32_t rank, const Stamp& expected) const;
  float* block(int32_t rank) const { return buffer_ + at_[static_cast<size_t>(rank)]; }

  Fabric& fabric_;
  const ExpertSplit split_;
  const int32_t topk_, hidden_;
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
