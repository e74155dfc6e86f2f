// A CUDA device as a backend: one stream, device memory, steps recorded as CUDA graphs.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/memory.h"
#include "ops/cublas_lt.h"
#include "ops/cuda.cuh"
#include "ops/table.h"
#include "runtime/backend.h"
#include "runtime/device.h"

namespace rocket {
namespace {

constexpr size_t kStagingBytes = 8 << 20;  // of each pinned buffer for large copies to the device
constexpr size_t kSmallBytes = 4096;       // results that are read through pinned memory
constexpr int32_t kGraphRows = 64;         // steps of at most so many rows are recorded

constexpr size_t kMostGraphs = 128;  // that are kept

struct FreePinned {
  void operator()(char* p) const { cudaFreeHost(p); }
};
using Pinned = std::unique_ptr<char, FreePinned>;

Pinned pinned(size_t bytes) {
  void* p = nullptr;
  const cudaError_t status = cudaMallocHost(&p, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw PlanError("pinned host memory: needs " + format_bytes(static_cast<int64_t>(bytes)) + ", free are " +
                        format_bytes(memory_available().bytes),
                    "ulimit -l, or what else runs here, may keep the system from pinning more");
  }
  cuda_check(status, "pinned host memory");
  return Pinned(static_cast<char*>(p));
}

class Event {
 public:
  Event() { cuda_check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "event"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// Memory from which device blocks come. Freed ones stay with it for the next stream or page, until it ends.
class DevicePool {
 public:
  explicit DevicePool(int device) {
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {cudaMemLocationTypeDevice, device};
    cuda_check(cudaMemPoolCreate(&pool_, &properties), "memory pool");
    uint64_t keep = UINT64_MAX;
    const cudaError_t status = cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep);
    if (status != cudaSuccess) cudaMemPoolDestroy(pool_);
    cuda_check(status, "memory pool");
  }
  ~DevicePool() { cudaMemPoolDestroy(pool_); }
  DevicePool(const DevicePool&) = delete;
  DevicePool& operator=(const DevicePool&) = delete;
  operator cudaMemPool_t() const { return pool_; }

  // Bytes that it holds and nobody uses.
  int64_t unused() const {
    uint64_t reserved = 0, used = 0;
    cuda_check(cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrReservedMemCurrent, &reserved), "memory pool");
    cuda_check(cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrUsedMemCurrent, &used), "memory pool");
    return static_cast<int64_t>(reserved - used);
  }

 private:
  cudaMemPool_t pool_ = nullptr;
};

// Whose stream ends with it.
struct OwnContext : CudaContext {
  explicit OwnContext(const CudaContext& opened) : CudaContext(opened) {}
  ~OwnContext() { cudaStreamDestroy(stream); }
  OwnContext(const OwnContext&) = delete;
  OwnContext& operator=(const OwnContext&) = delete;
};

class CudaMemory : public MemorySpace {
 public:
  CudaMemory(const CudaContext& context, ThreadPool& pool, bool integrated)
      : context_(context),
        pool_(pool),
        integrated_(integrated),
        blocks_(context.device),
        small_(pinned(kSmallBytes)) {
    for (Staging& s : staging_) s.data = pinned(kStagingBytes);
  }
  ~CudaMemory() override { cudaStreamSynchronize(context_.stream); }

  int64_t unused() const { return blocks_.unused(); }

  void* allocate(size_t bytes, const char* what) override {
    void* p = nullptr;
    cuda_check(cudaSetDevice(context_.device), "device");  // of this thread, which may have used none
    const cudaError_t status =
        cudaMallocFromPoolAsync(&p, std::max<size_t>(bytes, 256), blocks_, context_.stream);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      size_t free = 0, total = 0;
      cudaMemGetInfo(&free, &total);
      throw PlanError(
          std::string(what) + ": needs " + format_bytes(static_cast<int64_t>(bytes)) +
              " of device memory, free are " + format_bytes(static_cast<int64_t>(free)),
          "another program may have taken what was free at the start: stop it, or lower --max-context");
    }
    cuda_check(status, what);
    cuda_check(cudaMemsetAsync(p, 0, bytes, context_.stream), what);
    return p;
  }
  void release(void* memory) override { cudaFreeAsync(memory, context_.stream); }

