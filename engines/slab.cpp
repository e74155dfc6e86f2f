// A fuel's slab of experts: what it has to look like, from the fuel's own headers.
#include <algorithm>
#include <filesystem>
#include <utility>
#include <vector>

#include "base/error.h"
#include "experts/slab_writer.h"
#include "glm5-moe-nvfp4-2b/loader.h"
#include "runtime/fuel_slab.h"

namespace rocket {
namespace {

class Glm5Slab final : public FuelSlab {
 public:
  Glm5Slab(const std::string& fuel_dir, const std::string& slab_dir)
      : dir_(slab_dir),
        loader_(glm5::read_config(fuel_dir), fuel_dir, true),
        tables_(loader_.expert_tables()) {
    if (tables_.empty())
      throw InputError(fuel_dir + ": the model has no MoE layers, so no experts for a slab");
    header_ = loader_.slab_header();
    plan_.file_bytes = header_.file_bytes;
    plan_.experts = static_cast<int64_t>(header_.slot.size());
    plan_.layers = static_cast<int64_t>(header_.layers.size());
    for (const SlabExpert& expert : header_.slot) plan_.slot_bytes = std::max(plan_.slot_bytes, expert.bytes);
    plan_.path = slab_path(dir_);
  }

  const FuelSlabPlan& plan() const override { return plan_; }

  bool written() const override {
    std::error_code error;
    if (!std::filesystem::exists(std::filesystem::symlink_status(plan_.path, error))) return false;
    read_slab_header(plan_.path, header_);
    return true;
  }

  void write(const Progress& progress) override {
    const std::unique_ptr<ExpertStore> store = loader_.checkpoint_store();
    write_slab(dir_, header_, *store, tables_, progress);
  }

  void verify(const Progress& progress) override {
    const std::unique_ptr<ExpertStore> store = loader_.checkpoint_store();
    verify_slab(dir_, header_, *store, tables_, progress);
  }

 private:
  std::string dir_;
  glm5::Loader loader_;
  std::vector<std::span<const ExpertWeights>> tables_;
  SlabHeader header_;
  FuelSlabPlan plan_;
};

}  // namespace

std::unique_ptr<FuelSlab> open_fuel_slab(const std::string& fuel_dir, const std::string& slab_dir) {
  return std::make_unique<Glm5Slab>(fuel_dir, slab_dir);
}

}  // namespace rocket
