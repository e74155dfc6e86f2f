// Time by stage of a step. Off: a scope costs one branch.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "runtime/engine.h"

namespace rocket {

// Marks moments in the work that is issued, and tells the time between two of them later.
class StageClock {
 public:
  virtual ~StageClock() = default;
  virtual int mark() = 0;                           // an index from 0 on
  virtual double ms(int begin, int end) const = 0;  // after all marked work is done
  virtual void clear() = 0;                         // forgets the marks
};

class HostClock : public StageClock {
 public:
  int mark() override {
    marks_.push_back(Clock::now());
    return static_cast<int>(marks_.size()) - 1;
  }
  double ms(int begin, int end) const override {
    return std::chrono::duration<double, std::milli>(marks_[static_cast<size_t>(end)] -
                                                     marks_[static_cast<size_t>(begin)])
        .count();
  }
  void clear() override { marks_.clear(); }

 private:
  using Clock = std::chrono::steady_clock;
  std::vector<Clock::time_point> marks_;
};

class StageTimer {
 public:
  explicit StageTimer(StageClock* clock = nullptr) : clock_(clock) {}

  // Stages are printed in the order in which they are added.
  int add(const std::string& name, bool of_which = false) {
    stages_.push_back({name, 0, of_which});
    return static_cast<int>(stages_.size()) - 1;
  }
  void set(bool on) {
    on_ = on && clock_;
    spans_.clear();
    if (clock_) clock_->clear();
    for (StageTime& stage : stages_) stage.ms = 0;
  }
  bool on() const { return on_; }
  const std::vector<StageTime>& stages() const { return stages_; }
  // Adds up what was marked since the last call. The work has to be done.
  void collect() {
    for (const Span& span : spans_)
      stages_[static_cast<size_t>(span.stage)].ms += clock_->ms(span.begin, span.end);
    spans_.clear();
    if (clock_) clock_->clear();
  }

  class Scope {
   public:
    Scope(StageTimer& timer, int stage) : timer_(timer), stage_(stage) {
      if (timer_.on_) begin_ = timer_.clock_->mark();
    }
    // A device that has failed cannot mark anything: what failed has been thrown, or will be at the next call.
    ~Scope() {
      if (!timer_.on_) return;
      try {
        timer_.spans_.push_back({stage_, begin_, timer_.clock_->mark()});
      } catch (...) {
        timer_.spans_.clear();
      }
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    StageTimer& timer_;
    int stage_;
    int begin_ = 0;
  };

 private:
  struct Span {
    int stage, begin, end;
  };
  StageClock* clock_;
  std::vector<StageTime> stages_;
  std::vector<Span> spans_;
  bool on_ = false;
};

}  // namespace rocket
