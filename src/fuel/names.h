// What a checkpoint's tensors are for, told by their names: trunk, draft layers, vision tower. Knows no
// model.
#pragma once

#include <string>
#include <string_view>

#include "fuel/checkpoint.h"

namespace rocket {

// Where the text model's tensors are: "layers.0.…", "embed_tokens.weight" and "norm.weight" follow `trunk`,
// "lm_head.weight" follows `head`.
struct Naming {
  std::string trunk;  // "model.language_model.", "language_model.model.", "model." or ""
  std::string head;   // "" or "language_model."
};

// Throws FuelError that quotes one of the names found if no tensor is called PREFIX + "layers.<number>.…".
Naming detect_naming(const Checkpoint& checkpoint);

enum class TensorKind { kTrunk, kDraft, kVision, kOther };

// kDraft: a layer whose index is `layers` (num_hidden_layers) or more. kVision: an image tower or what joins
// it to the text model. kOther: none of the text model's.
TensorKind tensor_kind(std::string_view name, const Naming& naming, int64_t layers);

// The layer's index in PREFIX + "layers.<number>.…", or -1.
int64_t layer_index(std::string_view name, const Naming& naming);

struct TensorCensus {
  struct Count {
    int64_t tensors = 0;
    int64_t bytes = 0;
  };
  Count trunk, draft, vision, other;
};
TensorCensus take_census(const Checkpoint& checkpoint, const Naming& naming, int64_t layers);

}  // namespace rocket
