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

void RowExchange::begin(int32_t layer, std::span<const int32_t> ids, int32_t* own, float* buffer) {
  layer_ = layer;
  ids_ = ids;
  buffer_ = buffer;
  rows_.assign(static_cast<size_t>(split_.ranks), 0);
  for (size_t i = 0; i < ids.size(); ++i) {
    const int32_t owner = split_.owner_of(layer, ids[i]);
    own[i] = owner == fabric_.rank() ? ids[i] : -1;
    ++rows_[static_cast<size_t>(owner)];
  }
  at_.clear();
  int64_t at = 0;
  std::vector<RowBlock> blocks;
  for (int32_t r = 0; r < split_.ranks; ++r) {
    const int64_t rows = rows_[static_cast<size_t>(r)];
    at_.push_back(at);
    const int64_t floats = kStampFloats + rows * hidden_;
    if (r != fabric_.rank() && rows > 0)
      blocks.push_back({r, rows, buffer + at, floats * static_cast<int64_t>(sizeof(float))});
    at += floats;
  }
  fabric_.receive_rows(blocks, "rows of layer " + std::to_string(numbers_[static_cast<size_t>(layer)]) +
                                   " in step " + std::to_string(step_));
}

void RowExchange::send(const float* routed) {
  const int32_t me = fabric_.rank();
  const int64_t rows = rows_[static_cast<size_t>(me)];
  if (rows == 0) return;
  float* to = block(me);
  const Stamp mine = stamp();
  std::memcpy(to, &mine, sizeof mine);
  to += kStampFloats;
  for (size_t i = 0; i < ids_.size(); ++i) {
    if (split_.owner_of(layer_, ids_[i]) != me) continue;
    std::memcpy(to, routed + static_cast<int64_t>(i) * hidden_, static_cast<size_t>(hidden_) * sizeof(float));
    to += hidden_;
  }
  fabric_.send_rows(
      {me, rows, block(me), (kStampFloats + rows * hidden_) * static_cast<int64_t>(sizeof(float))});
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

void RowExchange::finish(float* routed) {
  fabric_.wait_rows();
  const Stamp expected = stamp();
  std::vector<const float*> from(static_cast<size_t>(split_.ranks));
  for (int32_t r = 0; r < split_.ranks; ++r) {
    if (r != fabric_.rank() && rows_[static_cast<size_t>(r)] > 0) check(r, expected);
    from[static_cast<size_t>(r)] = block(r) + kStampFloats;
  }
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
