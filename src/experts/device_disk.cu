// Experts from a disk into a device's slots: the server's way to the device, and what a step asks it.
#include <algorithm>
#include <cstring>
#include <string>

#include "base/memory.h"
#include "experts/slot_server.h"
#include "experts/slot_source.h"
#include "ops/cuda.cuh"

namespace rocket {
namespace {

constexpr char kWhat[] = "experts from a disk";
constexpr size_t kWords = 8;  // of announcements: more than can be on their way, as wait() holds them back

// Pinned memory of the host that the device knows, and a stream for its copies.
class CudaCarrier : public SlotCarrier {
 public:
  CudaCarrier(const SlotTarget& target, const SlotServer::Staging& staging, int device)
      : target_(target), staging_(staging), device_(device) {
    try {
      take();
    } catch (...) {
      give_back();
      throw;
    }
  }
  ~CudaCarrier() override {
    cudaDeviceSynchronize();  // a step may wait for what was announced last, and write to the mail
    give_back();
  }
  CudaCarrier(const CudaCarrier&) = delete;
  CudaCarrier& operator=(const CudaCarrier&) = delete;

  void attach() override { cuda_check(cudaSetDevice(device_), kWhat); }
  SlotMail& mail() override { return *mail_; }
  SlotMail* mail_on_device() const {
    void* known = nullptr;
    cuda_check(cudaHostGetDevicePointer(&known, mail_, 0), kWhat);
    return static_cast<SlotMail*>(known);
  }
  char* staging(int part) override { return part_[part]; }
  void copy(int part, int32_t slot, const char* from, int64_t bytes) override {
    char* const to = target_.cache.base + slot * target_.cache.slot_bytes;
    cuda_check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream_), kWhat);
    cuda_check(cudaEventRecord(copied_[part], stream_), kWhat);
  }
  void wait(int part) override { cuda_check(cudaEventSynchronize(copied_[part]), kWhat); }
  void announce(uint64_t arrived) override {
    uint64_t* const word = words_ + turn_++ % kWords;
    *word = arrived;
    cuda_check(cudaMemcpyAsync(&target_.desk->arrived, word, sizeof *word, cudaMemcpyHostToDevice, stream_),
               kWhat);
  }
  void keep_staging() override { keep_ = true; }

  // All that the copies need is loaded and set up before a step waits for one.
  void warm_up() {
    for (int part = 0; part < kParts; ++part)
      copy(part, 0, part_[part], std::min(target_.cache.slot_bytes, staging_.part_bytes()));
    announce(0);
    cuda_check(cudaStreamSynchronize(stream_), kWhat);
  }

 private:
  void* pinned(size_t bytes) {
    void* p = nullptr;
    const cudaError_t status = cudaHostAlloc(&p, bytes, cudaHostAllocMapped);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw PlanError(std::string(kWhat) + ": the system refused " +
                          format_bytes(static_cast<int64_t>(bytes)) + " of pinned memory",
                      "free memory, or raise the container's limit of locked memory");
    }
    cuda_check(status, kWhat);
    std::memset(p, 0, bytes);
    return p;
  }
  void take() {
    mail_ = static_cast<SlotMail*>(pinned(sizeof(SlotMail)));
    words_ = static_cast<uint64_t*>(pinned(kWords * sizeof(uint64_t)));
    for (int part = 0; part < kParts; ++part) {
      part_[part] = static_cast<char*>(pinned(static_cast<size_t>(staging_.part_bytes())));
      cuda_check(cudaEventCreateWithFlags(&copied_[part], cudaEventDisableTiming | cudaEventBlockingSync),
                 kWhat);
    }
    int least = 0, greatest = 0;
    cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest), kWhat);
    cuda_check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), kWhat);
  }
  void give_back() {
    if (stream_) cudaStreamDestroy(stream_);
    for (int part = 0; part < kParts; ++part) {
      if (copied_[part]) cudaEventDestroy(copied_[part]);
      if (part_[part] && !keep_) cudaFreeHost(part_[part]);
    }
    if (words_) cudaFreeHost(words_);
    if (mail_) cudaFreeHost(mail_);
  }

  SlotTarget target_;
  SlotServer::Staging staging_;
  int device_;
  SlotMail* mail_ = nullptr;
  uint64_t* words_ = nullptr;
  char* part_[kParts] = {};
  cudaEvent_t copied_[kParts] = {};
  cudaStream_t stream_ = nullptr;
  size_t turn_ = 0;
  bool keep_ = false;
};

