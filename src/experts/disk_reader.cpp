#include "experts/disk_reader.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <utility>

#include "experts/read_threads.h"

namespace rocket {
namespace {

constexpr int kMostThreads = 8;

class ThreadReader final : public DiskReader {
 public:
  explicit ThreadReader(int depth)
      : depth_(depth), done_(std::make_shared<Done>()), threads_(std::min(depth, kMostThreads)) {}

  ~ThreadReader() override {
    const std::lock_guard lock(done_->mutex);
    done_->abandoned = true;
  }

  const char* name() const override { return "preads"; }
  int depth() const override { return depth_; }

  void start(DiskRead& read) override {
    threads_.post([done = done_, read = &read, copy = read] {
      ssize_t got;
      do {
        got = ::pread(copy.fd, copy.to, static_cast<size_t>(copy.bytes), static_cast<off_t>(copy.offset));
      } while (got < 0 && errno == EINTR);
      const int64_t result = got < 0 ? -errno : got;
      const std::lock_guard lock(done->mutex);
      if (done->abandoned) return;
      read->result = result;
      done->reads.push_back(read);
      done->changed.notify_one();
    });
  }

  DiskRead* wait(Clock::time_point until) override {
    std::unique_lock lock(done_->mutex);
    if (!done_->changed.wait_until(lock, until, [&] { return !done_->reads.empty(); })) {
      done_->abandoned = true;
      threads_.leave();
      return nullptr;
    }
    DiskRead* const read = done_->reads.front();
    done_->reads.pop_front();
    return read;
  }

 private:
  struct Done {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<DiskRead*> reads;
    bool abandoned = false;  // nobody waits for what is still under way
  };

  int depth_;
  std::shared_ptr<Done> done_;
  ReadThreads threads_;
};

}  // namespace

std::unique_ptr<DiskReader> make_thread_reader(int depth) {
  return std::make_unique<ThreadReader>(depth);
}

std::unique_ptr<DiskReader> make_disk_reader(int depth, std::string* why) {
  const char* const wanted = std::getenv("ROCKET_IO_URING");
  if (wanted != nullptr && std::string(wanted) == "0") {
    *why = "ROCKET_IO_URING is 0";
  } else if (auto reader = make_uring_reader(depth, why)) {
    return reader;
  }
  return make_thread_reader(depth);
}

}  // namespace rocket
