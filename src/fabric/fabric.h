// What joins the boosters of a run: one process (rank) a booster. Rank 0 decides, the others follow.
//
// Three kinds of messages:
//   rows      receive_rows(), send_rows(), wait_rows(): from every rank to every other, in the midst of a step
//   tell      from rank 0 to all others, who hear() them in order; gather() brings one of each rank to rank 0
//   failure   fail(): whoever cannot go on says so, and every wait of the other ranks ends with that error
// Each wait has a time limit. A rank that is awaited in the midst of a step must answer within it; one that may take
// its time (to load weights, or to wait for a reader of its output) must give a sign of life, which it does by itself.
// One thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace rocket {

// Of this rank, since they were cleared.
struct FabricFigures {
  int64_t rows_sent = 0, rows_received = 0;  // a row that goes to two ranks counts twice
  double wait_seconds = 0;                   // for rows that had not come when they were needed
};

// Some rows of one rank.
struct RowBlock {
  int32_t rank = 0;  // whose they are
  int64_t rows = 0;  // for the figures
  void* data = nullptr;
  int64_t bytes = 0;
};

class Fabric {
 public:
  virtual ~Fabric() = default;
  virtual const char* name() const = 0;     // solo | mpi
  virtual std::string library() const = 0;  // that carries the messages: "MPICH Version: 5.0.2"
  virtual int32_t rank() const = 0;
  virtual int32_t ranks() const = 0;
  virtual double limit_seconds() const = 0;  // of a wait
  virtual void set_limit(double seconds) = 0;

  // A block from each of some other ranks, whose size this rank knows, beside those that are on their way; `what` says what is awaited, for errors. The
  // memory must stay until wait_rows(). Throws DeviceError, as all below.
  virtual void receive_rows(std::span<const RowBlock> blocks, const std::string& what) = 0;
  virtual void send_rows(const RowBlock& mine) = 0;  // to all other ranks
  virtual void wait_rows() = 0;                      // until both are done
  // For rows that devices exchange among themselves. Waits until look() gives a number below 0; while it gives others,
  // something still comes. Throws as wait_rows().
  virtual void watch(const std::function<int64_t()>& look, const std::string& what) = 0;
  virtual void count_rows(const FabricFigures& more) = 0;
  virtual const FabricFigures& figures() const = 0;
  virtual void clear_figures() = 0;

  virtual void tell(std::string_view message) = 0;
  virtual std::string hear(const std::string& what) = 0;
  // At rank 0 a message of each rank, in their order; elsewhere empty. `what` is what rank 0 waits for.
  virtual std::vector<std::string> gather(std::string_view mine, const std::string& what) = 0;

  // Ends the run of all ranks: what went wrong on this one. Says so to the others, once; never throws.
  virtual void fail(const std::string& message, const std::string& hint) = 0;
  // Whether something has gone wrong somewhere, and whether rank 0 knows, so that it is for rank 0 to say.
  virtual bool failed() const = 0;
  virtual bool rank0_knows() const = 0;

  // The end, on all ranks: after it nothing else may be called but abort(). After a failure whoever is to say it returns
  // at once, to say so and then abort(); the others wait to be ended, at most a little longer than a wait may take.
  virtual void leave() = 0;
  // Ends the processes of all ranks, this one with them, with a status for their launcher.
  virtual void abort(int status) = 0;
};

// One rank that has nobody to talk to.
std::unique_ptr<Fabric> make_solo_fabric();

// Over MPI, with host buffers. The library is loaded at the first call and MPI started; later calls give the same
// fabric, with another limit. `interrupt` is called now and then while MPI starts, and may throw. Throws DeviceError where
// this build or this machine has no MPI, with what is missing and how to get it.
std::shared_ptr<Fabric> mpi_fabric(double limit_seconds, const std::function<void()>& interrupt = {});

}  // namespace rocket
