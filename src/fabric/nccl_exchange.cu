#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <thread>
#include <utility>

#include "fabric/host_lane.h"
#include "fabric/nccl_exchange.h"
#include "fabric/pinned.h"
#include "fabric/row_kernels.h"

namespace rocket {
namespace {

constexpr char kWhat[] = "boosters";

std::string identity(int device) {
  cudaDeviceProp properties{};
  cuda_check(cudaGetDeviceProperties(&properties, device), kWhat);
  std::string text;
  for (const char byte : properties.uuid.bytes) {
    char hex[3];
    std::snprintf(hex, sizeof hex, "%02x", static_cast<unsigned>(static_cast<unsigned char>(byte)));
    text += hex;
  }
  return text;
}

}  // namespace
}  // namespace rocket

#ifdef ROCKET_NCCL_FOLDER
#include <dlfcn.h>
#include <nccl.h>

namespace rocket {
namespace {

constexpr char kHint[] =
    "NCCL_DEBUG=INFO says more; with ROCKET_NO_NCCL=1 on all ranks rows go through the host's memory";

// The library, and all ranks' communicator, for as long as the process.
class Nccl {
 public:
  static Nccl& instance() {
    static Nccl* const nccl = new Nccl;  // never given back: recorded steps may refer to it until the end
    return *nccl;
  }
  const std::string& missing() const { return missing_; }
  std::string version() const {
    int code = 0;
    get_version(&code);
    return std::to_string(code / 10000) + "." + std::to_string(code / 100 % 100) + "." +
           std::to_string(code % 100);
  }

  // Once, on all ranks together, within the fabric's limit.
  void start(Fabric& fabric, int device) {
    if (comm_) return;
    const ncclUniqueId id = common_id(fabric);
    struct Started {
      std::promise<std::string> error;
      ncclComm_t comm = nullptr;
    };
    const auto started = std::make_shared<Started>();
    std::future<std::string> done = started->error.get_future();
    // It has no limit of its own: in a thread that is left to itself when the time is over.
    std::thread([this, started, id, device, rank = fabric.rank(), ranks = fabric.ranks()] {
      started->error.set_value(connect(id, device, rank, ranks, &started->comm));
    }).detach();
    fabric.watch([&] { return done.wait_for(std::chrono::seconds(0)) == std::future_status::ready ? -1 : 0; },
                 "the start of NCCL");
    const std::string error = done.get();
    if (!error.empty()) throw DeviceError("boosters: NCCL does not start: " + error, kHint);
    comm_ = started->comm;
  }

  // To one rank and from another: rows and choices.
  void swap(int32_t to, int32_t from, const float* rows, float* other_rows, size_t floats, const int32_t* ids,
            int32_t* other_ids, size_t choices, cudaStream_t stream) {
    check(group_start(), "a group");
    check(send(rows, floats, ncclFloat32, to, comm_, stream), "send");
    check(send(ids, choices, ncclInt32, to, comm_, stream), "send");
    check(recv(other_rows, floats, ncclFloat32, from, comm_, stream), "receive");
    check(recv(other_ids, choices, ncclInt32, from, comm_, stream), "receive");
    check(group_end(), "a group");
  }
  void gather(const float* mine, float* all, size_t floats, cudaStream_t stream) {
    check(all_gather(mine, all, floats, ncclFloat32, comm_, stream), "all-gather");
  }
  // Throws what went wrong meanwhile.
  void look() {
    if (!comm_) return;
    ncclResult_t result = ncclSuccess;
    check(get_async_error(comm_, &result), "state");
    if (result != ncclInProgress) check(result, "an exchange");
  }
  // Ends what waits on the device. Nothing can be exchanged any more. In a thread that is left to itself: it would wait
  // until there is no recorded step any more.
  void abort(int device) {
    if (!comm_) return;
    std::thread([this, comm = comm_, device] {
      cudaSetDevice(device);
      comm_abort(comm);
    }).detach();
    comm_ = nullptr;
    missing_ = "an exchange has failed before";
  }

