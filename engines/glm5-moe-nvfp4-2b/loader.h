// Brings a glm5_next fuel into memory in two steps, so that the plan is known before the first large
// allocation.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "experts/behind.h"
#include "experts/device_stream.h"
#include "experts/slab.h"
#include "experts/store.h"
#include "experts/stream.h"
#include "fabric/split.h"
#include "fuel/checkpoint.h"
#include "fuel/quantised.h"
#include "glm5-moe-nvfp4-2b/config.h"
#include "glm5-moe-nvfp4-2b/share.h"
#include "glm5-moe-nvfp4-2b/weights.h"

namespace rocket::glm5 {

// Weights and what they point into.
struct LoadedWeights {
  std::shared_ptr<Checkpoint> checkpoint;
  std::unique_ptr<HostBank>
      bank;     // of routed experts that a device reads in place; released behind its other memory
  Arena arena;  // dense weights
  std::deque<std::vector<float>> small;  // norms, biases, taps, as float32, where the ops are the host's
  Arena moved, tables;                   // norms, biases, taps; expert tables, where they are not
  Arena slots;                           // routed experts, where they are not used in place
  Weights weights;
  std::unique_ptr<ExpertStream> stream;  // of routed experts, where a bounded cache holds them
};

class Loader {
 public:
  // Opens the checkpoint and finds every tensor that the model needs, with its shape. `streamed`: routed experts are
  // fetched into slots as they are asked for. Of routed experts only those that the rank owns; of dense weights, where
  // ranks share them (config, a share's), its part. Throws FuelError.
  Loader(const Config& config, const std::string& dir, bool streamed = false, const ExpertSplit& split = {},
         int32_t rank = 0);

  int64_t dense_bytes() const;       // resident after load()
  int64_t slots_bytes() const;       // of the rank's routed experts in slot layout
  int64_t slot_bytes() const;        // of a slot that holds any of them
  std::string small_digest() const;  // of norms, biases and taps: what tells one fine-tune from another
  // Of pieces of some 4,096 tensors, other ranks' experts too: other weights of the same shapes are noticed, one damaged
  // byte is not.
  std::string sample_digest() const;
  const Weights& shapes() const {
    return loaded_->weights;
  }  // formats and shapes, before load() without data

  // Once. Into the host's memory, experts used where they lie; or into another space, all experts resident.
  std::unique_ptr<LoadedWeights> load(MemorySpace& memory, const WeightLoader::Progress& progress);
  // Into the host's memory, experts in a cache; for a loader that was made for it.
  std::unique_ptr<LoadedWeights> load_streamed(const CacheConfig& cache, std::unique_ptr<ExpertStore> store,
                                               const WeightLoader::Progress& progress);
  // Into a device's memory, experts in a cache there. choices: of all rows of a step in a layer, at most.
  std::unique_ptr<LoadedWeights> load_streamed(const CacheConfig& cache, std::unique_ptr<ExpertStore> store,
                                               Behind behind, MemorySpace& memory, const Exec& exec,
                                               int64_t choices, const WeightLoader::Progress& progress);

  // Into a device's memory, and all experts into memory of the host that the device reads in place.
  std::unique_ptr<LoadedWeights> load_in_place(std::unique_ptr<ExpertStore> store, MemorySpace& memory,
                                               const Exec& exec, const WeightLoader::Progress& progress);

  // Of a loader that was made for streaming, before load_streamed(): where experts come from.
  std::unique_ptr<ExpertStore> checkpoint_store() const;
  std::vector<std::span<const ExpertWeights>> expert_tables() const;  // of each MoE layer
  SlabHeader slab_header() const;                                     // what the fuel's slab has to look like

 private:
  // Shapes are those of the whole; axis: along which ranks share it.
  int add(const std::string& name, int64_t out, int64_t in, Axis axis);
  void bind(const std::string& name, int64_t out, int64_t in, Weight* to, Axis axis = Axis::kWhole);
  void bind_plain(const std::string& name, int64_t out, int64_t in, Weight* to,
                  Axis axis = Axis::kWhole);  // for ops that take F32 or BF16 only
  void bind_head(const std::string& name, bool tied);
  void check_cuts(const std::vector<int32_t>& possible) const;
  std::vector<float> read_small(const std::string& name, const std::vector<int64_t>& shape);
  void small(const std::string& name, const std::vector<int64_t>& shape, const float** to,
             Axis axis = Axis::kWhole);
  void conv_taps(const std::string& layer, const float** to);
  void keep(std::vector<float> values, const float** to);
  void hyper(const std::string& layer, const char* block, const char* norm, HyperWeights& w);
  void kda(const std::string& layer, KdaWeights& w);
  void mla(const std::string& layer, bool full_indexer, MlaWeights& w);
  void mlp(const std::string& mlp, int64_t inner, MlpWeights& w);
  void moe(const std::string& mlp, MoeWeights& w);
  void expert(const std::string& name, int64_t out, int64_t in, bool owned, Weight* to, WeightSource& source);
  void count_weights();
  void load_host(const WeightLoader::Progress& progress);
  void move_dense(MemorySpace& memory);
  void move_experts(MemorySpace& memory);
  bool owns(size_t layer, size_t expert) const;  // layer: number among the MoE layers
  void move_tables(MemorySpace& memory);
  std::vector<BankPiece> file_order() const;
  std::vector<BankPiece> bank_order(const ExpertStore& store) const;
  DeviceExperts place_experts(const CacheConfig& cache, const HostBank::Tables& tables,
                              std::unique_ptr<ExpertStore> store, Behind behind, MemorySpace& memory,
                              const Exec& exec, int64_t choices,
                              const WeightLoader::Progress& progress) const;

  struct Cut {
    WeightSource whole;
    bool columns;
  };
  struct Expansion {
    int handle;
    Weight* to;
  };

  Config config_;
  bool streamed_;
  ExpertSplit split_;
  int32_t rank_;
  int32_t moe_layers_ = 0;                       // so far
  std::vector<CheckpointStore::Layer> sources_;  // of routed experts, where they are streamed
  bool tied_ = false;                            // the head is the embedding
  std::unique_ptr<LoadedWeights> loaded_;
  std::unique_ptr<WeightLoader> loader_;
  std::vector<std::pair<int, Weight*>> bound_;
  std::vector<std::pair<int, Weight*>> bound_experts_;  // those that cannot be used where they lie
  std::vector<Expansion> expanded_;
  std::vector<Cut> cuts_;                // weights of which this rank has a part
  std::string small_digests_;            // of norms, biases and taps, whole
  std::vector<const float**> small_to_;  // [small] where each one's address is kept
  int64_t small_bytes_ = 0, expanded_bytes_ = 0;
  int64_t routed_token_bytes_ = 0;  // of all MoE layers: this rank's share
};

}  // namespace rocket::glm5
