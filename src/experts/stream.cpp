#include "experts/stream.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace rocket {

int64_t slot_bytes_of(std::span<const ExpertWeights> table) {
  int64_t bytes = 0;
  for (const ExpertWeights& expert : table) bytes = std::max(bytes, slot_layout(expert).bytes);
  return bytes;
}

HostStream::HostStream(const CacheConfig& config, std::unique_ptr<ExpertStore> store,
                       std::vector<std::span<ExpertWeights>> tables)
    : cache_(config),
      store_(std::move(store)),
      tables_(std::move(tables)),
      member_(static_cast<size_t>(config.experts)) {
  for (const std::span<ExpertWeights> table : tables_) {
    std::vector<SlotLayout>& layouts = layouts_.emplace_back();
    for (ExpertWeights& expert : table) {
      layouts.push_back(slot_layout(expert));
      slot_bytes_ = std::max(slot_bytes_, layouts.back().bytes);
      place_in_slot(layouts.back(), nullptr, &expert);
    }
  }
  const size_t bytes = static_cast<size_t>(slot_bytes_) * static_cast<size_t>(cache_.slots());
  slots_ = Arena(bytes, "expert slots");
  slots_base_ = static_cast<char*>(slots_.take_bytes(bytes));
}

HostStream::~HostStream() {
  if (store_->hung()) keep_forever(std::move(slots_));
}

void HostStream::begin_step() {
  forget_missing();
  cache_.begin_step();
}

// What an earlier look-up gave a slot to and did not come to fetch.
void HostStream::forget_missing() {
  for (const ExpertKey& key : missing_) cache_.forget(key.layer, key.expert);
  missing_.clear();
}

int32_t HostStream::find(int32_t layer, std::span<const int32_t> ids, Exec&) {
  forget_missing();
  layer_ = layer;
  ids_ = ids;
  waves_ = cache_.resolve_rows(layer, ids);
  for (const ExpertWave& wave : waves_) {
    for (const ExpertFetch& fetch : wave.fetches) missing_.push_back({layer, fetch.expert});
  }
  std::reverse(missing_.begin(), missing_.end());
  return std::max(1, static_cast<int32_t>(waves_.size()));
}

void HostStream::bring(std::span<const ExpertFetch> fetches) {
  if (fetches.empty()) return;
  const auto start = std::chrono::steady_clock::now();
  const std::vector<SlotLayout>& layouts = layouts_[static_cast<size_t>(layer_)];
  reads_.clear();
  for (const ExpertFetch& fetch : fetches) {
    reads_.push_back({fetch.expert, &layouts[static_cast<size_t>(fetch.expert)], slot(fetch.slot)});
  }
  store_->fetch_all(layer_, reads_);
  fetch_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

const int32_t* HostStream::fetch(int32_t index, Exec&) {
  if (waves_.empty()) return ids_.data();
  const ExpertWave& wave = waves_[static_cast<size_t>(index)];
  const std::vector<SlotLayout>& layouts = layouts_[static_cast<size_t>(layer_)];
  const std::span<ExpertWeights> table = tables_[static_cast<size_t>(layer_)];
  for (const ExpertFetch& fetch : wave.fetches) {
    const ExpertKey& old = fetch.evicted;
    if (old.layer < 0) continue;
    const size_t l = static_cast<size_t>(old.layer), e = static_cast<size_t>(old.expert);
    place_in_slot(layouts_[l][e], nullptr, &tables_[l][e]);
  }
  bring(wave.fetches);
  for (const ExpertFetch& fetch : wave.fetches) {
    const SlotLayout& layout = layouts[static_cast<size_t>(fetch.expert)];
    place_in_slot(layout, slot(fetch.slot), &table[static_cast<size_t>(fetch.expert)]);
    streamed_bytes_ += layout.stored_bytes();
  }
  missing_.resize(missing_.size() - wave.fetches.size());
  if (waves_.size() == 1) return ids_.data();

  for (const ExpertLookup& lookup : wave.lookups) member_[static_cast<size_t>(lookup.expert)] = true;
  wave_ids_.resize(ids_.size());
  std::transform(ids_.begin(), ids_.end(), wave_ids_.begin(),
                 [&](int32_t id) { return id >= 0 && member_[static_cast<size_t>(id)] ? id : -1; });
  for (const ExpertLookup& lookup : wave.lookups) member_[static_cast<size_t>(lookup.expert)] = false;
  return wave_ids_.data();
}

}  // namespace rocket