 private:
  Nccl() {
    if (!open()) return;
    setenv("NCCL_NVLS_ENABLE", "0", 1);  // multicast between GPUs gains nothing for these messages
    // A rank may record a step that another, which draws or keeps a profile, issues call by call: messages must not depend
    // on that. Nor could the workspace be registered, which is of a pool.
    setenv("NCCL_GRAPH_REGISTER", "0", 1);
    setenv("NCCL_RUNTIME_CONNECT", "0", 0);  // all is connected at the start, within its limit
  }
  bool open() {
    const char* const off = std::getenv("ROCKET_NO_NCCL");
    if (off && *off && *off != '0') {
      missing_ = "ROCKET_NO_NCCL is set";
      return false;
    }
    const std::string name = "libnccl.so.2";
    void* library = nullptr;
    for (const std::string& path : {std::string(ROCKET_NCCL_FOLDER) + "/" + name, name}) {
      library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (library) break;
    }
    if (!library) {
      missing_ = name + " was not found (pip install nvidia-nccl-cu13, or add its folder to LD_LIBRARY_PATH)";
      return false;
    }
    const auto find = [&](auto& function, const char* symbol) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
      return function != nullptr;
    };
    const bool whole = find(get_version, "ncclGetVersion") && find(get_unique_id, "ncclGetUniqueId") &&
                       find(init_rank, "ncclCommInitRank") && find(comm_abort, "ncclCommAbort") &&
                       find(get_async_error, "ncclCommGetAsyncError") &&
                       find(error_string, "ncclGetErrorString") && find(group_start, "ncclGroupStart") &&
                       find(group_end, "ncclGroupEnd") && find(send, "ncclSend") && find(recv, "ncclRecv") &&
                       find(all_gather, "ncclAllGather");
    if (!whole) missing_ = name + " cannot be used: it lacks a function";
    return whole;
  }
  void check(ncclResult_t result, const char* what) const {
    if (result == ncclSuccess) return;
    throw DeviceError(std::string("boosters: NCCL: ") + what + ": " + error_string(result), kHint);
  }
  ncclUniqueId common_id(Fabric& fabric) const {
    ncclUniqueId id{};
    if (fabric.rank() == 0) {
      check(get_unique_id(&id), "its id");
      fabric.tell({id.internal, sizeof id.internal});
      return id;
    }
    const std::string message = fabric.hear("NCCL's id");
    if (message.size() != sizeof id.internal) {
      throw DeviceError("boosters: NCCL's id: expected " + std::to_string(sizeof id.internal) +
                            " bytes, found " + std::to_string(message.size()),
                        "start the same version of Rocket on all ranks");
    }
    std::memcpy(id.internal, message.data(), sizeof id.internal);
    return id;
  }
  // The communicator, and a first message of each kind, so that nothing is left to be set up later. What went wrong.
  std::string connect(const ncclUniqueId& id, int device, int rank, int ranks, ncclComm_t* comm) const {
    cudaStream_t stream = nullptr;
    int32_t* words = nullptr;
    try {
      cuda_check(cudaSetDevice(device), "device");
      check(init_rank(comm, ranks, id, rank), "start");
      cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
      cuda_check(cudaMalloc(&words, sizeof(int32_t) * static_cast<size_t>(ranks + 1)), "a first message");
      check(group_start(), "a group");
      for (int r = 0; r < ranks; ++r) {
        if (r == rank) continue;
        check(send(words, 1, ncclInt32, r, *comm, stream), "send");
        check(recv(words + 1 + r, 1, ncclInt32, r, *comm, stream), "receive");
      }
      check(group_end(), "a group");
      check(all_gather(words, words + 1, 1, ncclInt32, *comm, stream), "all-gather");
      cuda_check(cudaStreamSynchronize(stream), "a first message");
      cuda_check(cudaFree(words), "a first message");
      cuda_check(cudaStreamDestroy(stream), "stream");
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  }

  decltype(&ncclGetVersion) get_version = nullptr;
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRank) init_rank = nullptr;
  decltype(&ncclCommAbort) comm_abort = nullptr;
  decltype(&ncclCommGetAsyncError) get_async_error = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) recv = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  ncclComm_t comm_ = nullptr;
  std::string missing_;
};

