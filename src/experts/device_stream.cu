#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <string>

#include "base/memory.h"
#include "experts/device_stream.h"
#include "experts/slot_source.h"
#include "experts/slot_state.h"
#include "experts/split_bank.h"
#include "ops/cuda.cuh"

namespace rocket {
namespace {

// A stream of copies beside that of the ops.
class SideStream {
 public:
  SideStream() {
    int least = 0, greatest = 0;
    cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream");
    // First in line for a free place: what waits for these copies is waited for by everything else.
    cuda_check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "stream");
    cuda_check(cudaEventCreateWithFlags(&forked_, cudaEventDisableTiming), "event");
    cuda_check(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming), "event");
  }
  ~SideStream() {
    cudaStreamSynchronize(stream_);
    cudaEventDestroy(done_);
    cudaEventDestroy(forked_);
    cudaStreamDestroy(stream_);
  }
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  cudaStream_t stream() const { return stream_; }
  // What is issued here from now on comes behind what was issued on `main`.
  void fork(cudaStream_t main) {
    cuda_check(cudaEventRecord(forked_, main), "expert fetch");
    cuda_check(cudaStreamWaitEvent(stream_, forked_, 0), "expert fetch");
  }
  void mark_done() { cuda_check(cudaEventRecord(done_, stream_), "expert fetch"); }
  // What is issued on the ops' stream from now on comes behind what was marked.
  void join(CudaContext& main) {
    cuda_check(cudaStreamWaitEvent(main.stream, done_, 0), "expert fetch");
    main.after_join = true;
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t forked_ = nullptr, done_ = nullptr;
};

class BankSource : public SlotSource {
 public:
  BankSource(const SlotTarget& target, std::unique_ptr<HostBank> bank, SlotCopy copy)
      : target_(target), host_bank_(std::move(bank)), copy_(copy) {}
  const char* name() const override { return "host bank"; }
  bool takes_hints() const override { return true; }
  bool has(int32_t layer, int32_t expert) const override {
    return host_bank_->experts()[static_cast<size_t>(layer * target_.cache.experts + expert)] != nullptr;
  }
  void bring(int32_t, int32_t wave, std::span<const int32_t> ids, void* stream, Exec& exec) override {
    cuda::fetch_slots(target_.cache, target_.bank, wave, ids.data(), static_cast<int64_t>(ids.size()), copy_,
                      stream, exec);
  }

 private:
  SlotTarget target_;
  std::unique_ptr<HostBank> host_bank_;
  SlotCopy copy_;
};

class SplitSource : public SlotSource {
 public:
  SplitSource(const SlotTarget& target, std::unique_ptr<SplitBank> bank)
      : target_(target), split_bank_(std::move(bank)) {}
  const char* name() const override { return "host bank, exclusive"; }
  bool takes_hints() const override { return true; }
  void bring(int32_t, int32_t wave, std::span<const int32_t> ids, void* stream, Exec& exec) override {
    cuda::swap_slots(target_.cache, target_.bank, wave, ids.data(), static_cast<int64_t>(ids.size()), stream,
                     exec);
  }

 private:
  SlotTarget target_;
  std::unique_ptr<SplitBank> split_bank_;
};

// Hints of a device that fetches by itself; the first one turns them on.
class DeviceHints {
 public:
  explicit DeviceHints(const SlotHints& hints) : hints_(hints) {}
  ~DeviceHints() {
    if (!gate_) return;
    cudaDeviceSynchronize();  // a kernel may look at it
    cudaFreeHost(gate_);
  }
  DeviceHints(const DeviceHints&) = delete;
  DeviceHints& operator=(const DeviceHints&) = delete;

  void take(int32_t layer, std::span<const int32_t> experts, Exec& exec) {
    if (!gate_) {
      open();
      cuda::begin_hints(hints_.cache, exec);  // nobody has told what the last step used: all may make way
    }
    SlotHintList list{};
    list.layer = layer;
    list.steps = gate_->steps;
    for (const int32_t expert : experts) {
      list.expert[list.count++] = expert;
      if (list.count == kHintsAtOnce) issue(list, exec);
    }
    if (list.count > 0) issue(list, exec);
  }
  // What the device has not begun by now is dropped.
  void begin_step(Exec& exec) {
    if (!gate_) return;
    std::atomic_ref(gate_->steps).store(gate_->steps + 1, std::memory_order_release);
    cuda::begin_hints(hints_.cache, exec);
  }