  void copy(void* to, const void* from, size_t bytes) override {
    cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, context_.stream),
               "copy on the device");
  }
  void read(void* host, const void* from, size_t bytes) override {
    void* through = bytes <= kSmallBytes ? small_.get() : host;
    cuda_check(cudaMemcpyAsync(through, from, bytes, cudaMemcpyDeviceToHost, context_.stream),
               "copy from the device");
    cuda_check(cudaStreamSynchronize(context_.stream), "a step on the device");
    if (through != host) std::memcpy(host, through, bytes);
  }
  void write(void* to, const void* host, size_t bytes) override {
    // The driver keeps a copy of its own until it is done, but not of pinned memory, and it need not where host and device
    // have one memory.
    if (bytes <= 65536) {
      cuda_check(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, context_.stream),
                 "copy to the device");
      cudaPointerAttributes known{};
      cuda_check(cudaPointerGetAttributes(&known, host), "copy to the device");
      if (integrated_ || known.type != cudaMemoryTypeUnregistered)
        cuda_check(cudaStreamSynchronize(context_.stream), "copy to the device");
      return;
    }
    for (size_t done = 0; done < bytes; done += kStagingBytes) {
      const size_t here = std::min(kStagingBytes, bytes - done);
      Staging& s = staging_[next_];
      next_ = (next_ + 1) % 2;
      cuda_check(cudaEventSynchronize(s.free), "copy to the device");
      const char* from = static_cast<const char*>(host) + done;
      pool_.loop(static_cast<int64_t>(here), 1 << 18, [&](int64_t begin, int64_t end, int) {
        std::memcpy(s.data.get() + begin, from + begin, static_cast<size_t>(end - begin));
      });
      cuda_check(cudaMemcpyAsync(static_cast<char*>(to) + done, s.data.get(), here, cudaMemcpyHostToDevice,
                                 context_.stream),
                 "copy to the device");
      cuda_check(cudaEventRecord(s.free, context_.stream), "copy to the device");
    }
  }
  bool host() const override { return false; }

 private:
  struct Staging {
    Pinned data;
    Event free;
  };
  const CudaContext& context_;
  ThreadPool& pool_;
  bool integrated_;
  DevicePool blocks_;
  Pinned small_;
  Staging staging_[2];
  int next_ = 0;
};

class CudaClock : public StageClock {
 public:
  explicit CudaClock(const CudaContext& context) : context_(context) {}
  ~CudaClock() override {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  int mark() override {
    if (used_ == events_.size()) cuda_check(cudaEventCreate(&events_.emplace_back()), "event");
    cuda_check(cudaEventRecord(events_[used_], context_.stream), "event");
    return static_cast<int>(used_++);
  }
  double ms(int begin, int end) const override {
    float ms = 0;
    cuda_check(
        cudaEventElapsedTime(&ms, events_[static_cast<size_t>(begin)], events_[static_cast<size_t>(end)]),
        "event");
    return ms;
  }
  void clear() override { used_ = 0; }

 private:
  const CudaContext& context_;
  std::vector<cudaEvent_t> events_;
  size_t used_ = 0;
};

// The arrays of a step of so many rows, one after the other in a block.
struct StepBlock {
  explicit StepBlock(char* base, int64_t rows) {
    const auto place = [&](auto*& array) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(base + bytes);
      bytes += static_cast<size_t>(rows) * sizeof(*array);
    };
    place(segment);
    place(embedding);
    place(state);
    place(checkpoint);
    place(pages);
    place(counter);
    place(sampling);
    place(token);
    place(logits_row);
  }
  Segment* segment = nullptr;
  const float** embedding = nullptr;
  float** state = nullptr;
  float** checkpoint = nullptr;
  float* const** pages = nullptr;
  int32_t* token = nullptr;
  int32_t* logits_row = nullptr;
  uint64_t* counter = nullptr;
  SamplingParams* sampling = nullptr;
  size_t bytes = 0;
};

class CudaBackend : public Backend {
 public:
  CudaBackend(int threads, const CudaLimits& limits)
      : pool_(threads),
        limits_(limits),
        context_(open_device()),
        memory_(context_, pool_, integrated_),
        clock_(context_) {
    cublas_ = open_cublas_lt(&no_cublas_);
    context_.cublas = cublas_.get();
    const size_t bytes = StepBlock(nullptr, limits.max_rows).bytes;
    for (HostBlock& block : host_block_) block.data = pinned(bytes);
    device_block_ = static_cast<char*>(memory_.allocate(bytes, "arrays of a step"));
  }
  ~CudaBackend() override {
    cudaSetDevice(context_.device);
    cudaStreamSynchronize(context_.stream);
    for (auto& [key, graph] : graphs_) {
      if (graph.recorded) cudaGraphExecDestroy(graph.recorded);
    }
    if (embeddings_) memory_.release(embeddings_);
    memory_.release(device_block_);
  }

