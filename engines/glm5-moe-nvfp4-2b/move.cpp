// Weights from the host's memory into another space: dense weights as one block, experts into slots.
#include <algorithm>

#include "experts/slot_layout.h"
#include "glm5-moe-nvfp4-2b/loader.h"

namespace rocket::glm5 {
namespace {

constexpr int64_t kAlignment = 256;

int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

int64_t Loader::slots_bytes() const {
  int64_t bytes = 0;
  for (const LayerWeights& layer : loaded_->weights.layer) {
    for (const ExpertWeights& expert : layer.moe.experts) bytes += slot_layout(expert).bytes;
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
  for (LayerWeights& layer : loaded_->weights.layer) {
    for (ExpertWeights& expert : layer.moe.experts) {
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
  for (const LayerWeights& layer : loaded_->weights.layer)
    small += aligned(static_cast<int64_t>(layer.moe.experts.size() * sizeof(ExpertWeights)));
  Arena moved(static_cast<size_t>(small), "norms, biases and expert tables", memory);
  const auto move = [&](const void* from, size_t bytes) {
    void* to = moved.take_bytes(static_cast<size_t>(aligned(static_cast<int64_t>(bytes))));
    memory.write(to, from, bytes);
    return to;
  };
  for (size_t i = 0; i < small_to_.size(); ++i) {
    const std::vector<float>& values = loaded_->small[i];
    *small_to_[i] = static_cast<const float*>(move(values.data(), values.size() * 4));
  }
  for (LayerWeights& layer : loaded_->weights.layer) {
    const std::vector<ExpertWeights>& experts = layer.moe.experts;
    layer.moe.resident =
        experts.empty()
            ? nullptr
            : static_cast<const ExpertWeights*>(move(experts.data(), experts.size() * sizeof(ExpertWeights)));
  }
  loaded_->moved = std::move(moved);
  loaded_->small.clear();
}

}  // namespace rocket::glm5
