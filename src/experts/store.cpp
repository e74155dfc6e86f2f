#include "experts/store.h"

#include <cstdio>
#include <utility>

#include "base/error.h"

namespace rocket {

std::string expert_name(int32_t expert, int32_t layer) {
  return "expert " + std::to_string(expert) + " of layer " + std::to_string(layer);
}

std::string took_too_long(const std::string& where, std::chrono::nanoseconds limit) {
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.9g", static_cast<double>(limit.count()) * 1e-9);
  return where + ": the disk gave nothing for " + seconds + " s";
}

void throw_hung(const std::string& what) {
  throw DeviceError(what, "look after the disk; for a slow one raise ROCKET_EXPERT_READ_SECONDS");
}

void ExpertStore::fetch_all(int32_t layer, std::span<const ExpertRead> reads) const {
  for (const ExpertRead& read : reads) {
    for (int32_t piece = 0; piece < pieces(); ++piece)
      fetch(layer, read.expert, piece, *read.layout, read.slot);
  }
}

void PiecewiseStore::fetch_all(int32_t layer, std::span<const ExpertRead> reads) const {
  const std::lock_guard lock(mutex_);
  if (!hung_.empty()) throw_hung(hung_);
  if (!threads_) threads_ = std::make_unique<ReadThreads>(kThreads);
  std::vector<std::function<void()>> jobs;
  for (const ExpertRead& read : reads) {
    for (int32_t piece = 0; piece < pieces(); ++piece) jobs.push_back(job(layer, read, piece));
  }
  const int late = threads_->run(std::move(jobs), limit_);
  if (late < 0) return;
  const int32_t piece = late % pieces();
  hung_ = took_too_long(where(layer, reads[static_cast<size_t>(late / pieces())].expert, piece), limit_);
  throw_hung(hung_);
}

bool PiecewiseStore::hung() const {
  const std::lock_guard lock(mutex_);
  return !hung_.empty();
}

CheckpointStore::CheckpointStore(std::shared_ptr<const Checkpoint> checkpoint, std::vector<Layer> layers)
    : tensors_(std::make_shared<Tensors>(Tensors{std::move(checkpoint), std::move(layers)})) {}

void CheckpointStore::Tensors::read(int32_t layer, int32_t expert, int32_t piece, const SlotLayout& layout,
                                    void* slot) const {
  const Layer& of = layers[static_cast<size_t>(layer)];
  const size_t part = static_cast<size_t>(piece);
  const WeightSource& source = of.experts[static_cast<size_t>(expert)][part];
  char* const base = static_cast<char*>(slot);
  void* const scales = layout.scale_bytes[part] > 0 ? base + layout.scale_at[part] : nullptr;
  try {
    read_weight(*checkpoint, source, base + layout.data_at[part], scales);
    for (const Checkpoint::Entry* entry : {source.data, source.block_scale, source.row_scale}) {
      if (entry != nullptr) entry->file->check_unchanged();
    }
  } catch (const FuelError& error) {
    throw FuelError(expert_name(expert, of.number) + ": " + error.what(), error.hint());
  }
}

void CheckpointStore::fetch(int32_t layer, int32_t expert, int32_t piece, const SlotLayout& layout,
                            void* slot) const {
  tensors_->read(layer, expert, piece, layout, slot);
}

void CheckpointStore::expect(int32_t layer, int32_t expert, int32_t piece) const {
  const Layer& of = tensors_->layers[static_cast<size_t>(layer)];
  const WeightSource& source = of.experts[static_cast<size_t>(expert)][static_cast<size_t>(piece)];
  for (const Checkpoint::Entry* entry : {source.data, source.block_scale}) {
    if (entry != nullptr) entry->file->will_read(entry->info->offset, entry->info->bytes);
  }
}

std::function<void()> CheckpointStore::job(int32_t layer, const ExpertRead& read, int32_t piece) const {
  return [tensors = tensors_, layer, read, layout = *read.layout, piece] {
    tensors->read(layer, read.expert, piece, layout, read.slot);
  };
}

std::string CheckpointStore::where(int32_t layer, int32_t expert, int32_t piece) const {
  const Layer& of = tensors_->layers[static_cast<size_t>(layer)];
  const WeightSource& source = of.experts[static_cast<size_t>(expert)][static_cast<size_t>(piece)];
  return expert_name(expert, of.number) + ": " + source.data->file->path();
}

}  // namespace rocket
