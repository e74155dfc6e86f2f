// Snapshots on disk: a safetensors file with one tensor for each part of the state, the tokens, the fed
// embeddings, and the fuel's fingerprint as the name of an empty tensor.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "state/stream.h"

namespace rocket {

// Writes to a temporary name beside `file`, then renames. Throws DeviceError if it cannot be written.
void write_snapshot(const StreamState& state, const StatePool& pool, uint64_t fingerprint,
                    const std::string& file);

// Throws FuelError: not a snapshot, of another fuel, of other shapes; PlanError if it does not fit. `hidden`:
// floats of an embedding; `vocab`: tokens must be below it.
std::unique_ptr<StreamState> read_snapshot(StatePool& pool, uint64_t fingerprint, int32_t hidden,
                                           int32_t vocab, int64_t max_context, const std::string& file);

}  // namespace rocket
