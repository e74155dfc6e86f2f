// What all ranks must agree on before a run, and what each brings to it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fabric/fabric.h"

namespace rocket {

// Name and value of what must be the same everywhere, in the order in which it is compared.
using Paper = std::vector<std::pair<std::string, std::string>>;

// Rank 0 compares every rank's paper with its own. Throws DeviceError on all ranks for the first difference, with both
// sides.
void compare_papers(Fabric& fabric, const Paper& mine);

// Numbers that rank 0 says and the others take.
void follow_rank0(Fabric& fabric, std::vector<int64_t>& numbers, const std::string& what);
// The least of each number over all ranks.
void least_of_all(Fabric& fabric, std::vector<int64_t>& numbers, const std::string& what);

// For a difference in much data, which a paper cannot show.
std::string digest(const void* data, size_t bytes);

}  // namespace rocket