// A recorded step asks for its misses by itself. One that is issued call by call must not wait on the device, as its
// kernels may have to be loaded meanwhile: the misses are looked at from here.
class DiskSource : public SlotSource {
 public:
  DiskSource(const SlotTarget& target, DiskExperts disk, const SlotServer::Tables& tables,
             MemorySpace& memory, const Exec& exec)
      : target_(target), memory_(memory), main_(exec.cuda->stream) {
    name_ = std::string(disk.store->name()) + ", no bank";
    const SlotServer::Staging staging =
        SlotServer::staging_for(target.cache.slot_bytes, target.cache.experts);
    auto carrier = std::make_unique<CudaCarrier>(target, staging, exec.cuda->device);
    post_.mail = carrier->mail_on_device();
    post_.desk = target.desk;
    post_.clock = target.bank.clock;
    post_.limit_ns = static_cast<uint64_t>(SlotServer::device_limit(disk.limit).count());
    cuda_check(cudaStreamSynchronize(main_), kWhat);  // the desk is written
    carrier->warm_up();
    // No look-up has been made, so it finds nothing to ask for; but it is loaded now.
    Exec alone = exec;
    cuda::post_slots(target.cache, post_, 1, nullptr, 0, true, nullptr, alone);
    cuda_check(cudaStreamSynchronize(main_), kWhat);
    server_ = std::make_unique<SlotServer>(std::move(disk.store), std::move(carrier), tables,
                                           std::move(disk.numbers), staging, disk.limit);
  }

  const char* name() const override { return name_.c_str(); }
  void bring(int32_t layer, int32_t wave, std::span<const int32_t> ids, void* stream, Exec& exec) override {
    const bool recorded = is_recorded();
    if (!recorded) bring_now(layer, wave);
    if (recorded || wave > 1) {
      cuda::post_slots(target_.cache, post_, wave, ids.data(), static_cast<int64_t>(ids.size()), recorded,
                       stream, exec);
    }
  }
  void check() override { server_->check(); }
  void begin_pass() override { server_->begin_pass(); }
  // The step is waited for, so that nothing else is asked of the device while it waits for its experts.
  void end_pass() override {
    cuda_check(cudaStreamSynchronize(main_), "a step on the device");
    server_->end_pass();
  }
  double seconds() const override { return server_->seconds(); }

 private:
  bool is_recorded() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cuda_check(cudaStreamIsCapturing(main_, &status), kWhat);
    return status == cudaStreamCaptureStatusActive;
  }
  // Behind all that was issued before: reading waits for it.
  void bring_now(int32_t layer, int32_t wave) {
    if (wave == 1) {
      memory_.read(&lookup_, target_.cache.lookup, sizeof lookup_);
      misses_.resize(static_cast<size_t>(lookup_.misses));
      if (lookup_.misses > 0)
        memory_.read(misses_.data(), target_.cache.miss, misses_.size() * sizeof(SlotMiss));
    }
    const SlotRange range = slot_wave(lookup_, wave);
    if (range.begin == range.end) return;
    if (wave > 1)
      cuda_check(cudaStreamSynchronize(main_), kWhat);  // slots that earlier waves are computed with
    server_->bring(layer, std::span(misses_).subspan(static_cast<size_t>(range.begin),
                                                     static_cast<size_t>(range.end - range.begin)));
  }

  SlotTarget target_;
  MemorySpace& memory_;
  cudaStream_t main_;
  SlotPost post_;
  std::string name_;
  SlotLookup lookup_{};
  std::vector<SlotMiss> misses_;  // of the look-up in hand
  std::unique_ptr<SlotServer> server_;
};

}  // namespace

std::unique_ptr<SlotSource> make_disk_source(const SlotTarget& target, DiskExperts disk,
                                             const HostBank::Tables& tables, MemorySpace& memory,
                                             const Exec& exec) {
  return std::make_unique<DiskSource>(target, std::move(disk), tables, memory, exec);
}

}  // namespace rocket
