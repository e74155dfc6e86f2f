#include "experts/host_bank.h"

#include <algorithm>
#include <utility>

namespace rocket {
namespace {

constexpr int64_t kChunkBytes = int64_t{1} << 30;
constexpr int64_t kBatchBytes = int64_t{64} << 20;  // read between two reports of progress

}  // namespace

int64_t HostBank::bytes(const Tables& tables) {
  int64_t bytes = 0;
  for (const std::span<const ExpertWeights> table : tables) {
    for (const ExpertWeights& expert : table) bytes += slot_layout(expert).bytes;
  }
  return bytes;
}

HostBank::HostBank(const Tables& tables, const ExpertStore& store, std::span<const BankPiece> order,
                   BankPins pins, ThreadPool& pool, const Progress& progress)
    : pins_(std::move(pins)) {
  lay_out(tables);
  fill(store, order, pool, progress);
  try {
    pin(progress);
  } catch (...) {
    unpin();
    throw;
  }
}

HostBank::~HostBank() {
  unpin();
}

// Chunks of whole experts.
void HostBank::lay_out(const Tables& tables) {
  for (const std::span<const ExpertWeights> table : tables) {
    experts_a_layer_ = std::max(experts_a_layer_, table.size());
    for (const ExpertWeights& expert : table) layouts_.push_back(slot_layout(expert));
  }
  places_.resize(layouts_.size());
  experts_.resize(layouts_.size());
  for (size_t first = 0, end = 0; first < layouts_.size(); first = end) {
    int64_t bytes = 0;
    while (end < layouts_.size() && (end == first || bytes + layouts_[end].bytes <= kChunkBytes))
      bytes += layouts_[end++].bytes;
    Chunk& chunk = chunks_.emplace_back();
    chunk.memory = Arena(static_cast<size_t>(bytes), "host bank");
    chunk.base = static_cast<char*>(chunk.memory.take_bytes(static_cast<size_t>(bytes)));
    chunk.bytes = static_cast<size_t>(bytes);
    chunk.first = first;
    chunk.end = end;
    char* at = chunk.base;
    for (size_t i = first; i < end; ++i) {
      places_[i] = at;
      at += layouts_[i].bytes;
    }
    total_ += bytes;
  }
}

void HostBank::fill(const ExpertStore& store, std::span<const BankPiece> order, ThreadPool& pool,
                    const Progress& progress) {
  int64_t done = 0;
  const auto index = [&](const BankPiece& p) {
    return static_cast<size_t>(p.layer) * experts_a_layer_ + static_cast<size_t>(p.expert);
  };
  const auto bytes = [&](const BankPiece& p) {
    const SlotLayout& layout = layouts_[index(p)];
    return layout.data_bytes[static_cast<size_t>(p.piece)] + layout.scale_bytes[static_cast<size_t>(p.piece)];
  };
  for (size_t first = 0, end = 0; first < order.size(); first = end) {
    int64_t batch = 0;
    while (end < order.size() && batch < kBatchBytes) batch += bytes(order[end++]);
    pool.loop(static_cast<int64_t>(end - first), 1, [&](int64_t from, int64_t to, int) {
      for (int64_t i = from; i < to; ++i) {
        const BankPiece& p = order[first + static_cast<size_t>(i)];
        store.fetch(p.layer, p.expert, p.piece, layouts_[index(p)], places_[index(p)]);
      }
    });
    done += batch;
    if (progress) progress(std::min(done, total_), total_);
  }
}

void HostBank::pin(const Progress& progress) {
  for (Chunk& chunk : chunks_) {
    const char* const known = pins_.pin(chunk.base, chunk.bytes);
    chunk.pinned = true;
    for (size_t i = chunk.first; i < chunk.end; ++i) experts_[i] = known + (places_[i] - chunk.base);
    if (progress) progress(total_, total_);
  }
}

void HostBank::unpin() {
  for (Chunk& chunk : chunks_) {
    if (chunk.pinned) pins_.unpin(chunk.base);
    chunk.pinned = false;
  }
}

}  // namespace rocket
