// Brings experts from a store into slots of a device that cannot call: a thread answers what a step posts (ops/slot_mail.h).
//
//   server.begin_pass();   the thread looks for requests from here on
//   … a step runs; where it is not recorded, the caller brings what it misses: server.bring(layer, misses)
//   server.end_pass();     once the step is done and before anything of it is used: throws what went wrong
//
// Experts are read in groups into one part of the staging memory, several reads at a time, while what was read into the
// other part is copied. What fails fails for good, with the same error for every later call: the step has left experts
// that count as there and are not. Then the device is told that nothing more comes, so that it does not wait.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "experts/slot_layout.h"
#include "experts/store.h"
#include "ops/slot_mail.h"

namespace rocket {

// The way from the host's memory into slots. Calls come from one thread at a time. Throws DeviceError.
class SlotCarrier {
 public:
  static constexpr int kParts = 2;  // of the staging memory

  virtual ~SlotCarrier() = default;
  virtual void attach() = 0;     // first of all in a thread that makes the other calls
  virtual SlotMail& mail() = 0;  // the address that the host knows it by
  virtual char* staging(int part) = 0;
  // Starts the copy of an expert that lies in a part; copies are done in the order in which they are started.
  virtual void copy(int part, int32_t slot, const char* from, int64_t bytes) = 0;
  virtual void wait(int part) = 0;  // until all copies from the part are done
  // Behind the copies so far: how many experts the requests have brought, or kNothingMore.
  virtual void announce(uint64_t arrived) = 0;
  virtual void keep_staging() = 0;  // a read that hangs may still write there: never give it back
};

class SlotServer {
 public:
  using Tables = std::vector<std::span<const ExpertWeights>>;

  static constexpr int kParts = SlotCarrier::kParts;
  // Of a part: room for some experts, so that several reads are under way.
  struct Staging {
    int64_t place_bytes = 0, places = 0;
    int64_t part_bytes() const { return place_bytes * places; }
  };
  static Staging staging_for(int64_t slot_bytes, int32_t experts);

  // numbers: the model's of each MoE layer, for errors. limit: how long the store may give nothing.
  SlotServer(std::unique_ptr<ExpertStore> store, std::unique_ptr<SlotCarrier> carrier, const Tables& tables,
             std::vector<int32_t> numbers, const Staging& staging,
             std::chrono::nanoseconds limit = expert_read_limit());
  // A request in hand comes to its end first, unless that takes longer than a store may: then the thread is left behind
  // with all that it uses.
  ~SlotServer();
  SlotServer(const SlotServer&) = delete;
  SlotServer& operator=(const SlotServer&) = delete;

  // How long a device waits for the next expert: longer than a store, which can say more about what is wrong.
  static std::chrono::nanoseconds device_limit(std::chrono::nanoseconds limit) { return 2 * limit; }

  void check() const;  // throws what went wrong before
  void begin_pass();
  void end_pass();
  void bring(int32_t layer, std::span<const SlotMiss> misses);
  double seconds() const { return seconds_; }  // in bring()

 private:
  struct State;
  std::shared_ptr<State> state_;
  std::thread thread_;
  double seconds_ = 0;
};

}  // namespace rocket
