// The exchanges of a step whose ops run where `exec` says: on the host as they are, on a device through pinned memory.
//
// Staged: a kernel packs own rows into pinned memory, the host exchanges blocks as RowExchange does, and a kernel fetches
// the others' rows from there. All ranks know from the routing which rows cross, so the host reads it first: it is small
// beside the rows, and comes along with them, so that only rows which cross are sent, by the same protocol as the
// CPU's. The host's part is a call in the recorded step (host_lane.h): a rank that waits leaves its device to others, even
// to a rank that shares it.
//
// Over NCCL, where every rank has a device of its own and the library: a recorded step cannot know how many rows cross,
// so messages are of the size that all choices together may need, and no row is packed: each rank sends its rows as
// they lie, [rows, topk, hidden], and takes from each other those which that one owns. Its choices come along, to find a
// rank that is out of step.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/memory_space.h"
#include "fabric/part_exchange.h"
#include "fabric/row_exchange.h"
#include "ops/exec.h"

namespace rocket {

struct ExchangeConfig {
  ExpertSplit split;
  int32_t topk = 0, hidden = 0;
  std::vector<int32_t> numbers;  // the model's of its MoE layers
  int64_t max_rows = 0;          // of a step
  bool split_dense = false;
  int64_t part_floats = 0;  // the largest part of a rank, with split_dense
};

struct Exchange {
  std::unique_ptr<RowExchange> rows;
  std::unique_ptr<PartExchange> parts;  // null without split_dense
  std::string about;                    // for people: how rows cross; empty: as they lie
};

// Fabric, memory and exec's device outlive it. All ranks take the same way. Throws DeviceError, PlanError.
Exchange make_exchange(Fabric& fabric, const ExchangeConfig& config, const Exec& exec, MemorySpace& memory);

}  // namespace rocket
