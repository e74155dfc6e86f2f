// Look-ups of many rows: a prompt's, which take nearly every expert of every layer. See cache.h.
#include <algorithm>

#include "experts/cache.h"

namespace rocket {

std::vector<ExpertCache::Share> ExpertCache::shares_of(const CacheConfig& c,
                                                       const std::vector<int32_t>& first) {
  const auto owned = [&](size_t layer) { return c.owned.empty() ? c.experts : c.owned[layer]; };
  const bool budgets = !c.layer_slots.empty();
  int64_t all = 0;
  for (size_t layer = 0; layer < static_cast<size_t>(c.layers); ++layer) all += owned(layer);
  std::vector<Share> shares;
  for (size_t layer = 0; layer < static_cast<size_t>(c.layers); ++layer) {
    const int64_t slots = budgets ? first[layer + 1] - first[layer] : first.back();
    const int64_t fewest = std::min<int64_t>(c.topk, slots);  // owned experts may be fewer than a token's
    const int64_t pool = std::max(fewest, std::min<int64_t>(c.experts, slots / 8));
    const int64_t kept = budgets ? slots - pool : all > 0 ? (slots - pool) * owned(layer) / all : 0;
    shares.push_back({static_cast<int32_t>(kept), static_cast<int32_t>(pool)});
  }
  return shares;
}

std::span<const ExpertWave> ExpertCache::resolve_rows(int32_t layer, std::span<const int32_t> ids) {
  const std::span<const int32_t> experts = distinct(ids);
  if (shares_.empty() || static_cast<int64_t>(ids.size()) <= int64_t{kFewRows} * topk_) {
    return resolve(layer, experts);
  }
  check_lookup(layer, experts);
  policy_->begin(group(layer));
  rank_by_use(ids, experts);
  split_bulk(layer, experts);
  run_waves(layer, experts.size(), true);
  settle_bulk(layer);
  return waves_;
}

void ExpertCache::rank_by_use(std::span<const int32_t> ids, std::span<const int32_t> experts) {
  std::vector<int32_t> rows(static_cast<size_t>(experts_));
  for (const int32_t id : ids) {
    if (id >= 0) ++rows[static_cast<size_t>(id)];
  }
  ranked_.assign(experts.begin(), experts.end());
  std::sort(ranked_.begin(), ranked_.end(), [&](int32_t a, int32_t b) {
    const int32_t of_a = rows[static_cast<size_t>(a)], of_b = rows[static_cast<size_t>(b)];
    return of_a != of_b ? of_a < of_b : a > b;
  });
  rank_.assign(static_cast<size_t>(experts_), -1);
  for (size_t i = 0; i < ranked_.size(); ++i)
    rank_[static_cast<size_t>(ranked_[i])] = static_cast<int32_t>(i);
}

// Fills lookups_, wave after wave, and wave_ends_: hits first, then misses, the least used first.
void ExpertCache::split_bulk(int32_t layer, std::span<const int32_t> experts) {
  lookups_.clear();
  wave_ends_.clear();
  if (experts.empty()) return;
  const Share share = shares_[static_cast<size_t>(layer)];
  bulk_room_ = std::max(held_of(layer), share.kept + share.pool);
  misses_.clear();
  for (const int32_t expert : ranked_) {
    const int32_t slot = slot_of(layer, expert);
    if (slot < 0) {
      misses_.push_back(expert);
    } else {
      lookups_.push_back({expert, slot, true, false});
    }
  }
  const auto end_wave = [&](size_t begin) {
    std::sort(lookups_.begin() + static_cast<std::ptrdiff_t>(begin), lookups_.end(),
              [](const ExpertLookup& a, const ExpertLookup& b) { return a.expert < b.expert; });
    wave_ends_.push_back(lookups_.size());
  };
  size_t begin = 0;
  for (const int32_t expert : misses_) {
    const int32_t most = wave_ends_.empty() ? bulk_room_ : share.pool;
    if (static_cast<int32_t>(lookups_.size() - begin) == most) {
      end_wave(begin);
      begin = lookups_.size();
    }
    lookups_.push_back({expert, -1, false, false});
  }
  end_wave(begin);
}

// Of the layer's own: what the look-up does not use before what it does, the longest unused before others; then the
// least used of what it does.
int32_t ExpertCache::own_victim(int32_t layer, int64_t floor) const {
  int32_t victim = -1;
  std::pair<int32_t, int64_t> least;
  for (int32_t expert = 0; expert < experts_; ++expert) {
    const int32_t slot = slot_of(layer, expert);
    if (slot < 0 || mark_[static_cast<size_t>(slot)] >= floor) continue;
    const int32_t rank = rank_[static_cast<size_t>(expert)];
    const std::pair worth{rank, rank < 0 ? mark_[static_cast<size_t>(slot)] : 0};
    if (victim >= 0 && worth >= least) continue;
    victim = slot;
    least = worth;
  }
  return victim;
}

int32_t ExpertCache::take_bulk_slot(int32_t layer, int64_t floor, ExpertKey* evicted, bool* flying) {
  const int32_t g = group(layer);
  if (held_of(layer) < bulk_room_) return take_slot(g, floor, evicted, flying);
  const int32_t slot = own_victim(layer, floor);
  *flying = held_[static_cast<size_t>(slot)].hint == Hint::kFlying;
  *evicted = evict(g, slot);
  return slot;
}

// Every one of them was used in this step, whatever its place in the order is from here on.
void ExpertCache::settle_bulk(int32_t layer) {
  const int64_t now = ++clock_;
  const int32_t g = group(layer);
  int32_t there = 0;
  for (const int32_t expert : ranked_) there += slot_of(layer, expert) >= 0;
  int32_t retired = there - shares_[static_cast<size_t>(layer)].kept;
  for (const int32_t expert : ranked_) {
    const int32_t slot = slot_of(layer, expert);
    if (slot < 0) continue;
    mark_[static_cast<size_t>(slot)] = now;
    if (retired-- > 0) {
      policy_->retire(g, slot);
    } else {
      policy_->hold(g, slot);
    }
  }
}

}  // namespace rocket
