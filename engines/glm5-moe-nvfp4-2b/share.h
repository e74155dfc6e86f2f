// One rank's share of the dense weights: its heads of KDA and MLA, its columns of the dense and shared MLPs, its rows of
// lm_head. Projections into heads and columns are cut by rows, those out of them by columns, and what comes of the latter
// on all ranks is summed. Router, norms, low-rank projections, indexer, hyper-connections and embedding are on all.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "glm5-moe-nvfp4-2b/config.h"

namespace rocket::glm5 {

enum class Axis { kWhole, kRows, kColumns };

// The config of a rank among so many. Throws InputError for a number that does not divide what is split.
Config share_of(const Config& whole, int32_t ranks);

// Numbers of ranks, 1 first, that divide everything that is split, of the config of a model or of a rank's share.
std::vector<int32_t> possible_ranks(const Config& config);

// For people: "1, 2, 4".
std::string listed(const std::vector<int32_t>& numbers);

}  // namespace rocket::glm5
