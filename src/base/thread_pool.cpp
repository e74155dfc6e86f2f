#include "base/thread_pool.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif

#include "base/error.h"
#include "base/memory.h"

namespace rocket {
namespace {

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// About 100 µs on current CPUs: longer than the gap between two loops of a step, short against a sleep of the program.
constexpr int kSpins = 3000;

}  // namespace

// Blocks are claimed by compare-and-swap on `ticket` (loop number in the upper half, next block in the lower), so a
// worker that comes late finds nothing to claim and the caller need not wait for it: a loop ends when all its blocks
// are done, whoever did them. The loop's parameters are read before a claim and are valid if the claim succeeds,
// because the loop cannot end while a claimed block is not done.
struct ThreadPool::Impl {
  std::vector<std::thread> workers;
  alignas(64) std::atomic<uint64_t> ticket{0};
  alignas(64) std::atomic<int64_t> done{0};
  alignas(64) std::atomic<uint32_t> wake{0};
  std::atomic<int> sleepers{0};
  std::atomic<bool> stop{false};

  std::atomic<Body> body{nullptr};
  std::atomic<void*> context{nullptr};
  std::atomic<int64_t> items{0}, block{1}, blocks{0};

  std::mutex error_mutex;
  std::exception_ptr error;
  std::mutex run_mutex;  // one loop at a time

  void work(uint32_t loop, int thread) {
    for (;;) {
      uint64_t seen = ticket.load(std::memory_order_acquire);
      if (static_cast<uint32_t>(seen >> 32) != loop) return;
      const int64_t index = static_cast<uint32_t>(seen);
      const Body f = body.load(std::memory_order_relaxed);
      void* const argument = context.load(std::memory_order_relaxed);
      const int64_t count = items.load(std::memory_order_relaxed),
                    size = block.load(std::memory_order_relaxed);
      if (index >= blocks.load(std::memory_order_relaxed)) return;
      if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
      try {
        f(argument, index * size, std::min(count, (index + 1) * size), thread);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(error_mutex);
        if (!error) error = std::current_exception();
      }
      done.fetch_add(1, std::memory_order_release);
    }
  }

  void worker(int thread) {
    uint32_t last = 0;
    while (!stop.load(std::memory_order_relaxed)) {
      uint32_t now = wake.load(std::memory_order_acquire);
      for (int spin = 0; now == last && spin < kSpins; ++spin) {
        pause_cpu();
        now = wake.load(std::memory_order_acquire);
      }
      if (now == last) {
        sleepers.fetch_add(1);
        wake.wait(last);
        sleepers.fetch_sub(1);
        continue;
      }
      last = now;
      work(now, thread);
    }
  }
};

ThreadPool::ThreadPool(int threads) : impl_(std::make_unique<Impl>()) {
  threads_ = threads > 0 ? threads : available_cpus();
  try {
    for (int i = 1; i < threads_; ++i) impl_->workers.emplace_back([this, i] { impl_->worker(i); });
  } catch (const std::system_error& e) {
    const size_t started = impl_->workers.size() + 1;
    stop();
    throw DeviceError("threads: the system gave " + std::to_string(started) + " of " +
                          std::to_string(threads_) + ": " + e.code().message(),
                      "ask for fewer threads");
  }
}

ThreadPool::~ThreadPool() {
  stop();
}

void ThreadPool::stop() {
  impl_->stop.store(true);
  impl_->wake.fetch_add(1);
  impl_->wake.notify_all();
  for (std::thread& worker : impl_->workers) worker.join();
}

void ThreadPool::run(int64_t items, int64_t grain, Body body, void* context) {
  if (items <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  if (threads_ == 1 || items <= grain) {
    body(context, 0, items, 0);
    return;
  }
  Impl& impl = *impl_;
  const std::lock_guard<std::mutex> lock(impl.run_mutex);
  // Four blocks a thread: a thread that is slowed down by its neighbours on the machine hands over most of its share.
  const int64_t size = std::max(grain, (items + threads_ * 4 - 1) / (threads_ * 4));
  const int64_t blocks = (items + size - 1) / size;
  const uint32_t loop = static_cast<uint32_t>(impl.ticket.load(std::memory_order_relaxed) >> 32) + 1;
  // An odd state that no worker can claim from, while the parameters change.
  impl.ticket.store((static_cast<uint64_t>(loop - 1) << 32) | 0xffffffffu, std::memory_order_release);
  impl.body.store(body, std::memory_order_relaxed);
  impl.context.store(context, std::memory_order_relaxed);
  impl.items.store(items, std::memory_order_relaxed);
  impl.block.store(size, std::memory_order_relaxed);
  impl.blocks.store(blocks, std::memory_order_relaxed);
  impl.done.store(0, std::memory_order_relaxed);
  impl.ticket.store(static_cast<uint64_t>(loop) << 32, std::memory_order_release);
  impl.wake.store(loop);
  if (impl.sleepers.load() > 0) impl.wake.notify_all();
  impl.work(loop, 0);
  for (int spin = 0; impl.done.load(std::memory_order_acquire) < blocks; ++spin) {
    if (spin < kSpins) {
      pause_cpu();
    } else {
      std::this_thread::yield();
    }
  }
  if (impl.error) {
    std::exception_ptr error;
    std::swap(error, impl.error);
    std::rethrow_exception(error);
  }
}

int ThreadPool::available_cpus() {
  int cpus = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) cpus = CPU_COUNT(&set);
#endif
  const int quota = cgroup_cpu_quota();
  return std::max(1, quota > 0 ? std::min(cpus, quota) : cpus);
}

}  // namespace rocket