 private:
  void open() {
    void* p = nullptr;
    cuda_check(cudaHostAlloc(&p, sizeof(SlotGate), cudaHostAllocMapped), "expert hint");
    gate_ = new (p) SlotGate{};
    void* known = nullptr;
    cuda_check(cudaHostGetDevicePointer(&known, gate_, 0), "expert hint");
    hints_.gate = static_cast<const SlotGate*>(known);
  }
  void issue(SlotHintList& list, Exec& exec) {
    cuda::hint_slots(hints_, list, exec);
    list.count = 0;
  }

  SlotHints hints_;
  SlotGate* gate_ = nullptr;
};

class DeviceStream : public ExpertStream {
 public:
  DeviceStream(const CacheConfig& config, const HostBank::Tables& tables,
               const std::vector<const char*>& bank, MemorySpace& memory, const Exec& exec, int64_t choices,
               Tiers tiers = Tiers::kInclusive)
      : memory_(memory),
        exec_(exec),
        main_(exec.cuda->stream),
        choices_(choices),
        state_(config, choices, tiers) {
    int64_t slot_bytes = 0;
    for (const std::span<const ExpertWeights> table : tables)
      slot_bytes = std::max(slot_bytes, slot_bytes_of(table));
    slots_ = Arena(static_cast<size_t>(state_.slots() * slot_bytes), "expert slots", memory);
    char* const slots = static_cast<char*>(slots_.take_bytes(slots_.capacity()));
    block_ = Arena(static_cast<size_t>(state_.bytes()), "expert cache", memory);
    base_ = static_cast<char*>(block_.take_bytes(block_.capacity()));
    const std::vector<char> image = state_.image(tables, bank, slots, slot_bytes);
    memory.write(base_, image.data(), image.size());
    cache_ = state_.cache(base_, slots, slot_bytes);
    hints_ = std::make_unique<DeviceHints>(state_.hints(base_, slots, slot_bytes));
  }
  // A step that waits for its source ends with it.
  ~DeviceStream() override {
    cudaSetDevice(exec_.cuda->device);  // what gives memory back waits for the thread's device
    source_.reset();
    cudaStreamSynchronize(main_);
  }
  SlotTarget target() const { return {cache_, state_.bank(base_), state_.desk(base_)}; }
  void set_source(std::unique_ptr<SlotSource> source) { source_ = std::move(source); }

  const ExpertWeights* table(int32_t layer) const { return cache_.table + int64_t{layer} * cache_.experts; }

  const char* store() const override { return source_->name(); }
  const SlotCache* look_up() const override { return &cache_; }
  // A step that failed between a look-up and its last wave has left experts that count as there and may not be.
  void begin_step() override {
    check_whole();
    hints_->begin_step(exec_);
  }
  bool hint(int32_t layer, std::span<const int32_t> experts) override {
    if (!source_->takes_hints()) return false;
    check_whole();
    check_hint(layer, experts);
    std::vector<int32_t> here;
    for (const int32_t expert : experts) {
      if (source_->has(layer, expert)) here.push_back(expert);
    }
    if (here.empty()) return true;
    cuda_check(cudaSetDevice(exec_.cuda->device), "device");  // this thread may be another than a step's
    hints_->take(layer, here, exec_);
    return true;
  }
  void begin_pass() override { source_->begin_pass(); }
  void end_pass() override { source_->end_pass(); }
  int32_t find(int32_t layer, std::span<const int32_t> ids, Exec& exec) override {
    if (static_cast<int64_t>(ids.size()) > choices_) {
      throw InputError("expert cache: expected at most " + std::to_string(choices_) +
                       " choices a layer, found " + std::to_string(ids.size()));
    }
    ids_ = ids;
    layer_ = layer;
    whole_ = false;
    side_.fork(main_);
    bring(1, side_.stream(), exec);
    side_.mark_done();
    waves_ = state_.waves(layer, static_cast<int64_t>(ids.size()));
    return waves_;
  }
  const int32_t* fetch(int32_t wave, Exec& exec) override {
    if (wave == 0) return cache_.hit_id;
    if (wave == 1) {
      side_.join(*exec.cuda);
    } else {
      bring(wave, nullptr, exec);
    }
    whole_ = wave + 1 == waves_;
    return cache_.miss_id;
  }
  StreamStats stats() override {
    std::vector<char> copy(static_cast<size_t>(state_.stats_bytes()));
    memory_.read(copy.data(), base_ + state_.stats_at(), copy.size());
    StreamStats stats = state_.stats(copy.data());
    stats.fetch_seconds += source_->seconds();
    return stats;
  }

