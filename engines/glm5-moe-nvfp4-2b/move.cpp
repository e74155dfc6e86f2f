// Weights from the host's memory into another space: dense weights as one block, experts into slots, or into a bank
// from which a device fills its slots.
#include <algorithm>
#include <tuple>
#include <unordered_map>

#include "experts/slot_layout.h"
#include "glm5-moe-nvfp4-2b/loader.h"

namespace rocket::glm5 {
namespace {

constexpr int64_t kAlignment = 256;

int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

bool Loader::owns(size_t layer, size_t expert) const {
  return split_.owner_of(static_cast<int32_t>(layer), static_cast<int32_t>(expert)) == rank_;
}

int64_t Loader::slots_bytes() const {
  int64_t bytes = 0;
  const std::vector<std::span<const ExpertWeights>> tables = expert_tables();
  for (size_t layer = 0; layer < tables.size(); ++layer) {
    for (size_t e = 0; e < tables[layer].size(); ++e) {
      if (owns(layer, e)) bytes += slot_layout(tables[layer][e]).bytes;
    }
  }
  return bytes;
}

int64_t Loader::slot_bytes() const {
  int64_t bytes = 0;
  for (const LayerWeights& layer : loaded_->weights.layer)
    bytes = std::max(bytes, slot_bytes_of(layer.moe.experts));
  return bytes;
}

void Loader::move_experts(MemorySpace& memory) {
  Arena slots(static_cast<size_t>(slots_bytes()), "expert slots", memory);
  size_t moe_layer = 0;
  for (LayerWeights& layer : loaded_->weights.layer) {
    std::vector<ExpertWeights>& experts = layer.moe.experts;
    if (experts.empty()) continue;
    const size_t number = moe_layer++;
    for (size_t e = 0; e < experts.size(); ++e) {
      if (!owns(number, e)) continue;
      ExpertWeights& expert = experts[e];
      const SlotLayout layout = slot_layout(expert);
      char* const slot = static_cast<char*>(slots.take_bytes(static_cast<size_t>(layout.bytes)));
      const Weight* const parts[] = {&expert.gate, &expert.up, &expert.down};
      for (size_t i = 0; i < 3; ++i) {
        memory.write(slot + layout.data_at[i], parts[i]->data, static_cast<size_t>(layout.data_bytes[i]));
        if (layout.scale_bytes[i] > 0)
          memory.write(slot + layout.scale_at[i], parts[i]->block_scale,
                       static_cast<size_t>(layout.scale_bytes[i]));
      }
      place_in_slot(layout, slot, &expert);
    }
  }
  loaded_->slots = std::move(slots);
  loaded_->weights.experts_in_place = false;
}

// The pieces of the rank's streamed experts as they lie in the files.
std::vector<BankPiece> Loader::file_order() const {
  std::unordered_map<const SafetensorsFile*, size_t> number;
  for (const auto& file : loaded_->checkpoint->files()) number.emplace(file.get(), number.size());
  std::vector<std::tuple<size_t, uint64_t, BankPiece>> places;
  for (size_t layer = 0; layer < sources_.size(); ++layer) {
    const std::vector<ExpertSource>& experts = sources_[layer].experts;
    for (size_t e = 0; e < experts.size(); ++e) {
      for (size_t piece = 0; piece < 3 && owns(layer, e); ++piece) {
        const Checkpoint::Entry& data = *experts[e][piece].data;
        const BankPiece what = {static_cast<int32_t>(layer), static_cast<int32_t>(e),
                                static_cast<int32_t>(piece)};
        places.emplace_back(number.at(data.file), data.info->offset, what);
      }
    }
  }
  std::sort(places.begin(), places.end(), [](const auto& a, const auto& b) {
    return std::tie(std::get<0>(a), std::get<1>(a)) < std::tie(std::get<0>(b), std::get<1>(b));
  });
  std::vector<BankPiece> order;
  for (const auto& place : places) order.push_back(std::get<2>(place));
  return order;
}

// Of a store that has each expert in one piece, experts lie in order.
std::vector<BankPiece> Loader::bank_order(const ExpertStore& store) const {
  if (store.pieces() > 1) return file_order();
  std::vector<BankPiece> order;
  for (size_t layer = 0; layer < sources_.size(); ++layer) {
    for (size_t e = 0; e < sources_[layer].experts.size(); ++e) {
      if (owns(layer, e)) order.push_back({static_cast<int32_t>(layer), static_cast<int32_t>(e), 0});
    }
  }
  return order;
}

// Dense weights first: their place in the host's memory is free again before the bank takes its own.
std::unique_ptr<LoadedWeights> Loader::load_in_place(std::unique_ptr<ExpertStore> store, MemorySpace& memory,
                                                     const Exec& exec,
                                                     const WeightLoader::Progress& progress) {
  const HostBank::Tables tables = expert_tables();
  const int64_t dense = loader_->disk_bytes(), all = dense + HostBank::bytes(tables, bank_order(*store));
  const auto part = [&](int64_t before) -> WeightLoader::Progress {
    if (!progress) return {};
    return [&progress, before, all](int64_t done, int64_t) { progress(before + done, all); };
  };
  load_host(part(0));
  move_dense(memory);
  loaded_->bank = std::make_unique<HostBank>(tables, *store, bank_order(*store), pinned_bank_memory(),
                                             *exec.pool, part(dense));
  auto at = loaded_->bank->experts().begin();
  for (LayerWeights& layer : loaded_->weights.layer) {
    for (ExpertWeights& expert : layer.moe.experts) {
      if (*at) place_in_slot(slot_layout(expert), const_cast<char*>(*at), &expert);  // else another rank's
      ++at;
    }
  }
  move_tables(memory);
  loaded_->weights.experts_in_place = false;
  return std::move(loaded_);
}

DeviceExperts Loader::place_experts(const CacheConfig& cache, const HostBank::Tables& tables,
                                    std::unique_ptr<ExpertStore> store, Behind behind, MemorySpace& memory,
                                    const Exec& exec, int64_t choices,
                                    const WeightLoader::Progress& progress) const {
  switch (behind) {
    case Behind::kBank: {
      auto filled = std::make_unique<HostBank>(tables, *store, bank_order(*store), pinned_bank_memory(),
                                               *exec.pool, progress);
      return make_device_stream(cache, tables, std::move(filled), memory, exec, choices);
    }
    case Behind::kSplitBank: {
      SplitExperts split;
      split.order = bank_order(*store);
      split.store = std::move(store);
      split.progress = progress;
      return make_device_stream(cache, tables, std::move(split), memory, exec, choices);
    }
    case Behind::kDisk:
      break;
  }
  DiskExperts disk;
  disk.store = std::move(store);
  for (const CheckpointStore::Layer& layer : sources_) disk.numbers.push_back(layer.number);
  return make_device_stream(cache, tables, std::move(disk), memory, exec, choices);
}

// Dense weights first: their place in the host's memory is free again before the bank takes its own.
std::unique_ptr<LoadedWeights> Loader::load_streamed(const CacheConfig& cache,
                                                     std::unique_ptr<ExpertStore> store, Behind behind,
                                                     MemorySpace& memory, const Exec& exec, int64_t choices,
                                                     const WeightLoader::Progress& progress) {
  std::vector<std::vector<ExpertWeights>> experts;
  std::vector<MoeWeights*> layers;
  for (LayerWeights& layer : loaded_->weights.layer) {
    if (layer.moe.experts.empty()) continue;
    experts.push_back(std::move(layer.moe.experts));
    layer.moe.experts.clear();
    layers.push_back(&layer.moe);
  }
  const HostBank::Tables tables(experts.begin(), experts.end());
  const int64_t dense = loader_->disk_bytes();
  const int64_t all = dense + (behind == Behind::kDisk ? 0 : HostBank::bytes(tables, bank_order(*store)));
  const auto part = [&](int64_t before) -> WeightLoader::Progress {
    if (!progress) return {};
    return [&progress, before, all](int64_t done, int64_t) { progress(before + done, all); };
  };
  load_host(part(0));
  move_dense(memory);
  DeviceExperts device =
      place_experts(cache, tables, std::move(store), behind, memory, exec, choices, part(dense));
  loaded_->stream = std::move(device.stream);
  for (size_t i = 0; i < layers.size(); ++i) layers[i]->resident = device.tables[i];
  loaded_->weights.experts_in_place = false;
  return std::move(loaded_);
}

void Loader::move_dense(MemorySpace& memory) {
  Arena dense(loaded_->arena.used(), "dense weights", memory);
  char* base = static_cast<char*>(dense.take_bytes(loaded_->arena.used()));
  const char* host = loaded_->arena.data();
  memory.write(base, host, loaded_->arena.used());
  const auto follow = [&](Weight* w) {
    w->data = base + (static_cast<const char*>(w->data) - host);
    if (w->block_scale) w->block_scale = base + (static_cast<const char*>(w->block_scale) - host);
  };
  for (const auto& [handle, to] : bound_) follow(to);
  for (const Expansion& expansion : expanded_) follow(expansion.to);
  loaded_->arena = std::move(dense);

  int64_t small = 0;
  for (const std::vector<float>& values : loaded_->small)
    small += aligned(static_cast<int64_t>(values.size()) * 4);
  Arena moved(static_cast<size_t>(small), "norms and biases", memory);
  const auto move = [&](const void* from, size_t bytes) {
    void* to = moved.take_bytes(static_cast<size_t>(aligned(static_cast<int64_t>(bytes))));
    memory.write(to, from, bytes);
    return to;
  };
  for (size_t i = 0; i < small_to_.size(); ++i) {
    const std::vector<float>& values = loaded_->small[i];
    *small_to_[i] = static_cast<const float*>(move(values.data(), values.size() * 4));
  }
  loaded_->moved = std::move(moved);
  loaded_->small.clear();
}

// Of experts that have their place.
void Loader::move_tables(MemorySpace& memory) {
  const auto table_bytes = [](const LayerWeights& layer) {
    return layer.moe.experts.size() * sizeof(ExpertWeights);
  };
  int64_t bytes = 0;
  for (const LayerWeights& layer : loaded_->weights.layer)
    bytes += aligned(static_cast<int64_t>(table_bytes(layer)));
  if (bytes == 0) return;
  Arena tables(static_cast<size_t>(bytes), "expert tables", memory);
  for (LayerWeights& layer : loaded_->weights.layer) {
    if (layer.moe.experts.empty()) continue;
    void* const to =
        tables.take_bytes(static_cast<size_t>(aligned(static_cast<int64_t>(table_bytes(layer)))));
    memory.write(to, layer.moe.experts.data(), table_bytes(layer));
    layer.moe.resident = static_cast<const ExpertWeights*>(to);
  }
  loaded_->tables = std::move(tables);
}

}  // namespace rocket::glm5
