// What lies behind a device's slots, for every amount of the host's memory: the first that fits, to the byte.
#include "base/error.h"
#include "check.h"
#include "experts/behind.h"

using namespace rocket;
using check::expect;

namespace {

constexpr int64_t kSlot = 1000, kExperts = 100, kSlots = 30, kBank = 95000,
                  kSplit = (kExperts - kSlots) * kSlot;
constexpr int64_t kStaging = 8000, kReserve = 500;

BehindRequest request(const std::string& bank, bool slab, int64_t host) {
  BehindRequest r;
  r.bank = bank;
  r.slab = slab;
  r.experts = kExperts, r.slots = kSlots, r.slot_bytes = kSlot;
  r.bank_bytes = kBank;  // some experts are smaller than a slot
  r.staging_bytes = kStaging;
  r.dense_bytes = 2000;
  r.reserve_bytes = kReserve;
  r.host = {host, "a test"};
  return r;
}

void is(const BehindRequest& r, Behind behind, int64_t bytes, const std::string& about) {
  const BehindPlan plan = plan_behind(r);
  const std::string what = r.bank + ", " + std::to_string(r.host.bytes) + (r.slab ? ", slab" : "");
  expect(plan.behind == behind && plan.bytes == bytes, what);
  expect(plan.about.find(about) != std::string::npos, what + ": " + plan.about);
}

// Both sides, and what else is known.
void refused(const BehindRequest& r, int64_t needs, const std::string& part) {
  const std::string what = r.bank + ", " + std::to_string(r.host.bytes);
  try {
    plan_behind(r);
    expect(false, what + ": is refused");
  } catch (const PlanError& error) {
    const std::string said = error.what();
    for (const std::string& words :
         {"needs " + format_bytes(needs), part, "available " + format_bytes(r.host.bytes) + " (a test)",
          "30 slots hold " + format_bytes(kSlots * kSlot)})
      expect(said.find(words) != std::string::npos, what + ": " + words + " in " + said);
    expect(!error.hint().empty(), what + ": a hint");
  }
}

void all() {
  for (const bool slab : {false, true}) {
    is(request("auto", slab, kBank + kReserve), Behind::kBank, kBank, "; all of them in a host bank, ");
    is(request("auto", slab, kBank + kReserve - 1), Behind::kSplitBank, kSplit,
       "; the other 70 in a host bank, ");
    is(request("auto", slab, kSplit + kReserve), Behind::kSplitBank, kSplit, "as one of all needs ");
    is(request("yes", slab, kBank + kReserve), Behind::kBank, kBank, "all of them");
    is(request("exclusive", slab, kSplit + kReserve), Behind::kSplitBank, kSplit, "the other 70");
    is(request("exclusive", slab, int64_t{1} << 40), Behind::kSplitBank, kSplit, "the other 70");
    refused(request("yes", slab, kBank + kReserve - 1), kBank + kReserve, "host bank of all routed experts");
    refused(request("exclusive", slab, kSplit + kReserve - 1), kSplit + kReserve, "of the 70 experts");
  }
  is(request("auto", true, kSplit + kReserve - 1), Behind::kDisk, kStaging, "as a host bank of them needs ");
  is(request("auto", true, kStaging + kReserve), Behind::kDisk, kStaging, "; the others in the slab");
  is(request("no", true, int64_t{1} << 40), Behind::kDisk, kStaging, "; the others in the slab");
  refused(request("auto", false, kSplit + kReserve - 1), kSplit + kReserve, "of the 70 experts");
  refused(request("auto", true, kStaging + kReserve - 1), kStaging + kReserve, "staging");
  refused(request("no", true, kStaging + kReserve - 1), kStaging + kReserve, "staging");

  // Dense weights are in the host's memory before the bank: the larger counts.
  BehindRequest dense = request("auto", false, kSplit + 10000 + kReserve - 1);
  dense.dense_bytes = kSplit + 10000;
  refused(dense, kSplit + 10000 + kReserve, "of the 70 experts");
  ++dense.host.bytes;
  is(dense, Behind::kSplitBank, kSplit, "the other 70");
  // One memory: what the device takes counts, too.
  BehindRequest shared = request("auto", false, kBank + 40000 + kReserve);
  shared.shared_bytes = 40000;
  is(shared, Behind::kBank, kBank, "all of them");
  shared.host.bytes = kSplit + 40000 + kReserve - 1;
  refused(shared, kSplit + 40000 + kReserve, "what the device takes of the same memory ");

  // A rank's share of the experts: a bank of its own, or the slab.
  BehindRequest share = request("auto", true, kBank + kReserve - 1);
  share.whole = false;
  is(share, Behind::kDisk, share.staging_bytes, "the others in the slab");
  share.slab = false;
  refused(share, kBank + kReserve, "host bank of all routed experts");
  ++share.host.bytes;
  is(share, Behind::kBank, kBank, "all of them");
  share.bank = "exclusive";
  try {
    plan_behind(share);
    expect(false, "a split bank of a share");
  } catch (const InputError&) {
  }

  try {
    plan_behind(request("some", true, int64_t{1} << 40));
    expect(false, "another word");
  } catch (const InputError&) {
  }
}

}  // namespace

int main() {
  all();
  return check::finish("test_behind");
}
