// A bounded cache of experts, keyed by (layer, expert): which expert is in which slot, and which makes way. Pure
// bookkeeping, no bytes: whoever asks fetches what resolve() lists before it uses the slots.
//
// Budgets. Either `slots` for all layers together (one order of eviction), or `layer_slots`, a budget for each
// layer and an order within each. Slots are numbered through: with budgets, layer l has those from
// first_slot(l) on. More slots than experts are cut to them; slots() is what was delivered. A layer must be able to
// hold one token's experts; less is a PlanError that names the smallest that works.
//
// A look-up. begin_step(), then resolve(layer, distinct experts in ascending order) for each layer of the step:
//   1. All experts are looked up. Those that are there are hits, and are safe from what follows.
//   2. Each miss, in ascending order, takes a free slot, else that of the policy's victim. No expert of the
//      look-up is a victim.
//   3. All experts are stamped as used, in ascending order, hits and misses alike.
// A look-up of more experts than there are slots goes in waves: the first has all hits and the lowest misses that
// fit beside them, each further one the next misses; each wave is a look-up as above, ascending in itself. So an
// expert is fetched at most once a look-up and no hit is lost before its use: fetches = misses, the fewest there can
// be, in ceil(experts / slots) waves. A later wave takes slots from earlier ones: its bytes may only be written when
// these have been computed with.
//
// Many rows. A prompt's chunk takes nearly every expert of every layer: looked up like that, each layer would push out
// the others, and the cache would end with the last layer's experts, whatever they are worth. So, with lru, a look-up of
// more than 16 rows (resolve_rows) goes through a pool of P = max(top-k, min(experts a layer, slots / 8)) slots beside
// what the layer keeps, K = (slots - P) in proportion to the experts that it owns (slots: all, or the layer's budget):
//   1. Experts are ranked by the number of rows that chose them; of equals the lower id is the more used. Misses come
//      in that order, the least used first.
//   2. The first wave has all hits, and misses until it has R = max(what the layer holds, K + P); further ones have P.
//   3. While the layer holds fewer than R, a miss takes a free slot or the victim, as above. Then it takes the layer's
//      own: of an expert that the look-up does not use (the longest unused, then the lowest id), else the least used.
//   4. At the end the K most used that are there are stamped in that order: the most used are the most recent. The
//      others are retired: they make way before all that are not, in the order in which they were.
// So after a prompt each layer has its most used experts, and a chunk finds those of the chunk before it.
//
// Hints are apart from demand: hint() may give a slot to an expert that may be wanted soon. It evicts nothing that the
// current step has used or had hinted, nor a hinted expert that is still on its way. An expert that is there already
// is kept from other hints of the step, and with lru counts as recently used. No hint counts as a hit or a miss; a
// hinted expert that is demanded is a hit, and its hint useful, or late if arrived() was not called before (the look-up
// says so: its bytes must be waited for); one that makes way unused was wasted.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "experts/policy.h"

namespace rocket {

struct CacheConfig {
  int32_t layers = 0;                // MoE layers
  int32_t experts = 0;               // a layer
  int32_t topk = 0;                  // experts a token takes of a layer
  int64_t slots = 0;                 // of all layers together; only without layer_slots
  std::vector<int64_t> layer_slots;  // [layers], or empty
  std::vector<int32_t> owned;        // [layers]: how many experts can be asked for; empty = all
  std::string policy = "lru";        // lru | lfu | lfru
  bool many_rows = true;             // whether look-ups of many rows are apart (above), or as any
};

struct ExpertKey {
  int32_t layer = -1, expert = -1;  // -1, -1: none
  bool operator==(const ExpertKey&) const = default;
};

struct ExpertLookup {
  int32_t expert = -1, slot = -1;
  bool hit = false;
  bool late = false;  // a hit whose bytes were hinted and have not arrived
};

struct ExpertFetch {
  int32_t expert = -1, slot = -1;
  ExpertKey evicted;            // whose slot it was; none: it was free
  bool evicted_flying = false;  // that one's bytes were hinted and may still be on their way into the slot
};

struct ExpertWave {
  std::span<const ExpertLookup> lookups;  // ascending
  std::span<const ExpertFetch> fetches;   // its misses, ascending
};

enum class HintAnswer { kTaken, kThere, kRefused };
struct HintedSlot {
  HintAnswer answer = HintAnswer::kRefused;
  int32_t slot = -1;  // taken: fetch the expert into it
  ExpertKey evicted;
};

// Counted for each distinct expert of a look-up. Evictions count for the layer whose expert made way.
struct CacheCounters {
  int64_t hits = 0, misses = 0, evictions = 0;
  int64_t hints_taken = 0, hints_useful = 0, hints_late = 0, hints_wasted = 0;
  CacheCounters& operator+=(const CacheCounters& other);
  CacheCounters& operator-=(const CacheCounters& other);
  bool operator==(const CacheCounters&) const = default;
};

struct CacheWindow {
  int64_t steps = 0;
  CacheCounters counters;
};

class ExpertCache {
 public:
  static constexpr int32_t kFewRows = 16;
  struct Share {
    int32_t kept = 0, pool = 0;  // K and P above
  };

