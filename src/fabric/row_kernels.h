// What a device does for an exchange between ranks: rows of experts into and out of blocks, parts into sums.
//
// A buffer has a block for each rank, in their order: a stamp, then its rows in the order of the choices. `place` says
// where each choice's row lies, in floats. Buffers may be the host's memory, pinned, at the address that the device
// knows; others write there between two kernels.
#pragma once

#include <cstdint>

#include "ops/exec.h"

namespace rocket::cuda {

struct RowPlaces {
  const int32_t* id = nullptr;     // [n] choices of all rows
  const int32_t* owner = nullptr;  // [experts] the rank of each
  int64_t n = 0;
  int32_t ranks = 0;
  int32_t hidden = 0;
  int64_t stamp_floats = 0;
  int64_t* place = nullptr;      // out [n]
  int32_t* host_copy = nullptr;  // out [n] the choices again
};
// By one block. stream: a cudaStream_t; null: the ops' own.
void place_rows(const RowPlaces& p, void* stream, Exec& exec);

struct MovedRows {
  const int32_t* own = nullptr;    // [n] the choices of this rank's experts, -1 = another's
  const int64_t* place = nullptr;  // [n]
  int64_t n = 0;
  int32_t hidden = 0;
  int64_t stamp_floats = 0;
  float* routed = nullptr;  // [n, hidden]
  float* buffer = nullptr;
};
// Own rows from `routed` into the buffer; the others' from the buffer into `routed`.
void pack_rows(const MovedRows& p, void* stream, Exec& exec);
void unpack_rows(const MovedRows& p, Exec& exec);

// Of one exchange over NCCL, written by the device into pinned memory. 0 at first.
struct ExchangeNotes {
  uint64_t taken = 0;    // when the rows were there, in nanoseconds of the device's clock
  uint64_t reached = 0;  // when the ops' stream needed them
  int32_t own = 0;       // choices of this rank's experts, and of the other's
  int32_t others = 0;
  int32_t wrong = 0;  // of the other rank's choices, how many are not this rank's
};

// Rows of rank `from` out of all that it has sent, [n, hidden], to their places.
struct TakenRows {
  const int32_t* id = nullptr;        // [n] choices of all rows
  const int32_t* other_id = nullptr;  // [n] as `from` has them
  const int32_t* owner = nullptr;     // [experts]
  int64_t n = 0;
  int32_t hidden = 0;
  int32_t rank = 0, from = 0;
  const float* rows = nullptr;
  float* routed = nullptr;  // [n, hidden]
  ExchangeNotes* notes = nullptr;
};
void take_rows(const TakenRows& p, void* stream, Exec& exec);
// Writes `reached`, on the ops' stream.
void note_reached(ExchangeNotes* notes, Exec& exec);

// How long the ops' stream has waited for parts, in nanoseconds of the device's clock. On the device.
struct PartClock {
  uint64_t reached = 0;  // when this rank's part was there: note_reached()
  uint64_t waited = 0;   // in all
};
void note_reached(PartClock* clock, Exec& exec);

struct PartSum {
  float* x = nullptr;  // [count] in: this rank's part; out: all parts added in the order of ranks
  int64_t count = 0;
  const float* parts = nullptr;  // part 0; this rank's is not read
  int64_t stride = 0;            // floats from a part to the next
  int32_t rank = 0, ranks = 0;
  PartClock* clock = nullptr;  // adds what has passed since it was reached; null: nobody asks
  uint64_t* waited = nullptr;  // out: clock->waited, in pinned memory
};
void sum_parts(const PartSum& p, Exec& exec);

struct PartJoin {
  const float* mine = nullptr;  // [rows, columns]
  int64_t rows = 0, columns = 0;
  const float* parts = nullptr;  // as above
  int64_t stride = 0;
  int32_t rank = 0, ranks = 0;
  float* all = nullptr;        // out [rows, ranks * columns]
  PartClock* clock = nullptr;  // as above
  uint64_t* waited = nullptr;
};
void join_parts(const PartJoin& p, Exec& exec);

}  // namespace rocket::cuda