constexpr std::chrono::seconds kEndTime(5);  // for what waits on the device, once it is told to end

bool is_busy(cudaStream_t stream) {
  const cudaError_t status = cudaStreamQuery(stream);
  if (status == cudaErrorNotReady) return true;
  cuda_check(status, "a step on the device");
  return false;
}

// How long the ops have waited for parts: many times a step, so that the device adds it up.
class PartWaits {
 public:
  explicit PartWaits(MemorySpace& memory)
      : memory_(memory),
        waited_(sizeof(uint64_t)),
        clock_(static_cast<cuda::PartClock*>(
            memory.allocate(sizeof(cuda::PartClock), "time of waiting for other ranks"))) {}
  ~PartWaits() { memory_.release(clock_); }
  PartWaits(const PartWaits&) = delete;
  PartWaits& operator=(const PartWaits&) = delete;

  cuda::PartClock* clock() const { return clock_; }
  uint64_t* waited() const { return waited_.device<uint64_t>(); }
  // Since the last call. The device has nothing to do.
  double seconds() {
    const uint64_t before = std::exchange(seen_, *waited_.host<uint64_t>());
    return static_cast<double>(seen_ - before) * 1e-9;
  }

 private:
  MemorySpace& memory_;
  Pinned waited_;
  cuda::PartClock* clock_;
  uint64_t seen_ = 0;
};

class NcclRows : public RowExchange {
 public:
  // waits: null without split_dense.
  NcclRows(Fabric& fabric, const ExchangeConfig& config, const Exec& exec, MemorySpace& memory,
           std::shared_ptr<HostLane> lane, std::shared_ptr<PartWaits> waits)
      : RowExchange(fabric, config.split, config.topk, config.hidden, config.numbers),
        exec_(exec),
        memory_(memory),
        lane_(std::move(lane)),
        waits_(std::move(waits)),
        numbers_(config.numbers),
        rounds_(split_.ranks - 1),
        notes_(static_cast<int64_t>(numbers_.size()) * rounds_ *
               static_cast<int64_t>(sizeof(cuda::ExchangeNotes))) {
    const auto choices = static_cast<size_t>(config.max_rows * config.topk);
    other_ids_ = static_cast<int32_t*>(memory_.allocate(choices * sizeof(int32_t), "choices of other ranks"));
    if (split_.owner.empty()) return;
    const size_t bytes = split_.owner.size() * sizeof(int32_t);
    owners_ = static_cast<int32_t*>(memory_.allocate(bytes, "owners of experts"));
    memory_.write(owners_, split_.owner.data(), bytes);
  }
  ~NcclRows() override {
    try {
      wait("the end of a step", [this] { return progress(); });
    } catch (const Error&) {  // what waits on the device has been ended
    }
    memory_.release(other_ids_);
    if (owners_) memory_.release(owners_);
  }