  // policy: null = the one that config names. Throws PlanError (too few slots), InputError.
  explicit ExpertCache(const CacheConfig& config, std::unique_ptr<EvictionPolicy> policy = nullptr);
  static PolicyShape policy_shape(const CacheConfig& config);
  // The fewest slots that the budget for all layers, or that of one layer, may have.
  static int64_t fewest_slots(const CacheConfig& config);
  static int64_t fewest_slots(const CacheConfig& config, int32_t layer);

  void begin_step();
  // The waves, and what they point to, are valid until the next call. Throws InputError.
  std::span<const ExpertWave> resolve(int32_t layer, std::span<const int32_t> experts);
  // The same for the choices [rows, topk] of all rows of a step, -1 is skipped.
  std::span<const ExpertWave> resolve_rows(int32_t layer, std::span<const int32_t> ids);
  // The distinct experts of a list of choices, ascending; -1 is skipped. Valid until the next call.
  std::span<const int32_t> distinct(std::span<const int32_t> ids);

  HintedSlot hint(int32_t layer, int32_t expert);
  void arrived(int32_t layer,
               int32_t expert);  // a hinted expert's bytes; nothing if it is not there any more
  // Puts an expert into a free slot before the run, and counts nothing. Its slot; -1: none is free, or it is there.
  int32_t preload(int32_t layer, int32_t expert);
  // Takes an expert out whose bytes could not be fetched; its slot is free. Nothing if it is not there.
  void forget(int32_t layer, int32_t expert);

  int32_t slot_of(int32_t layer, int32_t expert) const;  // -1: not there
  ExpertKey at(int32_t slot) const;                      // none: free
  int32_t slots() const { return static_cast<int32_t>(held_.size()); }
  int32_t slots(int32_t layer) const;  // that its experts may take
  int32_t first_slot(int32_t layer) const;
  int32_t resident() const { return resident_; }
  // [layers] of look-ups of many rows; empty: these are as any.
  const std::vector<Share>& shares() const { return shares_; }

  int64_t steps() const { return steps_; }
  CacheCounters counters() const;
  const std::vector<CacheCounters>& layer_counters() const { return counters_; }
  CacheWindow window();  // what was counted since the last call

 private:
  enum class Hint : uint8_t { kNone, kFlying, kArrived };
  struct Held {
    int32_t key = -1;
    Hint hint = Hint::kNone;
  };

  int32_t key(int32_t layer, int32_t expert) const { return layer * experts_ + expert; }
  int32_t group(int32_t layer) const { return budgets_ ? layer : 0; }
  void check(int32_t layer, int32_t expert) const;
  void check_lookup(int32_t layer, std::span<const int32_t> experts) const;
  void split_waves(int32_t layer, std::span<const int32_t> experts);
  void run_waves(int32_t layer, size_t experts, bool bulk);
  void run_wave(int32_t layer, std::span<ExpertLookup> lookups, bool bulk);
  void count_hit(int32_t layer, ExpertLookup& lookup);
  int32_t take_slot(int32_t group, int64_t floor, ExpertKey* evicted, bool* flying);
  void fill(int32_t group, int32_t slot, int32_t key, Hint hint);
  ExpertKey evict(int32_t group, int32_t slot);

  // Of look-ups of many rows (cache_bulk.cpp).
  void rank_by_use(std::span<const int32_t> ids, std::span<const int32_t> experts);
  void split_bulk(int32_t layer, std::span<const int32_t> experts);
  int32_t own_victim(int32_t layer, int64_t floor) const;
  int32_t take_bulk_slot(int32_t layer, int64_t floor, ExpertKey* evicted, bool* flying);
  void settle_bulk(int32_t layer);
  int32_t held_of(int32_t layer) const { return layer_held_[static_cast<size_t>(layer)]; }

  int32_t experts_, topk_;
  bool budgets_;
  std::unique_ptr<EvictionPolicy> policy_;
  std::vector<int32_t> first_;              // [groups + 1] first slot of each group
  std::vector<std::vector<int32_t>> free_;  // of each group, the next to take last: never used ones ascend
  std::vector<Held> held_;                  // [slots]
  std::vector<int64_t> mark_;               // [slots] when it was last used or filled
  std::vector<int32_t> slot_;               // [layers * experts], -1 = not there
  std::vector<int32_t> layer_held_;         // [layers] experts that are there
  static std::vector<Share> shares_of(const CacheConfig& config, const std::vector<int32_t>& first);
  std::vector<Share> shares_;  // [layers]; empty: look-ups of many rows are as any
  int32_t resident_ = 0;
  int64_t clock_ = 0, step_floor_ = 0;  // a tick a wave and a step
  int64_t steps_ = 0;

  std::vector<CacheCounters> counters_;  // [layers]
  CacheWindow reported_;

  std::vector<ExpertLookup> lookups_;
  std::vector<ExpertFetch> fetches_;
  std::vector<ExpertWave> waves_;
  std::vector<size_t> wave_ends_;
  std::vector<int32_t> misses_, distinct_;
  int32_t bulk_room_ = 0;  // R above
  std::vector<int32_t> ranked_,
      rank_;  // experts of a look-up of many rows, the least used first; and back, -1: none
  std::vector<bool> seen_;
};

}  // namespace rocket
