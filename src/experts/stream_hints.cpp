// The host's stream: wishes, and what becomes of them.
#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "experts/stream.h"

namespace rocket {

void HostStream::check(int32_t layer, std::span<const int32_t> experts) const {
  const auto refuse = [](const char* what, size_t count, int32_t found) {
    throw InputError("hint: expected " + std::string(what) + " from 0 to " + std::to_string(count - 1) +
                     ", found " + std::to_string(found));
  };
  if (layer < 0 || static_cast<size_t>(layer) >= tables_.size())
    refuse("an MoE layer", tables_.size(), layer);
  for (const int32_t expert : experts) {
    if (expert < 0 || static_cast<size_t>(expert) >= member_.size())
      refuse("an expert", member_.size(), expert);
  }
}

bool HostStream::hint(int32_t layer, std::span<const int32_t> experts) {
  check(layer, experts);
  hint_reads_.start();
  collect_hints();
  for (const int32_t expert : experts) {
    if (wished_[key(layer, expert)]) continue;
    wished_[key(layer, expert)] = true;
    std::erase(wishes_, ExpertKey{layer, expert});  // one that is over
    wishes_.push_back({layer, expert});
    if (cache_.slot_of(layer, expert) >= 0) cache_.hint(layer, expert);
  }
  give_slots();
  return true;
}

// Reads that have come to their end. One that was demanded is its look-up's; one whose slot was taken was in vain.
void HostStream::collect_hints() {
  for (const HintReads::Finished& done : hint_reads_.finished()) {
    HintedRead& read = *done.read;
    read.there = done.there;
    if (read.demanded) continue;
    const int32_t index = cache_.slot_of(read.layer, read.expert);
    if (index < 0 || hinted_[static_cast<size_t>(index)] != done.read) {
      if (read.there) hint_bytes_.wasted += read.layout.stored_bytes();
      continue;
    }
    --on_their_way_;
    if (read.there) {
      cache_.arrived(read.layer, read.expert);
      place(read.layer, read.expert, index);
    } else {
      hinted_[static_cast<size_t>(index)] = nullptr;
      cache_.forget(read.layer, read.expert);
      wished_[key(read.layer, read.expert)] = false;
    }
  }
}

void HostStream::keep_wishes() {
  for (const ExpertKey& wish : wishes_) {
    if (cache_.slot_of(wish.layer, wish.expert) >= 0) cache_.hint(wish.layer, wish.expert);
  }
}

void HostStream::drop_wishes(int32_t layer) {
  std::erase_if(wishes_, [&](const ExpertKey& wish) {
    if (wish.layer == layer) wished_[key(layer, wish.expert)] = false;
    return wish.layer == layer;
  });
}

void HostStream::give_slots() {
  if (wishes_.empty() || !missing_.empty()) return;
  collect_hints();
  int32_t full = -1;  // a layer that just got none
  for (const ExpertKey& wish : wishes_) {
    if (on_their_way_ == kMostHints) return;
    if (wish.layer == full || !wished_[key(wish.layer, wish.expert)] ||
        cache_.slot_of(wish.layer, wish.expert) >= 0)
      continue;
    const HintedSlot taken = cache_.hint(wish.layer, wish.expert);
    if (taken.answer == HintAnswer::kTaken) {
      begin_read(wish, taken);
    } else {
      full = wish.layer;
    }
  }
}

// The expert's entry points nowhere until its bytes are there.
void HostStream::begin_read(const ExpertKey& wish, const HintedSlot& taken) {
  unplace(taken.evicted);
  unplace(wish);
  waste_hint(taken.slot);
  const Hinted read = std::make_shared<HintedRead>();
  read->layer = wish.layer;
  read->expert = wish.expert;
  read->layout = layout(wish.layer, wish.expert);
  read->slot = slot(taken.slot);
  hinted_[static_cast<size_t>(taken.slot)] = read;
  ++on_their_way_;
  hint_reads_.add(read);
}

// The slot is somebody else's from here on. A read under way comes to its end before anything else is read into it.
void HostStream::waste_hint(int32_t index) {
  const Hinted hint = std::exchange(hinted_[static_cast<size_t>(index)], nullptr);
  if (!hint) return;
  if (hint->there) {
    hint_bytes_.wasted += hint->layout.stored_bytes();
  } else {
    --on_their_way_;
    hint_reads_.drop(hint.get());
  }
}

StreamStats HostStream::stats() {
  collect_hints();
  StreamStats stats;
  stats.layers = cache_.layer_counters();
  stats.streamed_bytes = streamed_bytes_;
  stats.fetch_seconds = fetch_seconds_;
  stats.hint_bytes = hint_bytes_;
  stats.hints_on_their_way = on_their_way_;
  stats.hints_there =
      std::count_if(hinted_.begin(), hinted_.end(), [](const Hinted& hint) { return hint && hint->there; });
  return stats;
}

}  // namespace rocket
