#include "experts/host_bank.h"

#include <algorithm>
#include <set>
#include <utility>

namespace rocket {
namespace {

constexpr int64_t kChunkBytes = int64_t{1} << 30;
constexpr int64_t kBatchBytes = int64_t{64} << 20;   // read between two reports of progress
constexpr int64_t kAheadBytes = int64_t{256} << 20;  // asked of the disk before they are read

}  // namespace

int64_t HostBank::bytes(const Tables& tables, std::span<const BankPiece> order) {
  std::set<std::pair<int32_t, int32_t>> experts;
  int64_t bytes = 0;
  for (const BankPiece& p : order) {
    if (experts.emplace(p.layer, p.expert).second)
      bytes += slot_layout(tables[static_cast<size_t>(p.layer)][static_cast<size_t>(p.expert)]).bytes;
  }
  return bytes;
}

HostBank::HostBank(const Tables& tables, const ExpertStore& store, std::span<const BankPiece> order,
                   BankMemory memory, ThreadPool& pool, const Progress& progress)
    : memory_(std::move(memory)), total_(bytes(tables, order)) {
  for (const std::span<const ExpertWeights> table : tables) {
    experts_a_layer_ = std::max(experts_a_layer_, table.size());
    for (const ExpertWeights& expert : table) layouts_.push_back(slot_layout(expert));
  }
  places_.assign(layouts_.size(), nullptr);
  experts_.assign(layouts_.size(), nullptr);
  std::set<size_t> wanted;
  for (const BankPiece& p : order) wanted.insert(index(p));
  try {
    take(std::vector<size_t>(wanted.begin(), wanted.end()), progress);
    fill(store, order, pool, progress);
  } catch (...) {
    if (!store.hung()) give_back();  // else a read may still write there
    throw;
  }
}

HostBank::~HostBank() {
  give_back();
}

void HostBank::take(std::span<const size_t> wanted, const Progress& progress) {
  for (size_t first = 0, end = 0; first < wanted.size(); first = end) {
    int64_t bytes = 0;
    while (end < wanted.size() && (end == first || bytes + layouts_[wanted[end]].bytes <= kChunkBytes))
      bytes += layouts_[wanted[end++]].bytes;
    char* const base = memory_.take(static_cast<size_t>(bytes));
    chunks_.push_back(base);
    const char* const known = memory_.known_as(base);
    int64_t at = 0;
    for (size_t i = first; i < end; ++i) {
      places_[wanted[i]] = base + at;
      experts_[wanted[i]] = known + at;
      at += layouts_[wanted[i]].bytes;
    }
    if (progress) progress(0, total_);
  }
}

void HostBank::fill(const ExpertStore& store, std::span<const BankPiece> order, ThreadPool& pool,
                    const Progress& progress) {
  int64_t done = 0;
  const auto bytes = [&](const BankPiece& p) {
    const SlotLayout& layout = layouts_[index(p)];
    if (store.pieces() == 1) return layout.stored_bytes();
    return layout.data_bytes[static_cast<size_t>(p.piece)] + layout.scale_bytes[static_cast<size_t>(p.piece)];
  };
  size_t expected = 0;
  int64_t ahead = 0;  // bytes that are expected and not read
  for (size_t first = 0, end = 0; first < order.size(); first = end) {
    int64_t batch = 0;
    while (end < order.size() && batch < kBatchBytes) batch += bytes(order[end++]);
    for (; expected < order.size() && ahead < kAheadBytes; ++expected) {
      const BankPiece& p = order[expected];
      store.expect(p.layer, p.expert, p.piece);
      ahead += bytes(p);
    }
    ahead -= batch;
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
