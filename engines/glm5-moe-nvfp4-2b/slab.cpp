// What the slab of a fuel has to look like.
#include "experts/slab.h"

#include <algorithm>
#include <functional>

#include "experts/read_threads.h"
#include "glm5-moe-nvfp4-2b/loader.h"

namespace rocket::glm5 {
namespace {

constexpr int64_t kPieceBytes = 64;
constexpr int64_t kMostPieces = 8,
                  kPiecesInAll = 1 << 14;  // of a tensor; of all of them, but for one in each
constexpr size_t kExpertsAtOnce = 16;
constexpr int kThreads = 16;  // a disk answers many small reads as fast as one
constexpr std::chrono::nanoseconds kPatience = std::chrono::seconds(30);

struct Piece {
  const SafetensorsFile* file;
  uint64_t at, bytes;
};

uint64_t scrambled(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

// As many pieces as `count`, spread over a tensor: one somewhere in each of so many equal stretches.
void add_pieces(const Checkpoint::Entry* entry, uint64_t count, uint64_t seed, std::vector<Piece>& pieces) {
  if (entry == nullptr || entry->info->bytes == 0) return;
  const TensorInfo& info = *entry->info;
  const uint64_t bytes = std::min<uint64_t>(info.bytes, kPieceBytes);
  const uint64_t stretch = info.bytes / std::min(count, std::max<uint64_t>(1, info.bytes / bytes));
  for (uint64_t from = 0; from + stretch <= info.bytes; from += stretch) {
    const uint64_t room = stretch - bytes + 1;
    pieces.push_back({entry->file, info.offset + from + scrambled(seed + from) % room, bytes});
  }
}

// Of every expert: pieces of gate, up and down, and of their scales.
std::vector<Piece> pieces_of(const CheckpointStore::Layer& layer, size_t first, size_t end, uint64_t count) {
  std::vector<Piece> pieces;
  for (size_t e = first; e < end; ++e) {
    for (size_t part = 0; part < 3; ++part) {
      const WeightSource& source = layer.experts[e][part];
      const uint64_t seed = scrambled((static_cast<uint64_t>(layer.number) << 32) + 3 * e + part);
      add_pieces(source.data, count, seed, pieces);
      add_pieces(source.block_scale, 1, seed + 1, pieces);
      add_pieces(source.row_scale, 1, seed + 2, pieces);
    }
  }
  return pieces;
}

// Checksums of the pieces of a few experts each. A read that hangs leaves them to its thread.
struct Samples {
  std::shared_ptr<const Checkpoint> checkpoint;
  std::vector<uint64_t> sums;
};

std::function<void()> sampling(std::shared_ptr<Samples> to, size_t index, std::vector<Piece> pieces) {
  return [to = std::move(to), index, pieces = std::move(pieces)] {
    std::vector<uint8_t> sample(pieces.size() * kPieceBytes);
    for (size_t i = 0; i < pieces.size(); ++i)
      pieces[i].file->read(pieces[i].at, pieces[i].bytes, sample.data() + i * kPieceBytes);
    to->sums[index] = slab_checksum(sample.data(), static_cast<int64_t>(sample.size()));
  };
}

// Tells fuels of the same shapes apart by a few MiB: global scales of all experts, and pieces of each.
uint64_t sample_of(const std::shared_ptr<const Checkpoint>& checkpoint,
                   const std::vector<std::span<const ExpertWeights>>& tables,
                   const std::vector<CheckpointStore::Layer>& sources) {
  int64_t experts = 0;
  std::vector<float> scales;
  for (const std::span<const ExpertWeights> table : tables) {
    experts += static_cast<int64_t>(table.size());
    for (const ExpertWeights& e : table)
      scales.insert(scales.end(), {e.gate.global_scale, e.up.global_scale, e.down.global_scale});
  }
  if (experts == 0) return 0;
  const auto count = static_cast<uint64_t>(std::clamp<int64_t>(kPiecesInAll / (3 * experts), 1, kMostPieces));
  const auto samples = std::make_shared<Samples>(Samples{checkpoint, {}});
  std::vector<std::function<void()>> jobs;
  std::vector<std::string> names;
  for (const CheckpointStore::Layer& layer : sources) {
    for (size_t e = 0; e < layer.experts.size(); e += kExpertsAtOnce) {
      const size_t end = std::min(layer.experts.size(), e + kExpertsAtOnce);
      jobs.push_back(sampling(samples, jobs.size(), pieces_of(layer, e, end, count)));
      names.push_back(expert_name(static_cast<int32_t>(e), layer.number) + ": " +
                      layer.experts[e][0].data->file->path());
    }
  }
  samples->sums.resize(jobs.size());
  const std::chrono::nanoseconds limit = std::max(expert_read_limit(), kPatience);  // of some hundred reads
  ReadThreads threads(static_cast<int>(std::min<size_t>(kThreads, jobs.size())));
  const int late = threads.run(std::move(jobs), limit);
  if (late >= 0) throw_hung(took_too_long(names[static_cast<size_t>(late)], limit));
  const uint64_t both[] = {
      slab_checksum(scales.data(), static_cast<int64_t>(scales.size() * sizeof(float))),
      slab_checksum(samples->sums.data(), static_cast<int64_t>(samples->sums.size() * sizeof(uint64_t)))};
  return slab_checksum(both, sizeof both);
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
  return plan_slab(loaded_->weights.fingerprint, sample_of(loaded_->checkpoint, tables, sources_),
                   std::move(numbers), tables);
}

std::unique_ptr<ExpertStore> Loader::checkpoint_store() const {
  return std::make_unique<CheckpointStore>(loaded_->checkpoint, sources_);
}

}  // namespace rocket::glm5
