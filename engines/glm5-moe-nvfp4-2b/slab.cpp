// What the slab of a fuel has to look like.
#include "experts/slab.h"

#include <algorithm>

#include "glm5-moe-nvfp4-2b/loader.h"

namespace rocket::glm5 {
namespace {

constexpr int64_t kSampleBytes = 4096;

// Global scales of all experts, and the front of one tensor in each layer: fuels of the same shapes but other weights
// differ in them.
uint64_t sample_of(const std::vector<std::span<const ExpertWeights>>& tables,
                   const std::vector<CheckpointStore::Layer>& sources) {
  std::vector<uint8_t> sample;
  const auto add = [&](const void* from, size_t bytes) {
    const auto* p = static_cast<const uint8_t*>(from);
    sample.insert(sample.end(), p, p + bytes);
  };
  for (size_t layer = 0; layer < tables.size(); ++layer) {
    for (const ExpertWeights& e : tables[layer]) {
      for (const Weight* w : {&e.gate, &e.up, &e.down}) add(&w->global_scale, sizeof w->global_scale);
    }
    const WeightSource& source = sources[layer].experts[7919 * layer % sources[layer].experts.size()][0];
    const TensorInfo& info = *source.data->info;
    std::vector<uint8_t> front(std::min<uint64_t>(info.bytes, kSampleBytes));
    source.data->file->read(info.offset, front.size(), front.data());
    add(front.data(), front.size());
  }
  return slab_checksum(sample.data(), static_cast<int64_t>(sample.size()));
}

}  // namespace

std::vector<std::span<const ExpertWeights>> Loader::expert_tables() const {
  std::vector<std::span<const ExpertWeights>> tables;
  for (const LayerWeights& layer : loaded_->weights.layer) {
    if (!layer.moe.experts.empty()) tables.emplace_back(layer.moe.experts);
  }
  return tables;
}

SlabHeader Loader::slab_header() const {
  const std::vector<std::span<const ExpertWeights>> tables = expert_tables();
  std::vector<int32_t> numbers;
  for (const CheckpointStore::Layer& layer : sources_) numbers.push_back(layer.number);
  return plan_slab(loaded_->weights.fingerprint, sample_of(tables, sources_), std::move(numbers), tables);
}

std::unique_ptr<ExpertStore> Loader::checkpoint_store() const {
  return std::make_unique<CheckpointStore>(loaded_->checkpoint, sources_);
}

}  // namespace rocket::glm5
