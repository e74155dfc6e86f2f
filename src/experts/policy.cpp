#include "experts/policy.h"

#include <algorithm>
#include <array>
#include <limits>
#include <set>
#include <utility>

#include "base/error.h"

namespace rocket {
namespace {

// Rings through arrays: every operation is O(1), but for the retired slots that a victim is looked for behind. They are
// the oldest of a ring; behind them marks never fall from older to newer slots, so that one tells of all.
class Lru final : public EvictionPolicy {
 public:
  explicit Lru(const PolicyShape& shape)
      : slots_(shape.slots),
        next_(static_cast<size_t>(shape.slots + shape.groups)),
        previous_(next_),
        retired_(static_cast<size_t>(shape.slots)),
        last_retired_(static_cast<size_t>(shape.groups)) {
    for (int32_t group = 0; group < shape.groups; ++group)
      at(next_, head(group)) = at(previous_, head(group)) = at(last_retired_, group) = head(group);
  }
  void hold(int32_t group, int32_t slot) override { use(group, slot); }
  void insert(int32_t group, int32_t slot, int32_t) override { link(group, slot); }
  void use(int32_t group, int32_t slot) override {
    unlink(group, slot);
    link(group, slot);
  }
  void retire(int32_t group, int32_t slot) override {
    unlink(group, slot);
    link_before(at(next_, at(last_retired_, group)), slot);
    retired_[static_cast<size_t>(slot)] = true;
    at(last_retired_, group) = slot;
  }
  void remove(int32_t group, int32_t slot) override { unlink(group, slot); }
  int32_t victim(int32_t group, const SlotGuard& guard) const override {
    int32_t oldest = next_[static_cast<size_t>(head(group))];
    while (oldest != head(group) && retired_[static_cast<size_t>(oldest)] && guard.holds(oldest))
      oldest = next_[static_cast<size_t>(oldest)];
    return oldest == head(group) || guard.holds(oldest) ? -1 : oldest;
  }

 private:
  int32_t head(int32_t group) const { return slots_ + group; }
  static int32_t& at(std::vector<int32_t>& links, int32_t i) { return links[static_cast<size_t>(i)]; }
  void link(int32_t group, int32_t slot) { link_before(head(group), slot); }  // as the newest
  void link_before(int32_t newer, int32_t slot) {
    const int32_t older = at(previous_, newer);
    at(next_, older) = slot;
    at(previous_, slot) = older;
    at(next_, slot) = newer;
    at(previous_, newer) = slot;
  }
  void unlink(int32_t group, int32_t slot) {
    if (at(last_retired_, group) == slot) at(last_retired_, group) = at(previous_, slot);
    retired_[static_cast<size_t>(slot)] = false;
    at(next_, at(previous_, slot)) = at(next_, slot);
    at(previous_, at(next_, slot)) = at(previous_, slot);
  }

  int32_t slots_;
  std::vector<int32_t> next_, previous_;  // of each slot, then of each group's head; next = towards newer
  std::vector<bool> retired_;             // [slots]
  std::vector<int32_t> last_retired_;     // [groups] the newest of them; none: the head
};

// Slots in order of (score, time of last use): the lowest makes way first.
class Scored : public EvictionPolicy {
 public:
  explicit Scored(const PolicyShape& shape)
      : order_(static_cast<size_t>(shape.groups)),
        entry_(static_cast<size_t>(shape.slots)),
        key_(static_cast<size_t>(shape.slots), -1) {}

  void insert(int32_t group, int32_t slot, int32_t key) override {
    key_[static_cast<size_t>(slot)] = key;
    place(group, slot, score(key));
  }
  void use(int32_t group, int32_t slot) override {
    order_[static_cast<size_t>(group)].erase(entry_[static_cast<size_t>(slot)]);
    place(group, slot, score_used(key_[static_cast<size_t>(slot)]));
  }
  void remove(int32_t group, int32_t slot) override {
    order_[static_cast<size_t>(group)].erase(entry_[static_cast<size_t>(slot)]);
    key_[static_cast<size_t>(slot)] = -1;
  }
  int32_t victim(int32_t group, const SlotGuard& guard) const override {
    for (const Entry& entry : order_[static_cast<size_t>(group)]) {
      if (!guard.holds(static_cast<int32_t>(entry[2]))) return static_cast<int32_t>(entry[2]);
    }
    return -1;
  }

