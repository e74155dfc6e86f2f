// Reads of hinted experts, beside demand: one thread, one expert at a time, in the order in which they were added, and
// none is begun while they are held. So whoever holds them and waits for the one under way has the store, and every
// slot, to itself.
//
// All calls are one thread's. A read that fails is only marked: who wants the expert after all reads it again, and finds
// out why.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "experts/read_threads.h"
#include "experts/store.h"

namespace rocket {

struct HintedRead {
  int32_t layer = -1, expert = -1;
  SlotLayout layout;
  char* slot = nullptr;
  // For whoever added it; the thread leaves these alone.
  bool there = false, demanded = false;
};

class HintReads {
 public:
  explicit HintReads(std::shared_ptr<const ExpertStore> store);
  // Waits for the read under way, with a limit.
  ~HintReads();

  // Before the first add(). Throws DeviceError if the system refuses the thread.
  void start();
  void add(std::shared_ptr<HintedRead> read);
  // Takes out a read that was not begun. False: it was, or is not known.
  bool drop(const HintedRead* read);
  void hold(bool on);
  // Returns when none is under way; they are held. Throws DeviceError where one takes longer than it may.
  void settle();

  struct Finished {
    std::shared_ptr<HintedRead> read;
    bool there = false;  // its bytes are in its slot; else they could not be read
  };
  // Those that have come to their end since the last call, in that order.
  std::vector<Finished> finished();

  // Nobody waits any more for the read under way; it may still write into its slot.
  bool hung() const { return hung_; }
  // Drops what was not begun, and waits as the destructor does. Nothing may be added after it.
  void stop();

 private:
  struct State;
  bool wait();

  std::shared_ptr<State> state_;
  std::unique_ptr<ReadThreads> threads_;
  std::chrono::nanoseconds limit_;
  bool hung_ = false;
};

}  // namespace rocket
