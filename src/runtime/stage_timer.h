// Wall time by stage of a step. Off: a scope costs one branch.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "runtime/engine.h"

namespace rocket {

class StageTimer {
 public:
  // Stages are printed in the order in which they are added.
  int add(const std::string& name, bool of_which = false) {
    stages_.push_back({name, 0, of_which});
    return static_cast<int>(stages_.size()) - 1;
  }
  void set(bool on) {
    on_ = on;
    for (StageTime& stage : stages_) stage.ms = 0;
  }
  bool on() const { return on_; }
  const std::vector<StageTime>& stages() const { return stages_; }

  class Scope {
   public:
    Scope(StageTimer& timer, int stage) : timer_(timer), stage_(stage) {
      if (timer_.on_) start_ = Clock::now();
    }
    ~Scope() {
      if (timer_.on_)
        timer_.stages_[static_cast<size_t>(stage_)].ms +=
            std::chrono::duration<double, std::milli>(Clock::now() - start_).count();
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    using Clock = std::chrono::steady_clock;
    StageTimer& timer_;
    int stage_;
    Clock::time_point start_;
  };

 private:
  std::vector<StageTime> stages_;
  bool on_ = false;
};

}  // namespace rocket
