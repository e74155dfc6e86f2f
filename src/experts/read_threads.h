// Threads that wait for disks, so that whoever needs the bytes waits no longer than a limit.
//
// A read from a disk that hangs cannot be called back. Its thread is then left behind with everything that its job
// holds: jobs own what they use, except the memory that they read into. That memory must stay as long as the process.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace rocket {

// How long a read of an expert may take: 30 s, or ROCKET_EXPERT_READ_SECONDS. Throws InputError (no number above 0).
std::chrono::nanoseconds expert_read_limit();

// Keeps what a read that hangs may still write into.
template <typename T>
void keep_forever(T value) {
  static auto* const kept = new std::vector<T>;
  kept->push_back(std::move(value));
}

class ReadThreads {
 public:
  // Throws DeviceError if the system refuses the threads.
  explicit ReadThreads(int threads);
  ~ReadThreads();
  ReadThreads(const ReadThreads&) = delete;
  ReadThreads& operator=(const ReadThreads&) = delete;

  // Hands a job over and returns. Jobs must not throw.
  void post(std::function<void()> job);

  // Runs jobs and returns -1 when all are done. Throws the exception of the first that has one, after all are done. If
  // for `limit` none came to its end: the index of the first that has not; the threads are then hung.
  int run(std::vector<std::function<void()>> jobs, std::chrono::nanoseconds limit);

  // Gives up on jobs that do not come to their end: nothing waits for them any more.
  void leave() { hung_ = true; }
  bool hung() const { return hung_; }

 private:
  struct State;
  std::shared_ptr<State> state_;
  bool hung_ = false;
};

}  // namespace rocket
