// A fabric over a wire: time limits, signs of life, and errors that reach every rank.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>

#include "fabric/fabric.h"
#include "fabric/wire.h"

namespace rocket {

class WireFabric : public Fabric {
 public:
  static constexpr double kLimitSeconds = 60;

  // The wire outlives the fabric.
  explicit WireFabric(Wire& wire);
  ~WireFabric() override;

  const char* name() const override { return "mpi"; }
  std::string library() const override { return wire_.library(); }
  int32_t rank() const override { return rank_; }
  int32_t ranks() const override { return ranks_; }
  double limit_seconds() const override { return limit_; }
  void set_limit(double seconds) override { limit_ = seconds; }
  void receive_rows(std::span<const RowBlock> blocks, const std::string& what) override;
  void send_rows(const RowBlock& mine) override;
  void wait_rows() override;
  void watch(const std::function<int64_t()>& look, const std::string& what) override;
  void count_rows(const FabricFigures& more) override;
  const FabricFigures& figures() const override { return figures_; }
  void clear_figures() override { figures_ = {}; }
  void tell(std::string_view message) override;
  std::string hear(const std::string& what) override;
  std::vector<std::string> gather(std::string_view mine, const std::string& what) override;
  void fail(const std::string& message, const std::string& hint) override;
  bool failed() const override { return failed_; }
  bool rank0_knows() const override;
  void leave() override;
  void abort(int status) override;

 private:
  using Clock = std::chrono::steady_clock;
  enum Channel { kRows = 1, kMessages, kControl };
  enum class Sign : int32_t { kAlive, kFailure, kBye };
  enum class Patience { kNone, kWhileAlive };  // beyond the limit, with a rank that gives signs of life

  // Of one size, so that a receive can always be waiting.
  struct Control {
    Sign sign = Sign::kAlive;
    char message[1020] = {}, hint[512] = {};
  };
  struct Peer {
    Control received;
    Wire::Request request = 0;
    Clock::time_point heard;
    bool gone = false;  // has said goodbye
    Clock::time_point gone_at;
    bool beat_flying = false;  // the last sign of life is still on its way
    Wire::Request beat = 0;
  };
  struct Flying {  // a block of rows, or a message
    int32_t rank;
    Wire::Request request;
  };
  struct Failure {
    int32_t rank;  // that told of it, or is to blame
    bool told;     // by that rank, or one that comes before this
    std::string message, hint;
  };

  template <typename F>
  void each_other(F&& f) {
    for (int32_t r = 0; r < ranks_; ++r) {
      if (r != rank_) f(r);
    }
  }
  bool done(Flying& flying);
  void poll();
  void take_control(int32_t rank);
  void send_control(int32_t rank, const Control& control);
  void retire();
  void beat();
  void stop_beating();
  void choose_speaker();
  void wait(Flying flying, const std::string& what, Patience patience);
  void overdue(int32_t rank, const std::string& what, Clock::time_point since, Patience patience);
  [[noreturn]] void broken(int32_t rank, const std::string& message, const std::string& hint);
  [[noreturn]] void rethrow() const;
  void check();
  void call(int code, int32_t rank, const char* what);
  void send(int32_t rank, std::string_view message);
  std::string receive(int32_t rank, const std::string& what);

  Wire& wire_;
  const int32_t rank_, ranks_;
  std::atomic<double> limit_ = kLimitSeconds;
  std::mutex mutex_;  // of the wire and of all below
  std::vector<Peer> peers_;
  struct Awaited {
    Flying flying;
    std::string what;
  };
  std::vector<Awaited> incoming_;
  std::vector<Flying> outgoing_rows_;
  std::string awaited_;  // last
  struct Outgoing {
    std::string data;
    Flying flying;
  };
  std::deque<Outgoing> outgoing_;
  FabricFigures figures_;
  std::optional<Failure> failure_;
  std::atomic<bool> failed_ = false;
  bool left_ = false;

  std::thread beater_;
  std::mutex beat_mutex_;
  std::condition_variable beat_wake_;
  bool beat_stop_ = false;
};

// What carries mpi_fabric(): loads and starts MPI at the first call. For measurements; throws as mpi_fabric().
Wire& mpi_wire(double limit_seconds, const std::function<void()>& interrupt = {});

}  // namespace rocket
