// Weights from the host's memory into another space: dense weights as one block, experts into slots.
//
// A slot: gate, up and down's data, then their block scales, each part aligned to 256 bytes.
#include "glm5-moe-nvfp4-2b/loader.h"

namespace rocket::glm5 {
namespace {

constexpr int64_t kAlignment = 256;

int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

int64_t data_bytes(const Weight& w) {
  switch (w.format) {
    case WeightFormat::kF32:
      return w.out * w.in * 4;
    case WeightFormat::kBF16:
      return w.out * w.in * 2;
    case WeightFormat::kNVFP4:
      return w.out * w.in / 2;
    case WeightFormat::kFP8Block:
    case WeightFormat::kMXFP8:
      return w.out * w.in;
  }
  return 0;
}

int64_t scale_bytes(const Weight& w) {
  const int64_t global = w.format == WeightFormat::kNVFP4 ? 4 : 0;  // kept in the table, not in the slot
  return weight_bytes(w) - data_bytes(w) - global;
}

int64_t slot_bytes(const ExpertWeights& expert) {
  int64_t bytes = 0;
  for (const Weight* w : {&expert.gate, &expert.up, &expert.down})
    bytes += aligned(data_bytes(*w)) + aligned(scale_bytes(*w));
  return bytes;
}

}  // namespace

int64_t Loader::slots_bytes() const {
  int64_t bytes = 0;
  for (const LayerWeights& layer : loaded_->weights.layer) {
    for (const ExpertWeights& expert : layer.moe.experts) bytes += slot_bytes(expert);
  }
  return bytes;
}

void Loader::move_experts(MemorySpace& memory) {
  Arena slots(static_cast<size_t>(slots_bytes()), "expert slots", memory);
  const auto move = [&](const void* from, int64_t bytes) {
    void* to = slots.take_bytes(static_cast<size_t>(aligned(bytes)));
    if (bytes > 0) memory.write(to, from, static_cast<size_t>(bytes));
    return to;
  };
  for (LayerWeights& layer : loaded_->weights.layer) {
    for (ExpertWeights& expert : layer.moe.experts) {
      Weight* const parts[] = {&expert.gate, &expert.up, &expert.down};
      for (Weight* w : parts) w->data = move(w->data, data_bytes(*w));
      for (Weight* w : parts) {
        if (w->block_scale) w->block_scale = move(w->block_scale, scale_bytes(*w));
      }
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
