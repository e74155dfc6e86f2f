// From the tensors of a checkpoint to linear weights (src/ops/weight.h), whatever format each is stored in.
//
// The format is told by the tensors that lie there, weight by weight; X is the weight's name:
//   X.weight F32 | BF16 [out, in]                                         as it is
//   X.weight F16 [out, in]                                                becomes F32 when loaded
//   X.weight U8 [out, in/2],                                              NVFP4, ModelOpt
//     X.weight_scale F8_E4M3 [out, in/16], X.weight_scale_2
//   X.weight_packed U8 [out, in/2],                                       NVFP4, compressed-tensors
//     X.weight_scale F8_E4M3 [out, in/16], X.weight_global_scale
//   X.weight F8_E4M3 [out, in],                                           FP8 in blocks
//     X.weight_scale_inv (or X.weight_scale) F32 | BF16 [ceil(out/128), ceil(in/128)];
//     ModelOpt: X.weight_scale [ceil(out/128), 1, ceil(in/128), 1]
//   X.weight F8_E4M3 [out, in], X.weight_scale F32 | BF16 | F16 scalar    FP8, one scale: becomes FP8 in blocks
//   X.weight F8_E4M3 [out, in],                                           FP8, a scale for each row:
//     X.weight_scale F32 | BF16 | F16 [out, 1] or [out]                   becomes F32, the products
//   X.weight F8_E4M3 [out, in],                                           MXFP8
//     X.weight_scale (or X.weight_scale_inv) U8 | F8_E8M0 [out, in/32]
// ModelOpt's global scale multiplies; compressed-tensors' divides, and 0 there means a weight of zeros. Scalars are
// [] or [1]. X.input_scale (or input_global_scale) may be there; weights only are quantised here, so it is not used.
// A parameter that is no module's `weight` (hc_attn_fn, …) is found under its own name, plain formats only.
#pragma once

#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/arena.h"
#include "fuel/checkpoint.h"
#include "ops/weight.h"

namespace rocket {

// Of several ranks that share a weight each takes one of so many equal parts of its rows, or of its columns.
struct WeightCut {
  int32_t part = 0, parts = 1;
  bool columns = false;
};

// What a linear weight is and where its parts lie. Holds pointers into the checkpoint.
struct WeightSource {
  std::string name;
  WeightFormat format = WeightFormat::kBF16;  // of the Weight in memory
  int64_t out = 0;
  int64_t in = 0;
  const Checkpoint::Entry* data = nullptr;
  const Checkpoint::Entry* block_scale = nullptr;   // null for plain formats; a scalar for FP8 with one scale
  const Checkpoint::Entry* global_scale = nullptr;  // NVFP4 only
  const Checkpoint::Entry* row_scale = nullptr;     // FP8 with a scale for each row; goes into the products
  bool global_divides = false;                      // compressed-tensors' spelling
  const Checkpoint::Entry* input_scale = nullptr;   // kept, not used; may be null
  bool in_place = true;                             // can be used where it lies; else it must be loaded
  int64_t disk_bytes = 0;                           // of data and all scales
  int64_t memory_bytes = 0;                         // of data and block scale once loaded
  // Of a part of a weight: where it begins, and the shape of the whole. out, in and the bytes are the part's.
  int64_t first_row = 0, first_column = 0, whole_out = 0, whole_in = 0;
};

// Whether any spelling of the weight is there.
bool has_weight(const Checkpoint& checkpoint, const std::string& name);

// Looks at headers only. Throws FuelError that names file, tensor, what was expected and what was found.
WeightSource describe_weight(const Checkpoint& checkpoint, const std::string& name, int64_t out, int64_t in);

// Whether so many parts of a weight begin and end where its blocks of scales do.
bool can_cut(const WeightSource& whole, int32_t parts, bool columns);
// A part of a weight that can be cut so. Throws FuelError for one that cannot, with the border that it would cross.
WeightSource cut_weight(const WeightSource& whole, const WeightCut& cut);

// The multiplier that an NVFP4 weight's global scale means (1 for other formats); reads a few bytes with
// pread. Throws FuelError if it is negative or not finite.
float read_global_scale(const Checkpoint& checkpoint, const WeightSource& source);

// A weight that points into the mapped checkpoint. Throws FuelError if it cannot be used in place.
Weight map_weight(const Checkpoint& checkpoint, const WeightSource& source);

// A weight with format, shape and global scale, and no data yet.
Weight unplaced_weight(const Checkpoint& checkpoint, const WeightSource& source);

// Reads one weight with pread to where its data and block scales (null: it has none) shall be, converted as needed. May
// be called from several threads. Throws FuelError on a short read.
void read_weight(const Checkpoint& checkpoint, const WeightSource& source, void* data, void* block_scale);

// Brings weights into memory: register all, allocate an arena of arena_bytes(), load them in the order of the
// files.
class WeightLoader {
 public:
  explicit WeightLoader(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  // Returns a handle; the same name again returns the same handle. out and in are the whole weight's. Throws as
  // describe_weight and cut_weight.
  int add(const std::string& name, int64_t out, int64_t in, const WeightCut& cut = {});

  size_t size() const { return sources_.size(); }
  const WeightSource& source(int handle) const { return sources_[static_cast<size_t>(handle)]; }
  int64_t arena_bytes() const { return arena_bytes_; }  // what load() takes, padding counted
  int64_t disk_bytes() const { return disk_bytes_; }    // what load() reads

  // Copies with pread through at most a few MiB of staging. `progress` (may be empty) gets bytes read and in
  // all, about every 8 MiB and at the end; what it throws stops the load.
  using Progress = std::function<void(int64_t done, int64_t total)>;
  void load(Arena& arena, const Progress& progress = {});

  const Weight& weight(int handle) const { return weights_[static_cast<size_t>(handle)]; }  // after load()

 private:
  const Checkpoint& checkpoint_;
  std::vector<WeightSource> sources_;
  std::vector<Weight> weights_;
  std::unordered_map<std::string, int> handles_;
  int64_t arena_bytes_ = 0;
  int64_t disk_bytes_ = 0;
};

}  // namespace rocket
