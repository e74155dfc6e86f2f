// Where the bytes of experts are when they are in no slot, and how they get into one.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "experts/slot_layout.h"
#include "fuel/checkpoint.h"
#include "fuel/quantised.h"

namespace rocket {

class ExpertStore {
 public:
  virtual ~ExpertStore() = default;
  virtual const char* name() const = 0;

  // An expert comes in this many pieces, which may be brought at the same time by several threads.
  virtual int32_t pieces() const = 0;
  // Brings a piece into a slot of the host. `layer` counts MoE layers. Throws FuelError or DeviceError that names the
  // expert and where its bytes should have come from; the slot's bytes are then worth nothing.
  virtual void fetch(int32_t layer, int32_t expert, int32_t piece, const SlotLayout& layout,
                     void* slot) const = 0;
};

// The tensors of one expert: gate, up, down.
using ExpertSource = std::array<WeightSource, 3>;

// Straight from the checkpoint's files, with pread. A file that is shorter than it was, or was written to since it was
// opened, is an error: what was read may be neither the old bytes nor the new ones.
class CheckpointStore : public ExpertStore {
 public:
  struct Layer {
    int32_t number = 0;  // the model's
    std::vector<ExpertSource> experts;
  };
  CheckpointStore(const Checkpoint& checkpoint, std::vector<Layer> layers);

  const char* name() const override { return "checkpoint"; }
  int32_t pieces() const override { return 3; }
  void fetch(int32_t layer, int32_t expert, int32_t piece, const SlotLayout& layout,
             void* slot) const override;

 private:
  const Checkpoint& checkpoint_;
  std::vector<Layer> layers_;
};

}  // namespace rocket