 private:
  void check_whole() const {
    source_->check();
    if (!whole_)
      throw DeviceError(
          "expert cache: an earlier step failed half-way, and what is in which slot is not known",
          "load the fuel again");
  }
  void check_hint(int32_t layer, std::span<const int32_t> experts) const {
    const auto check = [](const char* what, int32_t count, int32_t found) {
      if (found >= 0 && found < count) return;
      throw InputError("hint: expected " + std::string(what) + " from 0 to " + std::to_string(count - 1) +
                       ", found " + std::to_string(found));
    };
    check("an MoE layer", cache_.layers, layer);
    for (const int32_t expert : experts) check("an expert", cache_.experts, expert);
  }
  void bring(int32_t wave, cudaStream_t stream, Exec& exec) {
    source_->bring(layer_, wave, ids_, stream, exec);
  }

  MemorySpace& memory_;
  Exec exec_;
  cudaStream_t main_;
  int64_t choices_;
  SlotState state_;
  Arena slots_, block_;
  char* base_ = nullptr;
  SlotCache cache_;
  SideStream side_;
  std::unique_ptr<SlotSource> source_;
  std::unique_ptr<DeviceHints> hints_;
  // Of the look-up in hand.
  std::span<const int32_t> ids_;
  int32_t layer_ = 0;
  int32_t waves_ = 0;
  bool whole_ = true;  // all of its waves were asked for
};

DeviceExperts with_tables(std::unique_ptr<DeviceStream> stream, const CacheConfig& config) {
  DeviceExperts experts;
  for (int32_t layer = 0; layer < config.layers; ++layer) experts.tables.push_back(stream->table(layer));
  experts.stream = std::move(stream);
  return experts;
}

}  // namespace

BankMemory pinned_bank_memory() {
  BankMemory memory;
  memory.take = [](size_t bytes) {
    void* p = nullptr;
    const cudaError_t status = cudaHostAlloc(&p, bytes, cudaHostAllocMapped);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw PlanError("host bank: the system refused " + format_bytes(static_cast<int64_t>(bytes)) +
                          " more of pinned memory",
                      "free memory, or raise the container's limit of locked memory");
    }
    cuda_check(status, "host bank");
    return static_cast<char*>(p);
  };
  memory.known_as = [](char* chunk) {
    void* known = nullptr;
    cuda_check(cudaHostGetDevicePointer(&known, chunk, 0), "host bank");
    return static_cast<const char*>(known);
  };
  memory.give_back = [](char* chunk) {
    cudaDeviceSynchronize();  // a step may still be reading or writing there
    cudaFreeHost(chunk);
  };
  return memory;
}

bool device_shares_memory(const Exec& exec) {
  int shares = 0;
  if (!exec.cuda) return false;
  if (const char* const pretend = std::getenv("ROCKET_ONE_MEMORY"); pretend && std::string(pretend) == "1")
    return true;
  cuda_check(cudaDeviceGetAttribute(&shares, cudaDevAttrIntegrated, exec.cuda->device), "device");
  return shares != 0;
}

DeviceExperts make_device_stream(const CacheConfig& config, const HostBank::Tables& tables,
                                 std::unique_ptr<HostBank> bank, MemorySpace& memory, const Exec& exec,
                                 int64_t choices, SlotCopy copy) {
  auto stream = std::make_unique<DeviceStream>(config, tables, bank->experts(), memory, exec, choices);
  stream->set_source(std::make_unique<BankSource>(stream->target(), std::move(bank), copy));
  return with_tables(std::move(stream), config);
}

DeviceExperts make_device_stream(const CacheConfig& config, const HostBank::Tables& tables,
                                 SplitExperts split, MemorySpace& memory, const Exec& exec, int64_t choices) {
  const SlotState state(config, choices, Tiers::kExclusive);
  auto bank = std::make_unique<SplitBank>(tables, state.in_slots(), state.in_places(), pinned_bank_memory());
  auto stream = std::make_unique<DeviceStream>(config, tables, bank->places(), memory, exec, choices,
                                               Tiers::kExclusive);
  const SlotTarget target = stream->target();
  const auto to_slot = [&](int32_t slot, const char* from, int64_t bytes) {
    memory.write(target.cache.base + slot * target.cache.slot_bytes, from, static_cast<size_t>(bytes));
  };
  bank->fill(*split.store, split.order, *exec.pool, to_slot, split.progress);
  stream->set_source(std::make_unique<SplitSource>(target, std::move(bank)));
  return with_tables(std::move(stream), config);
}

DeviceExperts make_device_stream(const CacheConfig& config, const HostBank::Tables& tables, DiskExperts disk,
                                 MemorySpace& memory, const Exec& exec, int64_t choices) {
  auto stream =
      std::make_unique<DeviceStream>(config, tables, std::vector<const char*>(), memory, exec, choices);
  stream->set_source(make_disk_source(stream->target(), std::move(disk), tables, memory, exec));
  return with_tables(std::move(stream), config);
}

}  // namespace rocket
