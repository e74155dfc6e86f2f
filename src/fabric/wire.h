// What a fabric of several processes needs of a message-passing library, and no more: messages of known size between
// ranks, in order on each channel, sent and received without waiting. An implementation may live in a shared object of
// its own, so that the library need not be there when Rocket starts: hence no exceptions and no std types.
#pragma once

#include <cstdint>

namespace rocket {

class Wire {
 public:
  using Request = uint64_t;

  virtual ~Wire() = default;
  virtual const char* library() const = 0;  // "MPICH 5.0.2"
  virtual int rank() const = 0;
  virtual int ranks() const = 0;

  // 0, or an error of the library that error() puts into words (valid until the next call).
  virtual int send(int rank, int channel, const void* data, int64_t bytes, Request* request) = 0;
  virtual int receive(int rank, int channel, void* data, int64_t bytes, Request* request) = 0;
  virtual int test(Request* request, bool* done) = 0;
  virtual const char* error(int code) = 0;

  // Ends the library, when nothing is on its way. All ranks do.
  virtual int stop() = 0;
  // Ends the processes of all ranks, this one with them, and gives their launcher the status.
  virtual void abort(int status) = 0;
};

// Of librocket_mpi: starts MPI. Null if that cannot be, with the reason in `error`. Lives as long as the process.
using StartWire = Wire* (*)(char* error, int error_bytes);
inline constexpr char kStartWire[] = "rocket_start_mpi";
inline constexpr char kWireAbi[] = "rocket_mpi_abi";  // of type int: must equal kWireVersion
inline constexpr int kWireVersion = 1;
inline constexpr char kWireKind[] =
    "rocket_mpi_kind";  // of type char[]: "Open MPI" or "MPICH", known before it starts

}  // namespace rocket
