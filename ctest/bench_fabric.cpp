// The time of an exchange of rows by message size, against the MPI library's own ping-pong over the same wire.
//
//   mpirun -np 2 build/bench_fabric [MILLISECONDS a size]
//
// Ping-pong: half of the time that a block takes there and back, with nothing but the wire's send, receive and test.
// Exchange: both ranks send a block and receive one, with the fabric's bookkeeping and limits: receive_rows, send_rows,
// wait_rows. Both copy the block once on each side; the exchange moves twice the bytes, one way each.
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/error.h"
#include "fabric/fabric.h"
#include "fabric/wire_fabric.h"

using namespace rocket;

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kPingChannel = 9;
constexpr int kBatches = 8;  // of which the fastest counts: other programs only make it slower

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void finish(Wire& wire, Wire::Request request) {
  bool done = false;
  while (!done) {
    wire.test(&request, &done);
    if (!done) sched_yield();
  }
}

// Both ranks make the same number of rounds: rank 0 says how many.
int64_t agree(Fabric& fabric, int64_t rounds) {
  if (fabric.rank() != 0) return std::stoll(fabric.hear("the number of rounds"));
  fabric.tell(std::to_string(rounds));
  return rounds;
}

void ping_pong(Wire& wire, std::vector<char>& block, int64_t bytes) {
  const int other = 1 - wire.rank();
  Wire::Request request = 0;
  for (int turn = 0; turn < 2; ++turn) {
    if (turn == wire.rank()) {
      wire.send(other, kPingChannel, block.data(), bytes, &request);
    } else {
      wire.receive(other, kPingChannel, block.data(), bytes, &request);
    }
    finish(wire, request);
  }
}

void exchange(Fabric& fabric, std::vector<char>& out, std::vector<char>& in, int64_t bytes) {
  const RowBlock theirs{1 - fabric.rank(), 1, in.data(), bytes}, mine{fabric.rank(), 1, out.data(), bytes};
  fabric.receive_rows({&theirs, 1}, "rows of the benchmark");
  fabric.send_rows(mine);
  fabric.wait_rows();
}

template <typename F>
double microseconds(Fabric& fabric, double budget, F&& round) {
  for (int i = 0; i < 3; ++i) round();
  const Clock::time_point trial = Clock::now();
  for (int i = 0; i < 4; ++i) round();
  const int64_t wanted = static_cast<int64_t>(budget / kBatches / std::max(1e-7, seconds_since(trial) / 4));
  const int64_t rounds = agree(fabric, std::clamp<int64_t>(wanted, 5, 100000));
  double best = 1e9;
  for (int batch = 0; batch < kBatches; ++batch) {
    const Clock::time_point start = Clock::now();
    for (int64_t i = 0; i < rounds; ++i) round();
    best = std::min(best, 1e6 * seconds_since(start) / static_cast<double>(rounds));
  }
  return best;
}

int run(double budget) {
  const std::shared_ptr<Fabric> fabric = mpi_fabric(WireFabric::kLimitSeconds);
  if (fabric->ranks() != 2) {
    if (fabric->rank() == 0)
      std::fprintf(stderr, "expected 2 ranks, found %d: mpirun -np 2 …\n", fabric->ranks());
    fabric->leave();
    return 2;
  }
  Wire& wire = mpi_wire(WireFabric::kLimitSeconds);
  const bool prints = fabric->rank() == 0;
  if (prints) {
    std::printf("%s\n%10s  %12s  %12s  %8s  %14s\n", fabric->library().c_str(), "bytes", "ping-pong us",
                "exchange us", "ratio", "exchange GB/s");
  }
  std::vector<char> out(16 << 20, 1), in(16 << 20, 2);
  for (int64_t bytes = 64; bytes <= int64_t{16} << 20; bytes *= 4) {
    const double ping = microseconds(*fabric, budget, [&] { ping_pong(wire, out, bytes); }) / 2;
    const double both = microseconds(*fabric, budget, [&] { exchange(*fabric, out, in, bytes); });
    if (!prints) continue;
    std::printf("%10lld  %12.2f  %12.2f  %8.2f  %14.3f\n", static_cast<long long>(bytes), ping, both,
                both / ping, 2e-3 * static_cast<double>(bytes) / both);
  }
  fabric->leave();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? std::atof(argv[1]) / 1000 : 0.2);
  } catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n\nhint: %s\n", error.what(), error.hint().c_str());
    return 1;
  }
}
