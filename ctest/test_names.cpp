// What tensors are for, by their names, under every prefix that checkpoints use.
#include "fuel/names.h"
#include "fuel_files.h"

using fuel_files::TempDir;
using fuel_files::Tensor;
using rocket::Checkpoint;
using rocket::detect_naming;
using rocket::Naming;
using rocket::TensorKind;

namespace {

Tensor bytes(const std::string& name, int64_t count) {
  return {name, "U8", {count}, fuel_files::pattern(static_cast<size_t>(count), 1)};
}

void prefixes() {
  struct Case {
    std::string trunk, head;
  };
  for (const Case& c : {Case{"model.language_model.", ""}, Case{"language_model.model.", "language_model."},
                        Case{"model.", ""}, Case{"", ""}}) {
    const TempDir dir;
    // Two layers, a draft layer, a tower with layers of its own, and something that nobody knows.
    fuel_files::write_safetensors(
        dir / "a.safetensors",
        {bytes(c.trunk + "embed_tokens.weight", 3), bytes("model.visual.blocks.layers.7.weight", 5),
         bytes(c.trunk + "layers.0.mlp.gate.weight", 7),
         bytes(c.trunk + "layers.1.mlp.experts.10.up_proj.weight", 11),
         bytes("vision_tower.layers.0.q.weight", 13)});
    fuel_files::write_safetensors(
        dir / "b.safetensors",
        {bytes(c.trunk + "layers.2.eh_proj.weight", 17), bytes(c.trunk + "layers.10.eh_proj.weight", 19),
         bytes(c.trunk + "norm.weight", 23), bytes(c.head + "lm_head.weight", 29)});
    const Checkpoint checkpoint(dir.path(), false);
    const Naming naming = detect_naming(checkpoint);
    check::expect(naming.trunk == c.trunk && naming.head == c.head,
                  "prefix \"" + c.trunk + "\": found \"" + naming.trunk + "\" and \"" + naming.head + "\"");
    const rocket::TensorCensus census = take_census(checkpoint, naming, 2);
    check::expect(census.trunk.tensors == 5 && census.trunk.bytes == 3 + 7 + 11 + 23 + 29,
                  c.trunk + ": trunk");
    check::expect(census.draft.tensors == 2 && census.draft.bytes == 17 + 19, c.trunk + ": draft");
    check::expect(census.vision.tensors == 2 && census.vision.bytes == 5 + 13, c.trunk + ": vision");
    check::expect(census.other.tensors == 0 && census.other.bytes == 0, c.trunk + ": other");
    const rocket::TensorCensus all = take_census(checkpoint, naming, 11);
    check::expect(all.draft.tensors == 0 && all.trunk.tensors == 7,
                  c.trunk + ": with eleven layers there is no draft");
  }
}

void single_names() {
  const Naming nested = {"model.language_model.", ""}, flat = {"model.", ""};
  const auto kind = [](const char* name, const Naming& naming) { return tensor_kind(name, naming, 45); };
  check::expect(kind("model.language_model.layers.44.x.weight", nested) == TensorKind::kTrunk, "last layer");
  check::expect(kind("model.language_model.layers.45.x.weight", nested) == TensorKind::kDraft,
                "first draft layer");
  check::expect(kind("model.language_model.layers.450", nested) == TensorKind::kTrunk,
                "a name that ends with the number is no layer's");
  check::expect(kind("model.layers.45.enorm.weight", flat) == TensorKind::kDraft, "draft layer, flat");
  check::expect(kind("model.layers.45.enorm.weight", nested) == TensorKind::kOther,
                "another prefix than the trunk's");
  check::expect(kind("lm_head.weight", nested) == TensorKind::kTrunk &&
                    kind("lm_head.weight_scale", flat) == TensorKind::kTrunk,
                "head");
  for (const char* name : {"model.visual.patch_embed.weight", "visual.merger.weight", "model.vision_tower.x",
                           "vision_tower.x", "multi_modal_projector.w", "model.multi_modal_projector.w"}) {
    check::expect(kind(name, nested) == TensorKind::kVision && kind(name, flat) == TensorKind::kVision, name);
  }
  check::expect(kind("optimizer.step", flat) == TensorKind::kOther, "something else");
  check::expect(layer_index("model.layers.7.a", flat) == 7 && layer_index("model.layers.-1.a", flat) == -1 &&
                    layer_index("model.layers.x", flat) == -1 &&
                    layer_index("model.layers.99999999999999999999.a", flat) == -1 &&
                    layer_index("model.layers.3", flat) == -1 && layer_index("", flat) == -1,
                "layer index");
}

void no_text_model() {
  const TempDir dir;
  fuel_files::write_safetensors(dir / "a.safetensors",
                                {bytes("model.visual.layers.0.weight", 1), bytes("classifier.weight", 1)});
  const Checkpoint checkpoint(dir.path(), false);
  fuel_files::throws<rocket::FuelError>("no text model", [&] { detect_naming(checkpoint); },
                                        {dir.path(), "model.layers.0", "\"model.visual.layers.0.weight\""});
}

}  // namespace

int main() {
  prefixes();
  single_names();
  no_text_model();
  return check::finish("names");
}
