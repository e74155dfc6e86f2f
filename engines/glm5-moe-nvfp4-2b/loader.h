// Brings a glm5_next fuel into memory in two steps, so that the plan is known before the first large
// allocation.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fuel/checkpoint.h"
#include "fuel/quantised.h"
#include "glm5-moe-nvfp4-2b/config.h"
#include "glm5-moe-nvfp4-2b/weights.h"

namespace rocket::glm5 {

// Weights and what they point into.
struct LoadedWeights {
  std::unique_ptr<Checkpoint> checkpoint;
  Arena arena;                           // dense weights
  std::deque<std::vector<float>> small;  // norms, biases, taps, as float32
  Weights weights;
};

class Loader {
 public:
  // Opens the checkpoint and finds every tensor that the model needs, with its shape. Throws FuelError.
  Loader(const Config& config, const std::string& dir);

  int64_t dense_bytes() const;                                                  // resident after load()
  std::unique_ptr<LoadedWeights> load(const WeightLoader::Progress& progress);  // once

 private:
  void bind(const std::string& name, int64_t out, int64_t in, Weight* to);
  void bind_plain(const std::string& name, int64_t out, int64_t in,
                  Weight* to);  // for ops that take F32 or BF16 only
  const float* small(const std::string& name, const std::vector<int64_t>& shape);
  const float* conv_taps(const std::string& layer);
  void hyper(const std::string& layer, const char* block, const char* norm, HyperWeights& w);
  void kda(const std::string& layer, KdaWeights& w);
  void mla(const std::string& layer, bool full_indexer, MlaWeights& w);
  void mlp(const std::string& mlp, int64_t inner, MlpWeights& w);
  void moe(const std::string& mlp, MoeWeights& w);
  void expert(const std::string& name, int64_t out, int64_t in, Weight* to, int64_t& bytes);
  void count_weights();

  struct Expansion {
    int handle;
    Weight* to;
  };

  Config config_;
  bool tied_ = false;  // the head is the embedding
  std::unique_ptr<LoadedWeights> loaded_;
  std::unique_ptr<WeightLoader> loader_;
  std::vector<std::pair<int, Weight*>> bound_;
  std::vector<std::pair<int, Weight*>> bound_experts_;  // those that cannot be used where they lie
  std::vector<Expansion> expanded_;
  int64_t small_bytes_ = 0, expanded_bytes_ = 0;
  int64_t routed_token_bytes_ = 0;  // of all MoE layers
};

}  // namespace rocket::glm5
