// A fixed set of worker threads that run one parallel loop at a time, with low start-up cost.
//
// A decode step is some hundred short loops, so a worker spins for a bounded time before it sleeps. Which thread
// computes which item never changes a result: ops must not let the split of items change the order of any sum.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace rocket {

class ThreadPool {
 public:
  // threads: the number of threads that compute, the caller included; 0 = as many as this process may use
  // (affinity mask and container CPU quota counted). Throws DeviceError if the system refuses them.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Calls body(context, begin, end, thread) on disjoint ranges that cover [0, items); thread < threads(). Ranges
  // are handed out in blocks of at least `grain` items. Returns when all are done. The first exception of a body
  // is thrown here. Not reentrant: a body must not start a loop of its own.
  using Body = void (*)(void* context, int64_t begin, int64_t end, int thread);
  void run(int64_t items, int64_t grain, Body body, void* context);

  // The same for a lambda (int64_t begin, int64_t end, int thread). Always inlined, so that kernel files compiled
  // for several instruction sets share no instantiation.
  template <typename F>
  [[gnu::always_inline]] inline void loop(int64_t items, int64_t grain, F&& f) {
    struct Call {
      [[gnu::noinline]] static void body(void* context, int64_t begin, int64_t end, int thread) {
        (*static_cast<std::remove_reference_t<F>*>(context))(begin, end, thread);
      }
    };
    run(items, grain, &Call::body, const_cast<void*>(static_cast<const void*>(&f)));
  }

  // How many CPUs this process may use: affinity mask and cgroup quota (rounded up), at least 1.
  static int available_cpus();

 private:
  void stop();

  struct Impl;
  std::unique_ptr<Impl> impl_;
  int threads_ = 1;
};

}  // namespace rocket
