#include "experts/store.h"

#include <string>
#include <utility>

#include "base/error.h"

namespace rocket {

CheckpointStore::CheckpointStore(const Checkpoint& checkpoint, std::vector<Layer> layers)
    : checkpoint_(checkpoint), layers_(std::move(layers)) {}

void CheckpointStore::fetch(int32_t layer, int32_t expert, int32_t piece, const SlotLayout& layout,
                            void* slot) const {
  const Layer& of = layers_[static_cast<size_t>(layer)];
  const size_t part = static_cast<size_t>(piece);
  const WeightSource& source = of.experts[static_cast<size_t>(expert)][part];
  char* const base = static_cast<char*>(slot);
  void* const scales = layout.scale_bytes[part] > 0 ? base + layout.scale_at[part] : nullptr;
  try {
    read_weight(checkpoint_, source, base + layout.data_at[part], scales);
    for (const Checkpoint::Entry* entry : {source.data, source.block_scale, source.row_scale}) {
      if (entry != nullptr) entry->file->check_unchanged();
    }
  } catch (const FuelError& error) {
    throw FuelError(
        "expert " + std::to_string(expert) + " of layer " + std::to_string(of.number) + ": " + error.what(),
        error.hint());
  }
}

}  // namespace rocket
