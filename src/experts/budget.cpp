#include "experts/budget.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "base/memory.h"

namespace rocket {
namespace {

constexpr char kOneOf[] = "expert cache: expected one of a size, a number of slots and a slot map, found ";

std::string number(int64_t value) {
  return std::to_string(value);
}

// Enough digits of a size in GiB that the option takes it for at least so many bytes.
std::string gib(int64_t bytes) {
  constexpr int64_t kDigits = 1'000'000;
  const int64_t whole = bytes >> 30, rest = bytes & ((int64_t{1} << 30) - 1);
  int64_t part = (rest * kDigits + (int64_t{1} << 30) - 1) >> 30;
  const int64_t up = part / kDigits;
  part %= kDigits;
  std::string digits = number(part);
  digits.insert(0, 6 - digits.size(), '0');
  return number(whole + up) + "." + digits;
}

void check_request(const CacheRequest& r, const CacheConfig& shape) {
  const int given = (r.bytes != 0) + (r.slots != 0) + !r.layer_slots.empty();
  if (given > 1) throw InputError(kOneOf + number(given), "give one of them");
  if (r.bytes < 0) throw InputError("expert cache: expected a size above 0, found " + number(r.bytes));
  if (r.slots < 0) throw InputError("expert cache: expected slots above 0, found " + number(r.slots));
  if (!r.layer_slots.empty() && r.layer_slots.size() != static_cast<size_t>(shape.layers)) {
    throw InputError("slot map: expected slots for " + number(shape.layers) + " MoE layers, found " +
                     number(static_cast<int64_t>(r.layer_slots.size())));
  }
}

void check_fewest(const CacheRequest& r, const CacheBudget& b, const std::vector<int32_t>& numbers) {
  const std::string why = " (the experts of one token in a layer)";
  for (size_t layer = 0; layer < r.layer_slots.size(); ++layer) {
    const int64_t fewest = ExpertCache::fewest_slots(b.config, static_cast<int32_t>(layer));
    if (r.layer_slots[layer] >= fewest) continue;
    throw PlanError("slot map: layer " + number(numbers[layer]) + ": expected at least " + number(fewest) +
                        " slots" + why + ", found " + number(r.layer_slots[layer]),
                    "give layer " + number(numbers[layer]) + " " + number(fewest) + " slots or more");
  }
  const int64_t fewest = ExpertCache::fewest_slots(b.config);
  if (!r.layer_slots.empty() || b.config.slots >= fewest) return;
  if (r.slots > 0) {
    throw PlanError(
        "expert cache: expected at least " + number(fewest) + " slots" + why + ", found " + number(r.slots),
        "raise --expert-slots to " + number(fewest));
  }
  const int64_t bytes = fewest * b.slot_bytes;
  throw PlanError("expert cache: expected at least " + format_bytes(bytes) + ", " + number(fewest) +
                      " slots" + why + ", found " + format_bytes(r.bytes) + ", which hold " +
                      number(b.config.slots),
                  "raise --expert-cache-gib to " + gib(bytes));
}

std::string percent(int64_t part, int64_t all) {
  return number((100 * part + all / 2) / all) + " %";
}

std::string about(const CacheBudget& b, int64_t experts) {
  const std::string asked = number(b.requested_slots) + " slots, " + format_bytes(b.requested_bytes);
  const std::string all = number(experts) + " experts";
  if (b.slots == experts) {
    const bool cut = b.requested_bytes > b.bytes();
    return "expert cache: " + number(b.slots) + " slots, " + format_bytes(b.bytes()) + ", hold all " + all +
           (cut ? "; cut from the " + format_bytes(b.requested_bytes) + " that were asked for" : "");
  }
  std::string line = "expert cache: " + number(b.slots) + " slots, " + format_bytes(b.bytes()) + ", for " +
                     all + " (" + percent(b.slots, experts) + ")";
  if (b.slots < b.requested_slots) line += "; cut from the " + asked + " that were asked for";
  return line;
}

}  // namespace

CacheBudget plan_cache(const CacheRequest& request, const CacheConfig& shape, int64_t slot_bytes,
                       const std::vector<int32_t>& numbers) {
  if (shape.layers == 0) throw InputError("expert cache: the model has no MoE layers");
  check_request(request, shape);
  CacheBudget b;
  b.config = shape;
  b.slot_bytes = slot_bytes;
  b.config.layer_slots = request.layer_slots;
  b.config.slots = request.bytes > 0 ? request.bytes / slot_bytes : request.slots;
  check_fewest(request, b, numbers);
  const auto owned = [&](size_t layer) { return shape.owned.empty() ? shape.experts : shape.owned[layer]; };
  int64_t experts = 0;
  for (size_t layer = 0; layer < static_cast<size_t>(shape.layers); ++layer) experts += owned(layer);
  if (request.layer_slots.empty()) {
    b.requested_slots = b.config.slots;
    b.config.slots = b.slots = std::min(b.config.slots, experts);
  } else {
    for (size_t layer = 0; layer < b.config.layer_slots.size(); ++layer) {
      int64_t& slots = b.config.layer_slots[layer];
      slots = std::min<int64_t>(slots, INT32_MAX);
      b.requested_slots += slots;
      b.slots += std::min<int64_t>(slots, owned(layer));
    }
  }
  b.requested_bytes = request.bytes > 0 ? request.bytes : b.requested_slots * slot_bytes;
  b.about = about(b, experts);
  return b;
}

}  // namespace rocket
