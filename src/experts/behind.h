// What lies behind the slots of a cache of experts in a device's memory: integers only, before any of it is allocated.
//
//   a bank        all experts in the host's memory
//   a split bank  those that no slot holds; host and device have the model together
//   a disk        the slab; the host has staging for what is on its way
#pragma once

#include <cstdint>
#include <string>

#include "base/memory.h"

namespace rocket {

enum class Behind { kBank, kSplitBank, kDisk };

struct BehindRequest {
  std::string bank = "auto";       // auto | yes (a bank) | exclusive (a split bank) | no (a disk)
  bool slab = false;               // whether there is one
  bool whole = true;               // whether these are all experts; a split bank wants that
  int64_t experts = 0, slots = 0;  // of all layers; fewer slots than experts
  int64_t slot_bytes = 0;          // of one slot
  int64_t bank_bytes = 0;          // of all experts
  int64_t staging_bytes = 0;       // for what comes from a disk
  int64_t dense_bytes = 0;         // of weights that are in the host's memory before all that
  int64_t shared_bytes = 0;        // that the device takes of the same memory; 0: it has its own
  int64_t reserve_bytes = 0;
  MemoryAvailable host;
};

struct BehindPlan {
  Behind behind = Behind::kBank;
  int64_t bytes = 0;  // of experts in the host's memory, or of the staging
  std::string about;  // for people, behind what they are told of the cache
};

// auto: the first of the three that fits, the disk only where there is a slab. Throws PlanError for what does not fit, with
// both sides and what either holds; InputError for any other word.
BehindPlan plan_behind(const BehindRequest& request);

}  // namespace rocket
