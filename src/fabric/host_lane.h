// Work of the host in the midst of a device's step: a stream beside that of the ops, on which calls of the host stand
// between kernels, in a recorded step as in one that is issued call by call.
//
//   Work* work = lane.keep([&] { … });   once; stays for as long as recorded steps may call it
//   lane.fork();        what comes next on the lane waits for what was issued on the ops' stream
//   … kernels on lane.stream()
//   lane.call(*work);   on a thread of the driver, which must call nothing of CUDA; the lane waits for it, the device
//                       is free for others meanwhile
//   … ops on their own stream, beside it
//   lane.join();        what comes next on the ops' stream waits for the lane
//   lane.finish();      waits for the step
//
// What a call throws ends no step: the calls after it are left out, the step runs to its end with whatever there is, and
// finish() throws it, for good. So no step waits for longer than a call does.
#pragma once

#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <utility>

#include "ops/cuda.cuh"

namespace rocket {

class HostLane {
 public:
  struct Work {
    HostLane* lane;
    std::function<void()> run;
  };

  // main: of the ops, outlives the lane. what: for errors.
  HostLane(CudaContext& main, const char* what) : main_(main), what_(what) {
    int least = 0, greatest = 0;
    cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest), what);
    cuda_check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), what);
    cuda_check(cudaEventCreateWithFlags(&forked_, cudaEventDisableTiming), what);
    cuda_check(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming), what);
  }
  ~HostLane() {
    settle();
    cudaEventDestroy(done_);
    cudaEventDestroy(forked_);
    cudaStreamDestroy(stream_);
  }
  HostLane(const HostLane&) = delete;
  HostLane& operator=(const HostLane&) = delete;

  cudaStream_t stream() const { return stream_; }
  Work* keep(std::function<void()> run) { return &work_.emplace_back(Work{this, std::move(run)}); }

  void fork() {
    cuda_check(cudaEventRecord(forked_, main_.stream), what_);
    cuda_check(cudaStreamWaitEvent(stream_, forked_, 0), what_);
  }
  void call(Work& work) {
    cuda_check(cudaLaunchHostFunc(stream_, &HostLane::answer, &work), what_);
    if (main_.sync_each) cuda_check(cudaStreamSynchronize(stream_), what_);
  }
  void join() {
    cuda_check(cudaEventRecord(done_, stream_), what_);
    cuda_check(cudaStreamWaitEvent(main_.stream, done_, 0), what_);
    main_.after_join = true;
  }
  // Whether all that was joined is done. Of a join that was not recorded.
  bool joined_is_done() const {
    const cudaError_t status = cudaEventQuery(done_);
    if (status == cudaErrorNotReady) return false;
    cuda_check(status, what_);
    return true;
  }
  void finish() {
    cuda_check(cudaStreamSynchronize(main_.stream), "a step on the device");
    if (failed_.load(std::memory_order_acquire)) std::rethrow_exception(error_);
  }
  // Before what the calls use goes away.
  void settle() noexcept {
    cudaStreamSynchronize(main_.stream);
    cudaStreamSynchronize(stream_);
  }

 private:
  static void CUDART_CB answer(void* data) {
    const Work& work = *static_cast<Work*>(data);
    HostLane& lane = *work.lane;
    if (lane.failed_.load(std::memory_order_acquire)) return;
    try {
      work.run();
    } catch (...) {
      lane.error_ = std::current_exception();
      lane.failed_.store(true, std::memory_order_release);
    }
  }

  CudaContext& main_;
  const char* what_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t forked_ = nullptr, done_ = nullptr;
  std::deque<Work> work_;
  std::atomic<bool> failed_ = false;
  std::exception_ptr error_;
};

}  // namespace rocket
