#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "fabric/host_lane.h"
#include "fabric/pinned.h"
#include "fabric/row_kernels.h"
#include "fabric/staged_exchange.h"

namespace rocket {
namespace {

constexpr char kWhat[] = "boosters";

class StagedRows : public RowExchange {
 public:
  StagedRows(Fabric& fabric, const ExchangeConfig& config, const Exec& exec, MemorySpace& memory,
             std::shared_ptr<HostLane> lane)
      : RowExchange(fabric, config.split, config.topk, config.hidden, config.numbers),
        exec_(exec),
        memory_(memory),
        lane_(std::move(lane)),
        choices_(config.max_rows * config.topk),
        ids_(choices_ * static_cast<int64_t>(sizeof(int32_t))),
        blocks_(buffer_floats(split_.ranks, config.max_rows, topk_, hidden_) *
                static_cast<int64_t>(sizeof(float))) {
    if (split_.owner.empty()) return;
    const size_t bytes = split_.owner.size() * sizeof(int32_t);
    owners_ = static_cast<int32_t*>(memory_.allocate(bytes, "owners of experts"));
    memory_.write(owners_, split_.owner.data(), bytes);
  }
  ~StagedRows() override {
    lane_->settle();
    if (fabric_.failed()) blocks_.keep();
    if (owners_) memory_.release(owners_);
  }

  const int32_t* owners(int32_t layer) const override { return owners_ + int64_t{layer} * split_.experts; }

  // The buffer, which lies with the ops, has the places of rows in the pinned one.
  void begin(int32_t layer, std::span<const int32_t> ids, int32_t* own, float* buffer) override {
    const auto n = static_cast<int64_t>(ids.size());
    if (n > choices_) {
      throw InputError("boosters: expected at most " + std::to_string(choices_) + " choices a layer, found " +
                       std::to_string(n));
    }
    layer_ = layer;
    moved_.own = own;
    moved_.place = reinterpret_cast<int64_t*>(buffer);
    moved_.n = n;
    moved_.hidden = hidden_;
    moved_.stamp_floats = kStampFloats;
    moved_.buffer = blocks_.device<float>();
    cuda::RowPlaces places;
    places.id = ids.data();
    places.owner = owners(layer);
    places.n = n;
    places.ranks = split_.ranks;
    places.hidden = hidden_;
    places.stamp_floats = kStampFloats;
    places.place = reinterpret_cast<int64_t*>(buffer);
    places.host_copy = ids_.device<int32_t>();
    lane_->fork();
    cuda::place_rows(places, lane_->stream(), exec_);
  }
  void send(const float* routed) override {
    moved_.routed = const_cast<float*>(routed);
    lane_->fork();
    cuda::pack_rows(moved_, lane_->stream(), exec_);
    lane_->call(*exchange());
  }
  void finish(float* routed) override {
    moved_.routed = routed;
    lane_->join();
    cuda::unpack_rows(moved_, exec_);
  }
  void end_step() override { lane_->finish(); }

 private:
  // The host's part for this layer and number of choices.
  HostLane::Work* exchange() {
    HostLane::Work*& work = work_[{layer_, moved_.n}];
    if (!work) {
      work = lane_->keep([this, layer = layer_, n = static_cast<size_t>(moved_.n)] {
        expect_blocks(layer, {ids_.host<int32_t>(), n}, blocks_.host<float>());
        send_block();
        wait_blocks();
      });
    }
    return work;
  }

  Exec exec_;
  MemorySpace& memory_;
  std::shared_ptr<HostLane> lane_;
  int64_t choices_;
  Pinned ids_, blocks_;
  int32_t* owners_ = nullptr;  // [layers, experts]
  std::map<std::pair<int32_t, int64_t>, HostLane::Work*> work_;

  // Of the exchange that is being issued; the host's calls know nothing of it.
  int32_t layer_ = 0;
  cuda::MovedRows moved_;
};

class StagedParts : public PartExchange {
 public:
  StagedParts(Fabric& fabric, const ExchangeConfig& config, const Exec& exec, std::shared_ptr<HostLane> lane)
      : PartExchange(fabric),
        exec_(exec),
        lane_(std::move(lane)),
        most_(config.part_floats),
        blocks_(buffer_floats(fabric.ranks(), 1, most_) * static_cast<int64_t>(sizeof(float))) {}
  ~StagedParts() override {
    lane_->settle();
    if (fabric_.failed()) blocks_.keep();
  }

  void sum(float* x, int64_t rows, int64_t columns, float*, const std::string& what) override {
    bring(x, rows, columns, what);
    cuda::PartSum p;
    p.x = x;
    p.count = rows * columns;
    p.parts = part(blocks_.device<float>(), 0, p.count);
    p.stride = kStampFloats + p.count;
    p.rank = fabric_.rank();
    p.ranks = fabric_.ranks();
    cuda::sum_parts(p, exec_);
  }
  void join(const float* mine, int64_t rows, int64_t columns, float* all, float*,
            const std::string& what) override {
    bring(mine, rows, columns, what);
    cuda::PartJoin p;
    p.mine = mine;
    p.rows = rows;
    p.columns = columns;
    p.parts = part(blocks_.device<float>(), 0, rows * columns);
    p.stride = kStampFloats + rows * columns;
    p.rank = fabric_.rank();
    p.ranks = fabric_.ranks();
    p.all = all;
    cuda::join_parts(p, exec_);
  }

 private:
  // Behind it the others' parts are in pinned memory, and rows of experts that were on their way, too: the lane does one
  // after the other.
  void bring(const float* mine, int64_t rows, int64_t columns, const std::string& what) {
    const int64_t count = rows * columns;
    if (count > most_) {
      throw InputError("boosters: expected parts of at most " + std::to_string(most_) + " numbers, found " +
                       std::to_string(count));
    }
    lane_->fork();
    cuda_check(
        cudaMemcpyAsync(part(blocks_.host<float>(), fabric_.rank(), count), mine,
                        static_cast<size_t>(count) * sizeof(float), cudaMemcpyDeviceToHost, lane_->stream()),
        kWhat);
    HostLane::Work*& work = work_[{what, rows, columns}];
    if (!work) {
      work = lane_->keep(
          [this, rows, columns, what] { swap_blocks(rows, columns, blocks_.host<float>(), what); });
    }
    lane_->call(*work);
    lane_->join();
  }

  Exec exec_;
  std::shared_ptr<HostLane> lane_;
  int64_t most_;
  Pinned blocks_;
  std::map<std::tuple<std::string, int64_t, int64_t>, HostLane::Work*> work_;
};

}  // namespace

Exchange make_staged_exchange(Fabric& fabric, const ExchangeConfig& config, const Exec& exec,
                              MemorySpace& memory) {
  const auto lane = std::make_shared<HostLane>(*exec.cuda, kWhat);
  Exchange exchange;
  exchange.rows = std::make_unique<StagedRows>(fabric, config, exec, memory, lane);
  if (config.split_dense) exchange.parts = std::make_unique<StagedParts>(fabric, config, exec, lane);
  return exchange;
}

}  // namespace rocket
