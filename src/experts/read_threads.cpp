#include "experts/read_threads.h"

#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"

namespace rocket {

std::chrono::nanoseconds expert_read_limit() {
  constexpr char kName[] = "ROCKET_EXPERT_READ_SECONDS";
  constexpr double kMost = 1e9;
  const char* const text = std::getenv(kName);
  if (text == nullptr || *text == '\0') return std::chrono::seconds(30);
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (*end != '\0' || !(seconds > 0) || seconds > kMost) {
    throw InputError(std::string(kName) + ": expected seconds above 0, found '" + text + "'",
                     "leave it unset for 30 seconds");
  }
  return std::chrono::nanoseconds(static_cast<int64_t>(std::ceil(seconds * 1e9)));
}

// Of the threads and whoever gave them work; the last of them frees it.
struct ReadThreads::State {
  std::mutex mutex;
  std::condition_variable work, idle;
  std::deque<std::function<void()>> jobs;
  int working = 0;
  bool stop = false;

  static void serve(const std::shared_ptr<State>& state) {
    std::unique_lock lock(state->mutex);
    while (true) {
      state->work.wait(lock, [&] { return state->stop || !state->jobs.empty(); });
      if (state->stop) return;
      std::function<void()> job = std::move(state->jobs.front());
      state->jobs.pop_front();
      ++state->working;
      lock.unlock();
      job();
      job = nullptr;
      lock.lock();
      if (--state->working == 0) state->idle.notify_all();
    }
  }
};

ReadThreads::ReadThreads(int threads) : state_(std::make_shared<State>()) {
  try {
    for (int i = 0; i < threads; ++i) {
      std::thread([state = state_] { State::serve(state); }).detach();
    }
  } catch (const std::system_error& error) {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
    state_->work.notify_all();
    throw DeviceError(
        "threads for reading: the system refused one of " + std::to_string(threads) + ": " + error.what(),
        "allow this process more threads");
  }
}

// Jobs in hand come to their end first, as what they read into may be freed next.
ReadThreads::~ReadThreads() {
  std::unique_lock lock(state_->mutex);
  state_->stop = true;
  state_->jobs.clear();
  state_->work.notify_all();
  if (!hung_) state_->idle.wait(lock, [&] { return state_->working == 0; });
}

void ReadThreads::post(std::function<void()> job) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->jobs.push_back(std::move(job));
  }
  state_->work.notify_one();
}

int ReadThreads::run(std::vector<std::function<void()>> jobs, std::chrono::nanoseconds limit) {
  struct Batch {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<bool> done;
    std::vector<std::exception_ptr> error;
    size_t left = 0;
  };
  const auto batch = std::make_shared<Batch>();
  batch->done.resize(jobs.size());
  batch->error.resize(jobs.size());
  batch->left = jobs.size();
  for (size_t i = 0; i < jobs.size(); ++i) {
    post([batch, i, job = std::move(jobs[i])] {
      std::exception_ptr error;
      try {
        job();
      } catch (...) {
        error = std::current_exception();
      }
      const std::lock_guard lock(batch->mutex);
      batch->done[i] = true;
      batch->error[i] = error;
      --batch->left;
      batch->changed.notify_all();
    });
  }
  std::unique_lock lock(batch->mutex);
  while (batch->left > 0) {
    const size_t before = batch->left;
    if (batch->changed.wait_for(lock, limit, [&] { return batch->left != before; })) continue;
    hung_ = true;
    size_t first = 0;
    while (batch->done[first]) ++first;
    return static_cast<int>(first);
  }
  for (const std::exception_ptr& error : batch->error) {
    if (error) std::rethrow_exception(error);
  }
  return -1;
}

}  // namespace rocket
