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
      member_(static_cast<size_t>(config.experts)),
      wished_(tables_.size() * member_.size()),
      hinted_(static_cast<size_t>(cache_.slots())),
      hint_reads_(store_) {
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

// A store whose read hangs in another thread cannot be asked about it.
HostStream::~HostStream() {
  hint_reads_.stop();
  if (hint_reads_.hung() || store_->hung()) keep_forever(std::move(slots_));
}

void HostStream::begin_step() {
  forget_missing();
  collect_hints();
  cache_.begin_step();
  keep_wishes();
  give_slots();
}

// What an earlier look-up gave a slot to and did not come to fetch.
void HostStream::forget_missing() {
  for (const ExpertKey& key : missing_) cache_.forget(key.layer, key.expert);
  missing_.clear();
  late_.clear();
  hint_reads_.hold(false);
}

int32_t HostStream::find(int32_t layer, std::span<const int32_t> ids, Exec&) {
  forget_missing();
  collect_hints();
  layer_ = layer;
  ids_ = ids;
  waves_ = cache_.resolve_rows(layer, ids);
  drop_wishes(layer);
  take_over_hints();
  std::reverse(missing_.begin(), missing_.end());
  hint_reads_.hold(!missing_.empty());
  return std::max(1, static_cast<int32_t>(waves_.size()));
}

// What the look-up has to fetch, and what becomes of the hints in the slots that it uses. A later wave may take the slot
// of an earlier one's late hint.
void HostStream::take_over_hints() {
  for (size_t w = 0; w < waves_.size(); ++w) {
    for (const ExpertLookup& lookup : waves_[w].lookups) {
      if (!lookup.hit) continue;
      const size_t s = static_cast<size_t>(lookup.slot);
      const Hinted hint = std::exchange(hinted_[s], nullptr);
      if (!hint) continue;
      const int64_t bytes = hint->layout.stored_bytes();
      (lookup.late ? hint_bytes_.late : hint_bytes_.useful) += bytes;
      if (!lookup.late) continue;
      --on_their_way_;
      hint->demanded = true;
      hint_reads_.drop(hint.get());
      late_.push_back({w, lookup.slot, hint});
      missing_.push_back({layer_, lookup.expert});
    }
    for (const ExpertFetch& fetch : waves_[w].fetches) {
      waste_hint(fetch.slot);
      missing_.push_back({layer_, fetch.expert});
    }
  }
}

void HostStream::place(int32_t layer, int32_t expert, int32_t index) {
  place_in_slot(layout(layer, expert), slot(index),
                &tables_[static_cast<size_t>(layer)][static_cast<size_t>(expert)]);
}

void HostStream::unplace(const ExpertKey& key) {
  if (key.layer < 0) return;
  place_in_slot(layout(key.layer, key.expert), nullptr,
                &tables_[static_cast<size_t>(key.layer)][static_cast<size_t>(key.expert)]);
}

// A wave's misses, and its late hints: one of them may have come to its end by now, the others are read here.
void HostStream::bring(size_t w) {
  const std::span<const ExpertFetch> fetches = waves_[w].fetches;
  const bool any_late = std::any_of(late_.begin(), late_.end(), [&](const Late& l) { return l.wave == w; });
  if (fetches.empty() && !any_late) return;
  const auto start = std::chrono::steady_clock::now();
  hint_reads_.settle();
  collect_hints();
  reads_.clear();
  for (const Late& late : late_) {
    if (late.wave == w && !late.read->there)
      reads_.push_back({late.read->expert, &late.read->layout, late.read->slot});
  }
  for (const ExpertFetch& fetch : fetches)
    reads_.push_back({fetch.expert, &layout(layer_, fetch.expert), slot(fetch.slot)});
  store_->fetch_all(layer_, reads_);
  fetch_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

const int32_t* HostStream::fetch(int32_t index, Exec&) {
  if (waves_.empty()) return ids_.data();
  const size_t w = static_cast<size_t>(index);
  const ExpertWave& wave = waves_[w];
  for (const ExpertFetch& fetch : wave.fetches) unplace(fetch.evicted);
  bring(w);
  size_t brought = wave.fetches.size();
  for (const ExpertFetch& fetch : wave.fetches) {
    place(layer_, fetch.expert, fetch.slot);
    streamed_bytes_ += layout(layer_, fetch.expert).stored_bytes();
  }
  for (const Late& late : late_) {
    if (late.wave != w) continue;
    place(layer_, late.read->expert, late.slot);
    ++brought;
  }
  missing_.resize(missing_.size() - brought);
  if (w + 1 == waves_.size()) {
    give_slots();
    hint_reads_.hold(false);
  }
  if (waves_.size() == 1) return ids_.data();

  for (const ExpertLookup& lookup : wave.lookups) member_[static_cast<size_t>(lookup.expert)] = true;
  wave_ids_.resize(ids_.size());
  std::transform(ids_.begin(), ids_.end(), wave_ids_.begin(),
                 [&](int32_t id) { return id >= 0 && member_[static_cast<size_t>(id)] ? id : -1; });
  for (const ExpertLookup& lookup : wave.lookups) member_[static_cast<size_t>(lookup.expert)] = false;
  return wave_ids_.data();
}

}  // namespace rocket
