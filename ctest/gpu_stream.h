// Experts with bytes that tell them apart behind a cache on the device, for tests and benchmarks.
#pragma once

#include <memory>
#include <vector>

#include "experts/device_stream.h"
#include "gpu_check.h"
#include "pattern_store.h"

namespace check {

struct StreamBench {
  StreamBench(Gpu& gpu, const rocket::CacheConfig& config, int64_t hidden, int64_t inner, bool mix,
              int64_t choices, rocket::SlotCopy copy)
      : table(stream_table(config.experts, hidden, inner, mix)) {
    const rocket::HostBank::Tables tables(static_cast<size_t>(config.layers), table);
    auto bank = std::make_unique<rocket::HostBank>(tables, PatternStore(), pattern_order(config),
                                                   rocket::pinned_bank_memory(), *gpu.cpu.exec.pool,
                                                   rocket::HostBank::Progress());
    take(rocket::make_device_stream(config, tables, std::move(bank), gpu.memory(), gpu.exec, choices, copy));
  }
  // Exclusive tiers.
  StreamBench(Gpu& gpu, const rocket::CacheConfig& config, int64_t hidden, int64_t inner, bool mix,
              int64_t choices)
      : table(stream_table(config.experts, hidden, inner, mix)) {
    const rocket::HostBank::Tables tables(static_cast<size_t>(config.layers), table);
    rocket::SplitExperts split;
    split.store = std::make_unique<PatternStore>();
    split.order = pattern_order(config);
    take(rocket::make_device_stream(config, tables, std::move(split), gpu.memory(), gpu.exec, choices));
  }
  StreamBench(Gpu& gpu, const rocket::CacheConfig& config, int64_t hidden, int64_t inner, bool mix,
              int64_t choices, rocket::DiskExperts disk)
      : table(stream_table(config.experts, hidden, inner, mix)) {
    const rocket::HostBank::Tables tables(static_cast<size_t>(config.layers), table);
    take(rocket::make_device_stream(config, tables, std::move(disk), gpu.memory(), gpu.exec, choices));
  }

  std::vector<rocket::ExpertWeights> table;  // without places
  std::unique_ptr<rocket::ExpertStream> stream;
  std::vector<const rocket::ExpertWeights*> tables_on_device;

 private:
  void take(rocket::DeviceExperts made) {
    stream = std::move(made.stream);
    tables_on_device = std::move(made.tables);
  }
};

}  // namespace check
