// What ranks that share dense weights have each a part of: products that are to be summed, or columns of one result.
//
//   exchange.sum(x, …)          every rank's x is added up in the order of ranks, from 0: the same bits on all
//   exchange.join(mine, …)      every rank's columns stand side by side
//
// All parts go to all ranks and each does the sum itself. A block begins with a stamp of step, place and shape, so that a
// rank which is out of step is found by the first block it sends.
//
// This one is for ops of the host; device_exchange.h has that for a device's.
#pragma once

#include <cstdint>
#include <string>

#include "fabric/fabric.h"

namespace rocket {

class PartExchange {
 public:
  explicit PartExchange(Fabric& fabric) : fabric_(fabric) {}  // which outlives it
  virtual ~PartExchange() = default;
  PartExchange(const PartExchange&) = delete;
  PartExchange& operator=(const PartExchange&) = delete;

  // Floats of the buffer for so many rows of so many columns of each rank.
  static int64_t buffer_floats(int32_t ranks, int64_t rows, int64_t columns);

  void begin_step();
  // x: [rows, columns], a summand, and then the sum. `what` is summed, for errors. Rows that are still on their way
  // between ranks (RowExchange) have come when it returns.
  virtual void sum(float* x, int64_t rows, int64_t columns, float* buffer, const std::string& what);
  // mine: [rows, columns]. all: out [rows, ranks * columns].
  virtual void join(const float* mine, int64_t rows, int64_t columns, float* all, float* buffer,
                    const std::string& what);

 protected:
  static constexpr int64_t kStampFloats = 16;  // before a part; parts lie in the order of ranks

  static float* part(float* buffer, int32_t rank, int64_t count) {
    return buffer + rank * (kStampFloats + count) + kStampFloats;
  }
  // The buffer has this rank's part in its place, and then that of every other.
  void swap_blocks(int64_t rows, int64_t columns, float* buffer, const std::string& what);

  Fabric& fabric_;

 private:
  struct Stamp {
    uint64_t step, place, rows, columns;
    bool operator==(const Stamp&) const = default;
  };
  static_assert(sizeof(Stamp) <= kStampFloats * sizeof(float));
  void swap(const float* mine, int64_t rows, int64_t columns, float* buffer, const std::string& what);
  void check(int32_t rank, const Stamp& found, const Stamp& expected, const std::string& what) const;

  uint64_t step_ = 0, place_ = 0;
};

}  // namespace rocket
