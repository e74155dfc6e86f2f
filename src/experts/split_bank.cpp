#include "experts/split_bank.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace rocket {
namespace {

constexpr int64_t kChunkBytes = int64_t{1} << 30;
constexpr int64_t kBatchBytes = int64_t{64} << 20;  // read between two reports of progress

}  // namespace

SplitBank::SplitBank(const HostBank::Tables& tables, std::vector<int32_t> in_slots,
                     std::vector<int32_t> in_places, BankMemory memory)
    : memory_(std::move(memory)), in_slots_(std::move(in_slots)), in_places_(std::move(in_places)) {
  for (const std::span<const ExpertWeights> table : tables) {
    experts_a_layer_ = std::max(experts_a_layer_, table.size());
    for (const ExpertWeights& expert : table) {
      layouts_.push_back(slot_layout(expert));
      place_bytes_ = std::max(place_bytes_, layouts_.back().bytes);
      total_ += layouts_.back().bytes;
    }
  }
  if (in_places_.empty()) throw InputError("host bank: expected experts without a slot, found none");
  at_.resize(layouts_.size());
  const int64_t most = std::max<int64_t>(1, kChunkBytes / place_bytes_);
  try {
    for (size_t left = in_places_.size(); left > 0;) {
      const size_t count = std::min(left, static_cast<size_t>(most));
      chunks_.push_back(nullptr);
      char* const base = chunks_.back() = memory_.take(count * static_cast<size_t>(place_bytes_));
      const char* const known = memory_.known_as(base);
      for (int64_t i = 0; i < static_cast<int64_t>(count); ++i) {
        places_.push_back(base + i * place_bytes_);
        known_.push_back(known + i * place_bytes_);
      }
      left -= count;
    }
  } catch (...) {
    give_back();
    throw;
  }
}

SplitBank::~SplitBank() {
  give_back();
}

void SplitBank::fill(const ExpertStore& store, std::span<const BankPiece> order, ThreadPool& pool,
                     const ToSlot& to_slot, const HostBank::Progress& progress) {
  try {
    if (progress) progress(0, total_);
    fill_slots(store, order, pool, to_slot, progress);
    fill_places(store, order, pool, progress);
    if (progress) progress(total_, total_);
  } catch (...) {
    if (store.hung()) chunks_.clear();  // a read may still write there
    throw;
  }
}

void SplitBank::read(const ExpertStore& store, std::span<const BankPiece> pieces, ThreadPool& pool) {
  pool.loop(static_cast<int64_t>(pieces.size()), 1, [&](int64_t from, int64_t to, int) {
    for (int64_t i = from; i < to; ++i) {
      const BankPiece& p = pieces[static_cast<size_t>(i)];
      store.fetch(p.layer, p.expert, p.piece, layouts_[key(p)], at_[key(p)]);
    }
  });
}

// Whole experts, in the order in which the first piece of each is read; the places are still free.
void SplitBank::fill_slots(const ExpertStore& store, std::span<const BankPiece> order, ThreadPool& pool,
                           const ToSlot& to_slot, const HostBank::Progress& progress) {
  std::vector<int32_t> slot_of(layouts_.size(), -1);
  for (size_t slot = 0; slot < in_slots_.size(); ++slot)
    slot_of[static_cast<size_t>(in_slots_[slot])] = static_cast<int32_t>(slot);
  std::vector<std::vector<BankPiece>> pieces(layouts_.size());
  std::vector<size_t> keys;
  for (const BankPiece& p : order) {
    if (slot_of[key(p)] < 0) continue;
    if (pieces[key(p)].empty()) keys.push_back(key(p));
    pieces[key(p)].push_back(p);
  }
  const size_t batch = std::clamp<size_t>(static_cast<size_t>(kBatchBytes / place_bytes_), 1, places_.size());
  for (size_t first = 0; first < keys.size(); first += batch) {
    const size_t count = std::min(batch, keys.size() - first);
    std::vector<BankPiece> wanted;
    for (size_t i = 0; i < count; ++i) {
      const size_t k = keys[first + i];
      at_[k] = places_[i];
      wanted.insert(wanted.end(), pieces[k].begin(), pieces[k].end());
    }
    read(store, wanted, pool);
    for (size_t i = 0; i < count; ++i) {
      const size_t k = keys[first + i];
      to_slot(slot_of[k], places_[i], layouts_[k].bytes);
      at_[k] = nullptr;
      done_ += layouts_[k].bytes;
    }
    if (progress) progress(done_, total_);
  }
}

void SplitBank::fill_places(const ExpertStore& store, std::span<const BankPiece> order, ThreadPool& pool,
                            const HostBank::Progress& progress) {
  for (size_t place = 0; place < in_places_.size(); ++place)
    at_[static_cast<size_t>(in_places_[place])] = places_[place];
  const int64_t pieces = store.pieces();
  std::vector<BankPiece> wanted;
  int64_t bytes = 0;
  const auto bring = [&] {
    read(store, wanted, pool);
    wanted.clear();
    if (progress) progress(std::min(done_ + bytes, total_), total_);
  };
  int64_t begin = 0;
  for (const BankPiece& p : order) {
    if (!at_[key(p)]) continue;
    wanted.push_back(p);
    bytes += layouts_[key(p)].bytes / pieces;
    if (bytes - begin < kBatchBytes) continue;
    begin = bytes;
    bring();
  }
  if (!wanted.empty()) bring();
}

void SplitBank::give_back() {
  for (char* const chunk : chunks_) {
    if (chunk) memory_.give_back(chunk);
  }
  chunks_.clear();
}

void swap_on_host(const SlotCache& c, const SlotBank& bank, int32_t wave) {
  const SlotRange range = slot_wave(*c.lookup, wave);
  for (int32_t m = range.begin; m < range.end; ++m) {
    const SlotTrade& trade = c.trade[m];
    char* const slot = c.base + c.miss[m].slot * c.slot_bytes;
    char* const place = bank.place[trade.place];
    const int64_t in = c.parts[int64_t{c.lookup->layer} * c.experts + c.miss[m].expert].bytes;
    const int64_t out = trade.key < 0 ? 0 : c.parts[trade.key].bytes;
    const std::vector<char> back(slot, slot + out);
    std::memcpy(slot, place, static_cast<size_t>(in));
    std::copy(back.begin(), back.end(), place);
  }
}

}  // namespace rocket
