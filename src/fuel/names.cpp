#include "fuel/names.h"

#include <charconv>

namespace rocket {

namespace {

constexpr std::string_view kTrunks[] = {"model.language_model.", "language_model.model.", "model.", ""};

// Each at the front of a name, or behind "model.".
constexpr std::string_view kVision[] = {"visual.",         "vision_tower.",          "vision_model.",
                                        "vision_encoder.", "vision_projector.",      "vit.",
                                        "image_newline",   "multi_modal_projector.", "mm_projector."};

bool is_vision(std::string_view name) {
  constexpr std::string_view kModel = "model.";
  if (name.starts_with(kModel)) name.remove_prefix(kModel.size());
  for (const std::string_view prefix : kVision) {
    if (name.starts_with(prefix)) return true;
  }
  return false;
}

int64_t layer_after(std::string_view name, std::string_view trunk) {
  constexpr std::string_view kLayers = "layers.";
  if (!name.starts_with(trunk)) return -1;
  name.remove_prefix(trunk.size());
  if (!name.starts_with(kLayers)) return -1;
  name.remove_prefix(kLayers.size());
  int64_t index = -1;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), index);
  const bool whole = error == std::errc() && end < name.data() + name.size() && *end == '.';
  return whole && index >= 0 ? index : -1;
}

}  // namespace

Naming detect_naming(const Checkpoint& checkpoint) {
  for (const std::string_view trunk : kTrunks) {
    for (const auto& file : checkpoint.files()) {
      for (const TensorInfo& tensor : file->tensors()) {
        if (layer_after(tensor.name, trunk) < 0) continue;
        return {std::string(trunk), trunk == "language_model.model." ? "language_model." : ""};
      }
    }
  }
  std::string found = "no tensors";
  for (const auto& file : checkpoint.files()) {
    if (!file->tensors().empty()) found = json_quote(file->tensors().front().name);
  }
  throw FuelError(checkpoint.dir() + ": expected tensors such as \"model.layers.0.…\", found " + found);
}

int64_t layer_index(std::string_view name, const Naming& naming) {
  return layer_after(name, naming.trunk);
}

TensorKind tensor_kind(std::string_view name, const Naming& naming, int64_t layers) {
  if (is_vision(name)) return TensorKind::kVision;
  if (layer_index(name, naming) >= layers) return TensorKind::kDraft;
  if (name.starts_with(naming.head + "lm_head.")) return TensorKind::kTrunk;
  return name.starts_with(naming.trunk) ? TensorKind::kTrunk : TensorKind::kOther;
}

TensorCensus take_census(const Checkpoint& checkpoint, const Naming& naming, int64_t layers) {
  TensorCensus census;
  for (const auto& file : checkpoint.files()) {
    for (const TensorInfo& tensor : file->tensors()) {
      TensorCensus::Count* count = &census.other;
      switch (tensor_kind(tensor.name, naming, layers)) {
        case TensorKind::kTrunk:
          count = &census.trunk;
          break;
        case TensorKind::kDraft:
          count = &census.draft;
          break;
        case TensorKind::kVision:
          count = &census.vision;
          break;
        case TensorKind::kOther:
          break;
      }
      ++count->tensors;
      count->bytes += static_cast<int64_t>(tensor.bytes);
    }
  }
  return census;
}

}  // namespace rocket