  const char* name() const override { return "cuda"; }
  std::string device() const override { return name_; }
  std::string note() const override { return cublas_ ? "" : "prefill: own BF16 kernels, as " + no_cublas_; }
  MemorySpace& memory() override { return memory_; }
  bool rounds() const override { return true; }
  const OpTable& ops() const override { return cuda_ops(); }
  const OpTable& measuring_ops() const override { return cuda_ops(); }
  StageClock& clock() override { return clock_; }
  Exec exec() override {
    Exec exec;
    exec.pool = &pool_;
    exec.cuda = &context_;
    return exec;
  }

  MemoryAvailable available() override {
    MemoryAvailable available = memory_available();
    if (!integrated_) {  // else shared with the CPU, and the page cache counts as free
      size_t free = 0, total = 0;
      cuda_check(cudaMemGetInfo(&free, &total), "free memory");
      available = {static_cast<int64_t>(free) + memory_.unused(), "free memory of " + name_};
    }
    lower_by_environment(available, "ROCKET_DEVICE_MEMORY_LIMIT");
    return available;
  }

  StepView stage(const StepPlan& plan) override {
    const int32_t rows = plan.rows();
    cuda_check(cudaSetDevice(context_.device), "device");  // this thread may be another than the one before
    HostBlock& to = host_block_[next_];
    next_ = (next_ + 1) % 2;
    cuda_check(cudaEventSynchronize(to.free), "arrays of a step");
    const StepBlock host(to.data.get(), rows), device(device_block_, rows);
    for (int32_t i = 0; i < rows; ++i) {
      const bool used = i < plan.segments();
      const size_t s = static_cast<size_t>(i);
      host.segment[i] = used ? plan.segment[s] : Segment{rows, 0, 0};
      host.state[i] = used ? plan.stream[s]->recurrent() : nullptr;
      host.pages[i] = used ? plan.stream[s]->page_table() : nullptr;
      host.checkpoint[i] = plan.checkpoint[s];
      host.token[i] = plan.token[s];
      host.embedding[i] = plan.any_embedding ? stage_embedding(i, plan.embedding[s]) : nullptr;
      host.logits_row[i] = s < plan.logits_row.size() ? plan.logits_row[s] : 0;
      host.sampling[i] = s < plan.sampling.size() ? plan.sampling[s] : SamplingParams{};
      host.counter[i] = s < plan.counter.size() ? plan.counter[s] : 0;
    }
    cuda_check(
        cudaMemcpyAsync(device_block_, to.data.get(), host.bytes, cudaMemcpyHostToDevice, context_.stream),
        "arrays of a step");
    cuda_check(cudaEventRecord(to.free, context_.stream), "arrays of a step");
    StepView view;
    view.rows = view.segments = rows;
    view.logits_rows = static_cast<int32_t>(plan.logits_row.size());
    view.first_logit = plan.first_logit;
    view.token = device.token;
    view.embedding = plan.any_embedding ? device.embedding : nullptr;
    view.segment = device.segment;
    view.state = device.state;
    view.checkpoint = device.checkpoint;
    view.pages = device.pages;
    view.logits_row = device.logits_row;
    if (!plan.sampling.empty()) {
      view.sampling = device.sampling;
      view.counter = device.counter;
    }
    return view;
  }

  // The first step of a kind is issued call by call (kernels are loaded then), the second one recorded. Kinds that were not
  // met for the longest are recorded again when they come back.
  void run(const Key& key, const std::function<void()>& forward) override {
    const auto found = graphs_.find(key);
    if (!replay_ || context_.sync_each || key.rows > kGraphRows || found == graphs_.end()) {
      forward();
      if (replay_) graphs_.try_emplace(key);
      return;
    }
    Graph& graph = found->second;
    if (!graph.recorded) {
      make_room();
      graph.recorded = record(forward);
      ++counts_.recorded;
    }
    graph.last_use = ++counts_.replayed;
    cuda_check(cudaGraphLaunch(graph.recorded, context_.stream), "a step as a graph");
  }
  ReplayCounts replays() const override { return counts_; }
  void set_replay(bool on) override { replay_ = on; }
  void wait() override { cuda_check(cudaStreamSynchronize(context_.stream), "a step on the device"); }