  const int32_t* owners(int32_t layer) const override { return owners_ + int64_t{layer} * split_.experts; }
  void begin_step() override {
    RowExchange::begin_step();
    ++steps_;
    joined_ = false;
  }
  // What is issued call by call stays close behind what has come: the driver takes so many calls and then waits for the
  // device, and so does whoever looks for missing experts, without a limit.
  void begin(int32_t layer, std::span<const int32_t> ids, int32_t*, float* buffer) override {
    if (joined_ && !is_recorded())
      wait(rows_of_step(), [this] { return lane_->joined_is_done() ? -1 : progress(); });
    taken_.id = ids.data();
    taken_.other_id = other_ids_;
    taken_.owner = owners(layer);
    taken_.n = static_cast<int64_t>(ids.size());
    taken_.hidden = hidden_;
    taken_.rank = fabric_.rank();
    taken_.rows = buffer_ = buffer;
    taken_.notes = notes_.device<cuda::ExchangeNotes>() + int64_t{layer} * rounds_;
  }
  // In each round a rank sends to one and receives from one, so that a single buffer is enough.
  void send(const float* routed) override {
    const int32_t me = fabric_.rank(), ranks = split_.ranks;
    const auto choices = static_cast<size_t>(taken_.n), floats = choices * static_cast<size_t>(hidden_);
    taken_.routed = const_cast<float*>(routed);
    lane_->fork();
    for (int32_t k = 1; k < ranks; ++k, ++taken_.notes) {
      taken_.from = (me - k + ranks) % ranks;
      Nccl::instance().swap((me + k) % ranks, taken_.from, routed, buffer_, floats, taken_.id, other_ids_,
                            choices, lane_->stream());
      cuda::take_rows(taken_, lane_->stream(), exec_);
    }
  }
  void finish(float*) override {
    cuda::note_reached(taken_.notes - 1, exec_);
    lane_->join();
    joined_ = true;
  }
  void end_step() override {
    wait(rows_of_step(), [this] { return progress(); });
    FabricFigures figures;
    cuda::ExchangeNotes* const notes = notes_.host<cuda::ExchangeNotes>();
    for (size_t layer = 0; layer < numbers_.size(); ++layer) {
      cuda::ExchangeNotes* const of_layer = notes + layer * static_cast<size_t>(rounds_);
      for (int32_t k = 0; k < rounds_; ++k) {
        check(of_layer[k], layer, (fabric_.rank() - k - 1 + split_.ranks) % split_.ranks);
        figures.rows_sent += of_layer[k].own;
        figures.rows_received += of_layer[k].others;
      }
      const cuda::ExchangeNotes& last = of_layer[rounds_ - 1];
      if (last.taken > last.reached)
        figures.wait_seconds += static_cast<double>(last.taken - last.reached) * 1e-9;
    }
    if (waits_) figures.wait_seconds += waits_->seconds();
    std::fill_n(notes, numbers_.size() * static_cast<size_t>(rounds_), cuda::ExchangeNotes{});
    fabric_.count_rows(figures);
  }

 private:
  void check(const cuda::ExchangeNotes& note, size_t layer, int32_t from) const {
    if (note.wrong == 0) return;
    throw DeviceError("boosters: out of step: rank " + std::to_string(fabric_.rank()) +
                          " expected its own choices of layer " + std::to_string(numbers_[layer]) +
                          " from rank " + std::to_string(from) + ", found " + std::to_string(note.wrong) +
                          " others",
                      "start the same build of Rocket with the same fuel on all ranks");
  }
  std::string rows_of_step() const { return "rows of step " + std::to_string(steps_); }
  bool is_recorded() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cuda_check(cudaStreamIsCapturing(exec_.cuda->stream, &status), kWhat);
    return status != cudaStreamCaptureStatusNone;
  }
  // Until look() gives a number below 0. What keeps the device longer than the limit is ended.
  void wait(const std::string& what, const std::function<int64_t()>& look) {
    try {
      fabric_.watch(look, what);
    } catch (...) {
      Nccl::instance().abort(exec_.cuda->device);
      const auto start = std::chrono::steady_clock::now();
      while (still_busy() && std::chrono::steady_clock::now() - start < kEndTime)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      throw;
    }
  }
  bool still_busy() const noexcept {
    try {
      return is_busy(exec_.cuda->stream) || is_busy(lane_->stream());
    } catch (const Error&) {
      return false;
    }
  }
  // -1: the device has nothing to do any more. Else another number whenever something has come.
  int64_t progress() const {
    if (!is_busy(exec_.cuda->stream) && !is_busy(lane_->stream())) return -1;
    Nccl::instance().look();
    const volatile cuda::ExchangeNotes* const notes = notes_.host<cuda::ExchangeNotes>();
    uint64_t sum = 0;
    for (size_t i = 0; i < numbers_.size() * static_cast<size_t>(rounds_); ++i) sum += notes[i].taken;
    return static_cast<int64_t>(sum & static_cast<uint64_t>(INT64_MAX));
  }

  Exec exec_;
  MemorySpace& memory_;
  std::shared_ptr<HostLane> lane_;
  std::shared_ptr<PartWaits> waits_;
  const std::vector<int32_t> numbers_;
  const int32_t rounds_;
  Pinned notes_;                  // [layers, rounds]
  int32_t* owners_ = nullptr;     // [layers, experts]
  int32_t* other_ids_ = nullptr;  // [choices]
  uint64_t steps_ = 0;
  bool joined_ = false;  // whether rows of this step have been

  // Of the exchange that is being issued.
  cuda::TakenRows taken_;
  float* buffer_ = nullptr;
};

