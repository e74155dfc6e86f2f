#include "fabric/row_exchange.h"

#include <cstring>
#include <utility>

#include "base/error.h"

namespace rocket {

RowExchange::RowExchange(Fabric& fabric, ExpertSplit split, int32_t topk, int32_t hidden,
                         std::vector<int32_t> numbers)
    : fabric_(fabric), split_(std::move(split)), topk_(topk), hidden_(hidden), numbers_(std::move(numbers)) {}

int64_t RowExchange::buffer_floats(int32_t ranks, int64_t rows, int64_t topk, int64_t hidden) {
  return ranks > 1 ? rows * topk * hidden + ranks * kStampFloats : 0;
}

void RowExchange::begin_step() {
  ++step_;
}

RowExchange::Stamp RowExchange::stamp() const {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const int32_t id : ids_) hash = (hash ^ static_cast<uint32_t>(id)) * 0x100000001b3u;
  return {step_, static_cast<uint64_t>(numbers_[static_cast<size_t>(layer_)]),
          static_cast<uint64_t>(ids_.size()) / static_cast<uint64_t>(topk_), hash};
}

void RowExchange::expect_blocks(int32_t layer, std::span<const int32_t> ids, float* buffer) {
  layer_ = layer;
  ids_ = ids;
  buffer_ = buffer;
  rows_.assign(static_cast<size_t>(split_.ranks), 0);
  for (const int32_t id : ids) ++rows_[static_cast<size_t>(split_.owner_of(layer, id))];
  at_.clear();
  int64_t at = 0;
  std::vector<RowBlock> blocks;
  for (int32_t r = 0; r < split_.ranks; ++r) {
    const int64_t floats = kStampFloats + rows_of(r) * hidden_;
    at_.push_back(at);
    if (r != fabric_.rank() && rows_of(r) > 0)
      blocks.push_back({r, rows_of(r), buffer + at, floats * static_cast<int64_t>(sizeof(float))});
    at += floats;
  }
  fabric_.receive_rows(blocks, "rows of layer " + std::to_string(numbers_[static_cast<size_t>(layer)]) +
                                   " in step " + std::to_string(step_));
}

void RowExchange::send_block() {
  const int32_t me = fabric_.rank();
  const int64_t rows = rows_of(me);
  if (rows == 0) return;
  const Stamp mine = stamp();
  std::memcpy(block(me), &mine, sizeof mine);
  fabric_.send_rows(
      {me, rows, block(me), (kStampFloats + rows * hidden_) * static_cast<int64_t>(sizeof(float))});
}

void RowExchange::wait_blocks() {
  fabric_.wait_rows();
  const Stamp expected = stamp();
  for (int32_t r = 0; r < split_.ranks; ++r) {
    if (r != fabric_.rank() && rows_of(r) > 0) check(r, expected);
  }
}

void RowExchange::check(int32_t rank, const Stamp& expected) const {
  Stamp found{};
  std::memcpy(&found, block(rank), sizeof found);
  if (found == expected) return;
  const auto shown = [](const Stamp& s) {
    return "step " + std::to_string(s.step) + ", layer " + std::to_string(s.layer) + ", " +
           std::to_string(s.rows) + " rows, routing " + std::to_string(s.choices % 1'000'000);
  };
  throw DeviceError("boosters: out of step: rank " + std::to_string(fabric_.rank()) + " expected rows of " +
                        shown(expected) + " from rank " + std::to_string(rank) + ", found " + shown(found),
                    "start the same build of Rocket with the same fuel on all ranks");
}

void RowExchange::begin(int32_t layer, std::span<const int32_t> ids, int32_t* own, float* buffer) {
  for (size_t i = 0; i < ids.size(); ++i) own[i] = owns(layer, ids[i]) ? ids[i] : -1;
  expect_blocks(layer, ids, buffer);
}

void RowExchange::send(const float* routed) {
  float* to = block(fabric_.rank()) + kStampFloats;
  for (size_t i = 0; i < ids_.size(); ++i) {
    if (!owns(layer_, ids_[i])) continue;
    std::memcpy(to, routed + static_cast<int64_t>(i) * hidden_, static_cast<size_t>(hidden_) * sizeof(float));
    to += hidden_;
  }
  send_block();
}

void RowExchange::finish(float* routed) {
  wait_blocks();
  std::vector<const float*> from;
  for (int32_t r = 0; r < split_.ranks; ++r) from.push_back(block(r) + kStampFloats);
  for (size_t i = 0; i < ids_.size(); ++i) {
    const int32_t owner = split_.owner_of(layer_, ids_[i]);
    if (owner == fabric_.rank()) continue;
    const float*& next = from[static_cast<size_t>(owner)];
    std::memcpy(routed + static_cast<int64_t>(i) * hidden_, next,
                static_cast<size_t>(hidden_) * sizeof(float));
    next += hidden_;
  }
}

}  // namespace rocket
