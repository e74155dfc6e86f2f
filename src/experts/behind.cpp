#include "experts/behind.h"

#include <algorithm>

#include "base/error.h"

namespace rocket {
namespace {

int64_t needs(const BehindRequest& r, int64_t behind) {
  return std::max(behind, r.dense_bytes) + r.shared_bytes + r.reserve_bytes;
}

bool fits(const BehindRequest& r, int64_t behind) {
  return needs(r, behind) <= r.host.bytes;
}

std::string available(const BehindRequest& r) {
  return format_bytes(r.host.bytes) + " (" + r.host.source + ")";
}

void check_fits(const BehindRequest& r, int64_t behind, const std::string& what, const std::string& hint) {
  if (fits(r, behind)) return;
  throw PlanError(
      "host memory: needs " + format_bytes(needs(r, behind)) + " (" + what + " " + format_bytes(behind) +
          (r.shared_bytes > 0 ? ", what the device takes of the same memory " + format_bytes(r.shared_bytes)
                              : "") +
          ", reserve " + format_bytes(r.reserve_bytes) + "), available " + available(r) + "; the device's " +
          std::to_string(r.slots) + " slots hold " + format_bytes(r.slots * r.slot_bytes),
      hint);
}

std::string or_a_slab(const BehindRequest& r) {
  return r.slab ? "" : ", or write a slab (rocket fuel slab) and give it with --expert-slab";
}

BehindPlan bank(const BehindRequest& r) {
  check_fits(r, r.bank_bytes, "host bank of all routed experts",
             std::string(r.whole ? "give --expert-bank exclusive, " : "") +
                 "free memory, raise the container's limit, use a smaller fuel, or a "
                 "cache that holds all experts if the device has the room" +
                 or_a_slab(r));
  return {Behind::kBank, r.bank_bytes, "; all of them in a host bank, " + format_bytes(r.bank_bytes)};
}

BehindPlan split_bank(const BehindRequest& r, int64_t bytes) {
  const std::string others = std::to_string(r.experts - r.slots);
  check_fits(
      r, bytes, "host bank of the " + others + " experts that have no slot",
      "give the cache more slots if the device has the room, free memory, raise the container's limit, or "
      "use a smaller fuel" +
          or_a_slab(r));
  std::string about = "; the other " + others + " in a host bank, " + format_bytes(bytes);
  if (r.bank == "auto")
    about += ", as one of all needs " + format_bytes(needs(r, r.bank_bytes)) + " and available are " +
             available(r);
  return {Behind::kSplitBank, bytes, about};
}

BehindPlan disk(const BehindRequest& r, int64_t split) {
  check_fits(r, r.staging_bytes, "staging for experts from the slab",
             "free memory, or raise the container's limit");
  std::string about = "; the others in the slab";
  if (r.bank == "auto")
    about += ", as a host bank of them needs " + format_bytes(needs(r, split)) + " and available are " +
             available(r);
  return {Behind::kDisk, r.staging_bytes, about};
}

}  // namespace

BehindPlan plan_behind(const BehindRequest& r) {
  const int64_t split = (r.experts - r.slots) * r.slot_bytes;
  if (r.bank == "yes") return bank(r);
  if (r.bank == "exclusive" && !r.whole) {
    throw InputError(
        "expert bank: expected auto, yes or no where boosters share the experts, found exclusive",
        "leave --expert-bank out");
  }
  if (r.bank == "exclusive") return split_bank(r, split);
  if (r.bank == "no") return disk(r, split);
  if (r.bank != "auto")
    throw InputError("expert bank: expected auto, yes, exclusive or no, found '" + r.bank + "'");
  if (fits(r, r.bank_bytes)) return bank(r);
  if (!r.whole) return r.slab ? disk(r, r.bank_bytes) : bank(r);
  if (fits(r, split) || !r.slab) return split_bank(r, split);
  return disk(r, split);
}

}  // namespace rocket
