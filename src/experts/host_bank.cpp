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
                   BankMemory memory, ThreadPool& pool, const Progress& progress)
    : memory_(std::move(memory)), total_(bytes(tables)) {
  for (const std::span<const ExpertWeights> table : tables) {
    experts_a_layer_ = std::max(experts_a_layer_, table.size());
    for (const ExpertWeights& expert : table) layouts_.push_back(slot_layout(expert));
  }
  try {
    take(progress);
    fill(store, order, pool, progress);
  } catch (...) {
    if (!store.hung()) give_back();  // else a read may still write there
    throw;
  }
}

HostBank::~HostBank() {
  give_back();
}

void HostBank::take(const Progress& progress) {
  for (size_t first = 0, end = 0; first < layouts_.size(); first = end) {
    int64_t bytes = 0;
    while (end < layouts_.size() && (end == first || bytes + layouts_[end].bytes <= kChunkBytes))
      bytes += layouts_[end++].bytes;
    char* const base = memory_.take(static_cast<size_t>(bytes));
    chunks_.push_back(base);
    const char* const known = memory_.known_as(base);
    for (int64_t i = static_cast<int64_t>(first), at = 0; i < static_cast<int64_t>(end); ++i) {
      places_.push_back(base + at);
      experts_.push_back(known + at);
      at += layouts_[static_cast<size_t>(i)].bytes;
    }
    if (progress) progress(0, total_);
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
    if (store.pieces() == 1) return layout.stored_bytes();
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
    done += batch;  // without padding
    if (progress) progress(end < order.size() ? done : total_, total_);
  }
}

void HostBank::give_back() {
  for (char* const chunk : chunks_) memory_.give_back(chunk);
  chunks_.clear();
}

}  // namespace rocket
