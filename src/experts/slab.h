// A slab: all routed experts of a fuel in one file, each in slot layout (slot_layout.h), so that an expert is one read
// past the page cache. `experts.slab` in a folder of its own.
//
//   header   8 bytes  "RKTSLAB\n"
//            u32      version, 2
//            u32      MoE layers L
//            u32      experts a layer E
//            u32      bytes of the header, a multiple of 4096
//            u64      bytes of the file
//            u64      fingerprint of the fuel: its config.json, and every tensor's name, type and shape
//            u64      sample of the fuel: of global scales of all experts, and of pieces of each
//            u32 x L  the model's number of each MoE layer, ascending
//            for each expert, layer by layer:
//              u64    where its slot starts, a multiple of 4096
//              u64    bytes of the slot, those of its layout
//              u64    checksum of them
//              u32    formats of gate, up and down, a byte each
//              u32    0
//            u64      checksum of all before it
//   slots    from the end of the header on, in order, each followed by zeros up to the next multiple of 4096
//
// All little-endian. The file appears under its name when it is whole. Shapes are not in it: config.json has them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "experts/slot_layout.h"

namespace rocket {

inline constexpr int64_t kSlabAlignment = 4096;

// Eight sums and eight sums of sums over 64-bit words, folded into one: any change of a word, and of places of two that
// differ, gives another value. At the rate of memory, on any CPU, and part by part in any order.
class SlabChecksum {
 public:
  static constexpr int64_t kStep = 64;  // parts start at multiples of it

  explicit SlabChecksum(int64_t bytes = 0) : bytes_(bytes) {}
  void add(const void* part, int64_t at,
           int64_t bytes);  // each byte once; only the last part may end off a step
  uint64_t value() const;   // once all parts were added

 private:
  static constexpr size_t kLanes = 8;
  int64_t bytes_;
  std::array<uint64_t, kLanes> sum_{}, sums_{};
};

uint64_t slab_checksum(const void* data, int64_t bytes);

struct SlabExpert {
  int64_t at = 0, bytes = 0;
  uint64_t checksum = 0;
  uint32_t formats = 0;
};

// What a fuel's slab has to look like; checksums are the file's.
struct SlabHeader {
  uint64_t fingerprint = 0, sample = 0;
  int32_t experts = 0;           // a layer
  std::vector<int32_t> layers;   // the model's numbers
  std::vector<SlabExpert> slot;  // [layers, experts]
  int64_t file_bytes = 0;

  int64_t header_bytes() const;
  const SlabExpert& at(int32_t layer, int32_t expert) const {
    return slot[static_cast<size_t>(layer) * static_cast<size_t>(experts) + static_cast<size_t>(expert)];
  }
};

// tables: of each MoE layer, with formats and shapes.
SlabHeader plan_slab(uint64_t fingerprint, uint64_t sample, std::vector<int32_t> layers,
                     std::span<const std::span<const ExpertWeights>> tables);

std::string slab_path(const std::string& dir);  // of the file in the folder

std::vector<uint8_t> pack_slab_header(const SlabHeader& header);

// The header of a slab file that must be of the fuel that `expected` was planned for. Throws FuelError that names the
// file: none there, no slab, of another version, damaged, of another fuel, truncated.
SlabHeader read_slab_header(const std::string& path, const SlabHeader& expected);

}  // namespace rocket
