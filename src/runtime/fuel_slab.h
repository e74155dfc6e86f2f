// A fuel's slab of experts (src/experts/slab.h), whatever engine the fuel is for.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace rocket {

struct FuelSlabPlan {
  int64_t file_bytes = 0;
  int64_t experts = 0;  // of all layers
  int64_t layers = 0;   // MoE layers
  int64_t slot_bytes = 0;
  std::string path;  // of the file
};

class FuelSlab {
 public:
  virtual ~FuelSlab() = default;
  virtual const FuelSlabPlan& plan() const = 0;
  // Whether a slab lies there. Throws FuelError if it is not this fuel's, or not whole.
  virtual bool written() const = 0;
  using Progress = std::function<void(int64_t done, int64_t total)>;
  virtual void write(const Progress& progress) = 0;
  // Every byte of it with the fuel's. Throws FuelError with the first expert that is another.
  virtual void verify(const Progress& progress) = 0;
};

// Looks at the fuel only. Throws FuelError, InputError (no MoE layers).
std::unique_ptr<FuelSlab> open_fuel_slab(const std::string& fuel_dir, const std::string& slab_dir);

}  // namespace rocket
