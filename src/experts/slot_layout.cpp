#include "experts/slot_layout.h"

namespace rocket {
namespace {

constexpr int64_t kAlignment = 256;

int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

int64_t data_bytes(const Weight& w) {
  switch (w.format) {
    case WeightFormat::kF32:
      return w.out * w.in * 4;
    case WeightFormat::kBF16:
      return w.out * w.in * 2;
    case WeightFormat::kNVFP4:
      return w.out * w.in / 2;
    case WeightFormat::kFP8Block:
    case WeightFormat::kMXFP8:
      return w.out * w.in;
  }
  return 0;
}

int64_t scale_bytes(const Weight& w) {
  const int64_t global = w.format == WeightFormat::kNVFP4 ? 4 : 0;
  return weight_bytes(w) - data_bytes(w) - global;
}

}  // namespace

int64_t SlotLayout::stored_bytes() const {
  int64_t sum = 0;
  for (std::size_t part = 0; part < 3; ++part) sum += data_bytes[part] + scale_bytes[part];
  return sum;
}

SlotLayout slot_layout(const ExpertWeights& expert) {
  const Weight* const weights[] = {&expert.gate, &expert.up, &expert.down};
  SlotLayout layout;
  for (std::size_t part = 0; part < 3; ++part) {
    layout.data_at[part] = layout.bytes;
    layout.data_bytes[part] = data_bytes(*weights[part]);
    layout.bytes += aligned(layout.data_bytes[part]);
  }
  for (std::size_t part = 0; part < 3; ++part) {
    layout.scale_at[part] = layout.bytes;
    layout.scale_bytes[part] = scale_bytes(*weights[part]);
    layout.bytes += aligned(layout.scale_bytes[part]);
  }
  return layout;
}

void place_in_slot(const SlotLayout& layout, void* slot, ExpertWeights* expert) {
  char* const base = static_cast<char*>(slot);
  Weight* const weights[] = {&expert->gate, &expert->up, &expert->down};
  for (std::size_t part = 0; part < 3; ++part) {
    weights[part]->data = base ? base + layout.data_at[part] : nullptr;
    weights[part]->block_scale =
        base && layout.scale_bytes[part] > 0 ? base + layout.scale_at[part] : nullptr;
  }
}

}  // namespace rocket
