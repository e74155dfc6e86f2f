// Writes a slab: each expert once, from the store that has it now.
#pragma once

#include <functional>
#include <string>

#include "experts/slab.h"
#include "experts/store.h"

namespace rocket {

// `header` as planned; `tables` as it was planned with. Experts are brought a few at a time, each through one slot's
// worth of memory. The file is written under a temporary name in the folder, made if it is not there, and renamed once
// it is on the disk; what a failure or an exception of `progress` leaves is removed, and what a crash has left is
// written over. Returns the file's path. Throws FuelError (the source), DeviceError (the target: no room, no right,
// another process writes it).
using SlabProgress = std::function<void(int64_t done, int64_t total)>;
std::string write_slab(const std::string& dir, SlabHeader header, const ExpertStore& from,
                       std::span<const std::span<const ExpertWeights>> tables, const SlabProgress& progress);

// Reads every expert of a slab and holds it against its checksum, with SlabStore's errors, and against the bytes that
// the store of the fuel has. Throws FuelError that names the first which differs.
void verify_slab(const std::string& dir, const SlabHeader& expected, const ExpertStore& from,
                 std::span<const std::span<const ExpertWeights>> tables, const SlabProgress& progress);

}  // namespace rocket
