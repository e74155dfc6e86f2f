#include "base/error.h"
#include "fabric/fabric.h"

namespace rocket {
namespace {

class SoloFabric : public Fabric {
 public:
  const char* name() const override { return "solo"; }
  std::string library() const override { return "none"; }
  int32_t rank() const override { return 0; }
  int32_t ranks() const override { return 1; }
  double limit_seconds() const override { return 0; }
  void set_limit(double) override {}
  void receive_rows(std::span<const RowBlock>, const std::string&) override {}
  void send_rows(const RowBlock&) override {}
  void wait_rows() override {}
  void watch(const std::function<int64_t()>&, const std::string&) override {}
  void count_rows(const FabricFigures&) override {}
  const FabricFigures& figures() const override { return figures_; }
  void clear_figures() override {}
  void tell(std::string_view) override {}
  std::string hear(const std::string& what) override {
    throw DeviceError("fabric: one rank has nobody to hear " + what + " from");
  }
  std::vector<std::string> gather(std::string_view mine, const std::string&) override {
    return {std::string(mine)};
  }
  void fail(const std::string&, const std::string&) override {}
  bool failed() const override { return false; }
  bool rank0_knows() const override { return true; }
  void leave() override {}
  void abort(int) override {}

 private:
  FabricFigures figures_;
};

}  // namespace

std::unique_ptr<Fabric> make_solo_fabric() {
  return std::make_unique<SoloFabric>();
}

}  // namespace rocket