 private:
  CudaContext open_device() {
    std::string why;
    const std::vector<CudaDevice> devices = cuda_devices(&why);
    if (devices.empty()) throw DeviceError("backend cuda: " + why, "use --backend cpu, or auto");
    if (limits_.device < 0 || limits_.device >= static_cast<int32_t>(devices.size())) {
      throw DeviceError("backend cuda: expected a device from 0 to " + std::to_string(devices.size() - 1) +
                        ", found " + std::to_string(limits_.device));
    }
    CudaContext context;
    context.device = limits_.device;
    cudaDeviceProp properties{};
    cuda_check(cudaSetDevice(context.device), "device");
    cuda_check(cudaGetDeviceProperties(&properties, context.device), "device");
    name_ = properties.name;
    integrated_ = properties.integrated != 0;
    context.sm_count = properties.multiProcessorCount;
    context.arch = properties.major * 10 + properties.minor;
    context.l2_bytes = properties.l2CacheSize;
    context.sm_shared = static_cast<int64_t>(properties.sharedMemPerMultiprocessor);
    context.block_shared = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
    const char* sync = std::getenv("ROCKET_CUDA_SYNC");
    context.sync_each = sync && *sync && std::strcmp(sync, "0") != 0;
    cuda_check(cudaStreamCreateWithFlags(&context.stream, cudaStreamNonBlocking), "stream");
    return context;
  }

  const float* stage_embedding(int32_t row, const float* values) {
    if (!values) return nullptr;
    const size_t width = static_cast<size_t>(limits_.hidden);
    if (!embeddings_) {
      embeddings_ = static_cast<float*>(memory_.allocate(
          static_cast<size_t>(limits_.max_rows) * width * sizeof(float), "embeddings of a step"));
    }
    float* to = embeddings_ + static_cast<size_t>(row) * width;
    memory_.write(to, values, width * sizeof(float));
    return to;
  }

  cudaGraphExec_t record(const std::function<void()>& forward) {
    cudaGraph_t graph = nullptr;
    cuda_check(cudaStreamBeginCapture(context_.stream, cudaStreamCaptureModeThreadLocal), "recording a step");
    try {
      forward();
    } catch (...) {
      cudaStreamEndCapture(context_.stream, &graph);
      if (graph) cudaGraphDestroy(graph);
      throw;
    }
    cuda_check(cudaStreamEndCapture(context_.stream, &graph), "recording a step");
    cudaGraphExec_t recorded = nullptr;
    const cudaError_t status = cudaGraphInstantiate(&recorded, graph, 0);
    cudaGraphDestroy(graph);
    cuda_check(status, "recording a step");
    return recorded;
  }

  // For one more graph.
  void make_room() {
    auto oldest = graphs_.end();
    size_t kept = 0;
    for (auto i = graphs_.begin(); i != graphs_.end(); ++i) {
      if (!i->second.recorded) continue;
      ++kept;
      if (oldest == graphs_.end() || i->second.last_use < oldest->second.last_use) oldest = i;
    }
    if (kept < kMostGraphs) return;
    cuda_check(cudaStreamSynchronize(context_.stream), "a step on the device");  // it may be running
    cudaGraphExecDestroy(oldest->second.recorded);
    oldest->second.recorded = nullptr;
  }

  struct HostBlock {
    Pinned data;
    Event free;
  };
  struct Graph {
    cudaGraphExec_t recorded = nullptr;
    int64_t last_use = 0;
  };

  ThreadPool pool_;
  CudaLimits limits_;
  std::string name_;
  bool integrated_ = false;
  OwnContext context_;
  CublasLtHandle cublas_;
  std::string no_cublas_;
  CudaMemory memory_;
  CudaClock clock_;
  char* device_block_ = nullptr;
  HostBlock host_block_[2];
  int next_ = 0;
  float* embeddings_ = nullptr;
  bool replay_ = true;
  std::map<Key, Graph> graphs_;
  ReplayCounts counts_;
};

}  // namespace

std::unique_ptr<Backend> make_cuda_backend(int threads, const CudaLimits& limits) {
  return std::make_unique<CudaBackend>(threads, limits);
}

}  // namespace rocket