class NcclParts : public PartExchange {
 public:
  NcclParts(Fabric& fabric, const Exec& exec, std::shared_ptr<HostLane> lane,
            std::shared_ptr<PartWaits> waits)
      : PartExchange(fabric), exec_(exec), lane_(std::move(lane)), waits_(std::move(waits)) {}

  void sum(float* x, int64_t rows, int64_t columns, float* buffer, const std::string&) override {
    cuda::PartSum p;
    p.x = x;
    p.count = p.stride = rows * columns;
    p.parts = buffer;
    p.rank = fabric_.rank();
    p.ranks = fabric_.ranks();
    p.clock = waits_->clock();
    p.waited = waits_->waited();
    gather(x, buffer, p.count);
    cuda::sum_parts(p, exec_);
  }
  void join(const float* mine, int64_t rows, int64_t columns, float* all, float* buffer,
            const std::string&) override {
    cuda::PartJoin p;
    p.mine = mine;
    p.rows = rows;
    p.columns = columns;
    p.parts = buffer;
    p.stride = rows * columns;
    p.rank = fabric_.rank();
    p.ranks = fabric_.ranks();
    p.all = all;
    p.clock = waits_->clock();
    p.waited = waits_->waited();
    gather(mine, buffer, p.stride);
    cuda::join_parts(p, exec_);
  }

 private:
  // On the lane, where rows of experts may be on their way: all ranks send one after the other in the same order.
  void gather(const float* mine, float* buffer, int64_t count) {
    lane_->fork();
    Nccl::instance().gather(mine, buffer, static_cast<size_t>(count), lane_->stream());
    cuda::note_reached(waits_->clock(), exec_);  // beside it
    lane_->join();
  }

  Exec exec_;
  std::shared_ptr<HostLane> lane_;
  std::shared_ptr<PartWaits> waits_;
};

}  // namespace

NcclChance nccl_chance(const Exec& exec) {
  return {Nccl::instance().missing(), identity(exec.cuda->device)};
}

Exchange make_nccl_exchange(Fabric& fabric, const ExchangeConfig& config, const Exec& exec,
                            MemorySpace& memory) {
  Nccl& nccl = Nccl::instance();
  nccl.start(fabric, exec.cuda->device);
  const auto lane = std::make_shared<HostLane>(*exec.cuda, kWhat);
  Exchange exchange;
  const auto waits = config.split_dense ? std::make_shared<PartWaits>(memory) : nullptr;
  exchange.rows = std::make_unique<NcclRows>(fabric, config, exec, memory, lane, waits);
  if (config.split_dense) exchange.parts = std::make_unique<NcclParts>(fabric, exec, lane, waits);
  exchange.about = "rows over NCCL " + nccl.version();
  return exchange;
}

}  // namespace rocket
#else
namespace rocket {

NcclChance nccl_chance(const Exec& exec) {
  return {"this build has no NCCL (pip install nvidia-nccl-cu13, then build Rocket again)",
          identity(exec.cuda->device)};
}

Exchange make_nccl_exchange(Fabric&, const ExchangeConfig&, const Exec& exec, MemorySpace&) {
  throw DeviceError("boosters: " + nccl_chance(exec).missing);
}

}  // namespace rocket
#endif
