// Ranks as threads of one process: messages in memory, of which a rank may send none any more.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "fabric/wire.h"

namespace check {

// From any thread.
inline void expect_of_rank(bool ok, const std::string& what) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  expect(ok, what);
}

// Messages between all ranks of a test.
struct Post {
  std::mutex mutex;
  std::map<std::tuple<int, int, int>, std::deque<std::string>> queue;  // from, to, channel
  std::vector<bool> dead;                                              // sends nothing any more
  int slow_channel = 0;                                                // whose messages come only then
  std::chrono::steady_clock::time_point slow_until;
  int stops = 0;
};

class ThreadWire : public rocket::Wire {
 public:
  ThreadWire(Post& post, int rank, int ranks) : post_(post), rank_(rank), ranks_(ranks) {}
  const char* library() const override { return "threads"; }
  int rank() const override { return rank_; }
  int ranks() const override { return ranks_; }

  int send(int to, int channel, const void* data, int64_t bytes, Request* request) override {
    const std::lock_guard lock(post_.mutex);
    *request = 0;
    if (post_.dead[static_cast<size_t>(rank_)]) return 0;
    post_.queue[{rank_, to, channel}].emplace_back(static_cast<const char*>(data),
                                                   static_cast<size_t>(bytes));
    return 0;
  }
  int receive(int from, int channel, void* data, int64_t bytes, Request* request) override {
    const std::lock_guard lock(post_.mutex);
    waiting_[++last_] = {from, channel, data, static_cast<size_t>(bytes)};
    *request = last_;
    return 0;
  }
  int test(Request* request, bool* done) override {
    const std::lock_guard lock(post_.mutex);
    *done = *request == 0;
    if (*done) return 0;
    const Receive r = waiting_.at(*request);
    for (const auto& [other, earlier] : waiting_) {  // on each channel in the order of the receives
      if (other < *request && earlier.from == r.from && earlier.channel == r.channel) return 0;
    }
    if (r.channel == post_.slow_channel && std::chrono::steady_clock::now() < post_.slow_until) return 0;
    std::deque<std::string>& queue = post_.queue[{r.from, rank_, r.channel}];
    if (queue.empty()) return 0;
    const std::string message = std::move(queue.front());
    queue.pop_front();
    waiting_.erase(*request);
    *request = 0;
    *done = true;
    std::memcpy(r.data, message.data(), std::min(message.size(), r.bytes));
    return message.size() > r.bytes ? 15 : 0;
  }
  void abort(int) override { expect_of_rank(false, "nobody aborts"); }
  const char* error(int code) override { return code == 15 ? "message truncated" : "unknown"; }
  int stop() override {
    const std::lock_guard lock(post_.mutex);
    expect_of_rank(waiting_.empty(), "no receive is left when the wire stops");
    ++post_.stops;
    return 0;
  }

 private:
  struct Receive {
    int from, channel;
    void* data;
    size_t bytes;
  };
  Post& post_;
  int rank_, ranks_;
  Request last_ = 0;
  std::map<Request, Receive> waiting_;
};

}  // namespace check