 protected:
  virtual int64_t score(int32_t key) const = 0;  // as it is
  virtual int64_t score_used(int32_t key) = 0;   // after one more use

  // Scores of all keys of a group have changed.
  void rescore(int32_t group) {
    auto& order = order_[static_cast<size_t>(group)];
    std::set<Entry> renewed;
    for (Entry entry : order) {
      entry[0] = score(key_[static_cast<size_t>(entry[2])]);
      entry_[static_cast<size_t>(entry[2])] = entry;
      renewed.insert(entry);
    }
    order.swap(renewed);
  }

 private:
  using Entry = std::array<int64_t, 3>;  // score, time, slot
  void place(int32_t group, int32_t slot, int64_t score) {
    Entry& entry = entry_[static_cast<size_t>(slot)];
    entry = {score, ++time_, slot};
    order_[static_cast<size_t>(group)].insert(entry);
  }

  std::vector<std::set<Entry>> order_;
  std::vector<Entry> entry_;
  std::vector<int32_t> key_;
  int64_t time_ = 0;
};

constexpr int64_t kUse = 1 << 16;     // a use before any halving
constexpr int64_t kHalveAfter = 128;  // look-ups of each layer

class Frequency final : public Scored {
 public:
  Frequency(const PolicyShape& shape, bool ages)
      : Scored(shape),
        ages_(ages),
        per_group_(shape.keys_per_group),
        period_(kHalveAfter * shape.layers_per_group),
        count_(static_cast<size_t>(shape.keys)),
        lookups_(static_cast<size_t>(shape.groups)) {}

  void begin(int32_t group) override {
    if (!ages_ || ++lookups_[static_cast<size_t>(group)] % period_ != 0) return;
    const auto first = count_.begin() + int64_t{group} * per_group_;
    for (auto count = first; count != first + per_group_; ++count) *count /= 2;
    rescore(group);
  }

 private:
  int64_t score(int32_t key) const override { return count_[static_cast<size_t>(key)]; }
  int64_t score_used(int32_t key) override { return count_[static_cast<size_t>(key)] += kUse; }

  bool ages_;
  int32_t per_group_;
  int64_t period_;
  std::vector<int64_t> count_, lookups_;
};

class Belady final : public Scored {
 public:
  Belady(const PolicyShape& shape, std::vector<std::vector<int64_t>> uses)
      : Scored(shape), uses_(std::move(uses)), seen_(static_cast<size_t>(shape.keys)) {
    if (uses_.size() != seen_.size()) throw InputError("belady: the future is of another cache");
  }
  void begin(int32_t) override { ++now_; }

 private:
  int64_t score(int32_t key) const override {
    const auto& uses = uses_[static_cast<size_t>(key)];
    const size_t next = seen_[static_cast<size_t>(key)];
    return next < uses.size() ? -uses[next] : -std::numeric_limits<int64_t>::max();
  }
  int64_t score_used(int32_t key) override {
    const auto& uses = uses_[static_cast<size_t>(key)];
    size_t& next = seen_[static_cast<size_t>(key)];
    while (next < uses.size() && uses[next] <= now_) ++next;
    return score(key);
  }

  std::vector<std::vector<int64_t>> uses_;
  std::vector<size_t> seen_;
  int64_t now_ = -1;
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_policy(const std::string& name, const PolicyShape& shape) {
  if (name == "lru") return std::make_unique<Lru>(shape);
  if (name == "lfu") return std::make_unique<Frequency>(shape, false);
  if (name == "lfru") return std::make_unique<Frequency>(shape, true);
  const std::string hint = name == "belady" ? "belady needs the future, which only a replay has" : "";
  throw InputError("expert cache: policy: expected one of lru, lfu, lfru, found " + name, hint);
}

std::unique_ptr<EvictionPolicy> make_belady(const PolicyShape& shape,
                                            std::vector<std::vector<int64_t>> uses) {
  return std::make_unique<Belady>(shape, std::move(uses));
}

}  // namespace rocket
