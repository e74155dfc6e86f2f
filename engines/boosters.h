// What the ranks of a run with several boosters settle before and after they load.
#pragma once

#include <string>

#include "fabric/fabric.h"
#include "fabric/handshake.h"
#include "glm5-moe-nvfp4-2b/config.h"
#include "glm5-moe-nvfp4-2b/loader.h"
#include "runtime/engine.h"
#include "runtime/session.h"

namespace rocket {

// Throws InputError for a split that is not one of this model's experts among the ranks that were started.
void check_split(const EngineOptions& options, const glm5::Config& config);

// Rank 0 knows what it will be asked for; where others were told nothing of that, they do as it does.
void take_limits(EngineOptions& options);

// The CUDA device of this rank among so many of its machine: ranks of one machine take one after the other.
int32_t device_of_rank(size_t devices);

// What must be the same on all ranks.
Paper paper(const EngineOptions& options, const glm5::Loader& loader, const std::string& backend);

// What each rank has room for may differ; what streams are granted must not.
SessionLimits agreed(Fabric& fabric, const SessionLimits& mine);

// For people. exchange: how rows cross; empty: there is only one way.
std::string about_boosters(const Fabric& fabric, const EngineInfo& info, const std::string& exchange);

}  // namespace rocket
