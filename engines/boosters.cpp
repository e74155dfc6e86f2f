#include "boosters.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/memory.h"
#include "ops/table.h"
#include "runtime/device.h"

namespace rocket {

void check_split(const EngineOptions& options, const glm5::Config& config) {
  const Fabric& fabric = *options.fabric;
  const ExpertSplit& split = options.split;
  if (fabric.ranks() != split.ranks) {
    throw InputError("boosters: expected " + std::to_string(fabric.ranks()) +
                     ", the ranks that were started, found " + std::to_string(split.ranks));
  }
  const auto layers = static_cast<size_t>(std::count(config.is_moe.begin(), config.is_moe.end(), true));
  const size_t owners = layers * static_cast<size_t>(config.n_routed_experts);
  if ((owners > 0 && split.experts != config.n_routed_experts) || split.owner.size() != owners) {
    throw InputError("split: expected owners of " + std::to_string(owners) + " experts, found " +
                     std::to_string(split.owner.size()));
  }
  for (const int32_t owner : split.owner) {
    if (owner >= 0 && owner < split.ranks) continue;
    throw InputError("split: expected boosters from 0 to " + std::to_string(split.ranks - 1) + ", found " +
                     std::to_string(owner));
  }
}

void take_limits(EngineOptions& options) {
  std::vector<int64_t> limits = {options.max_context, options.max_rows, options.max_streams};
  const std::vector<int64_t> mine = limits;
  follow_rank0(*options.fabric, limits, "the run's limits");
  for (size_t i = 0; i < limits.size(); ++i) limits[i] = mine[i] != 0 ? mine[i] : limits[i];
  options.max_context = limits[0];
  options.max_rows = static_cast<int32_t>(limits[1]);
  options.max_streams = static_cast<int32_t>(limits[2]);
}

int32_t device_of_rank(size_t devices) {
  for (const char* const name : {"MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"}) {
    const char* const text = std::getenv(name);
    if (text && devices > 0) return static_cast<int32_t>(std::strtoul(text, nullptr, 10) % devices);
  }
  return 0;
}

namespace {

// What kernels are made for: GPUs of one kind add in the same order.
std::string cuda_kernels() {
  const std::vector<CudaDevice> devices = cuda_devices();
  if (devices.empty()) return "cuda";
  const CudaDevice& device = devices[static_cast<size_t>(device_of_rank(devices.size()))];
  return "cuda, " + device.name + ", sm_" + std::to_string(device.arch);
}

std::string shown(const CacheRequest& cache) {
  if (!cache.layer_slots.empty())
    return "slot map " + digest(cache.layer_slots.data(), cache.layer_slots.size() * sizeof(int64_t));
  if (cache.slots > 0) return std::to_string(cache.slots) + " slots";
  return cache.bytes > 0 ? std::to_string(cache.bytes) + " bytes" : "none";
}

std::string shown(uint64_t fingerprint) {
  return digest(&fingerprint, sizeof fingerprint);
}

}  // namespace

// Threads are left out: no result depends on their number.
Paper paper(const EngineOptions& options, const glm5::Loader& loader, const std::string& backend) {
  const std::vector<int32_t>& owner = options.split.owner;
  const std::string kernels = backend == "cpu" ? cpu_ops_isa() : cuda_kernels();
  return {
      {"version", ROCKET_VERSION},
      {"fuel fingerprint", shown(loader.shapes().fingerprint)},
      {"fuel's norms and biases", loader.small_digest()},
      {"pieces of the fuel's weights", loader.sample_digest()},
      {"split", std::to_string(options.split.ranks) + " boosters, " +
                    digest(owner.data(), owner.size() * sizeof(int32_t))},
      {"dense weights", options.split_dense ? "split (--split-dense)" : "whole"},
      {"backend", backend},
      {"kernel path", kernels},
      {"prefill precision", options.prefill_precision},
      {"KV dtype", options.kv_dtype},
      {"context", std::to_string(options.max_context)},
      {"rows a step", std::to_string(options.max_rows)},
      {"streams", std::to_string(options.max_streams)},
      {"expert cache", shown(options.expert_cache) + (options.expert_slab.empty() ? "" : " over a slab")},
      {"page size", std::to_string(sysconf(_SC_PAGESIZE))},
      {"time limit", std::to_string(options.fabric->limit_seconds()) + " s"},
  };
}

SessionLimits agreed(Fabric& fabric, const SessionLimits& mine) {
  std::vector<int64_t> limits = {mine.max_context, mine.max_rows, mine.max_streams, mine.state_budget_bytes};
  least_of_all(fabric, limits, "its weights");
  return {limits[0], static_cast<int32_t>(limits[1]), static_cast<int32_t>(limits[2]), limits[3]};
}

std::string about_boosters(const Fabric& fabric, const EngineInfo& info, const std::string& exchange) {
  return "boosters: " + std::to_string(fabric.ranks()) + " ranks over " + fabric.library() +
         (exchange.empty() ? "" : ", " + exchange) + "; rank 0 has " + std::to_string(info.experts_owned) +
         " of " + std::to_string(int64_t{info.moe_layers} * info.experts) + " experts, " +
         format_bytes(info.owned_bytes) + ", beside " +
         (info.split_dense ? "its share of the dense weights, " : "the dense weights, ") +
         format_bytes(info.dense_bytes);
}

}  // namespace rocket
