// Finds librocket_mpi beside the module or program that asks, and starts MPI with it.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/error.h"
#include "fabric/wire_fabric.h"

namespace rocket {
namespace {

constexpr char kLibrary[] = "librocket_mpi.so";
constexpr std::chrono::milliseconds kBetweenInterrupts(50);
constexpr char kHowToGet[] =
    "pip install mpich (or a system's Open MPI or MPICH with headers), then build Rocket again: pip install "
    "--force-reinstall --no-deps .";

std::string library_path() {
  if (const char* const given = std::getenv("ROCKET_MPI_LIBRARY")) return given;
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&mpi_fabric), &info) == 0 || info.dli_fname == nullptr)
    return kLibrary;
  std::error_code error;
  const std::filesystem::path self = std::filesystem::canonical(info.dli_fname, error);
  return ((error ? std::filesystem::path(info.dli_fname) : self).parent_path() / kLibrary).string();
}

// Another MPI's launcher starts processes that do not find each other, or that end as they start.
void check_launcher(const char* kind) {
  const bool open_mpi = std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr,
             mpich = std::getenv("PMI_SIZE") != nullptr;
  if (kind == nullptr || open_mpi == mpich) return;
  const std::string built = kind, launcher = open_mpi ? "Open MPI" : "MPICH";
  if (built == launcher) return;
  throw DeviceError("boosters: expected the mpirun of " + built +
                        ", with which Rocket was built, found that of " + launcher,
                    "use the mpirun of " + built + ", or build Rocket again with " + launcher);
}

// MPI starts when all ranks do, and waits for the last without a limit: in a thread of its own, which is left to itself
// when the time is over.
Wire& start_in_time(StartWire start, double limit_seconds, const std::function<void()>& interrupt) {
  struct Started {
    std::promise<Wire*> wire;
    char error[512] = "";
  };
  const auto started = std::make_shared<Started>();
  std::future<Wire*> wire = started->wire.get_future();
  std::thread([started, start] {
    started->wire.set_value(start(started->error, sizeof started->error));
  }).detach();
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() +
                   std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(limit_seconds));
  while (wire.wait_until(std::min(end, Clock::now() + kBetweenInterrupts)) != std::future_status::ready) {
    if (interrupt) interrupt();
    if (Clock::now() < end) continue;
    throw DeviceError(
        "boosters: MPI has not started within " + std::to_string(static_cast<int>(limit_seconds + 0.5)) +
            " s: it waits for ranks that do not come",
        "see whether the processes of all ranks run, and whether their machines reach each other");
  }
  Wire* const found = wire.get();
  if (found == nullptr)
    throw DeviceError(std::string("boosters: MPI does not start: ") + started->error, kHowToGet);
  return *found;
}

Wire& start_wire(double limit_seconds, const std::function<void()>& interrupt) {
  const std::string path = library_path();
  if (access(path.c_str(), R_OK) != 0) {
    throw DeviceError("boosters: this build has no MPI: expected " + path + ", found nothing", kHowToGet);
  }
  // UCX, which MPIs bring, would take SIGHUP for itself: a hung-up terminal would get its debugging text, and the run
  // go on.
  setenv("UCX_DEBUG_SIGNO", "0", 0);
  void* const library =
      dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);  // some MPIs load parts that look for it
  if (library == nullptr) {
    throw DeviceError(std::string("boosters: cannot load MPI: ") + dlerror(),
                      "install the MPI that Rocket was built with, or another and build Rocket again");
  }
  const auto* const abi = static_cast<const int*>(dlsym(library, kWireAbi));
  const auto start = reinterpret_cast<StartWire>(dlsym(library, kStartWire));
  if (abi == nullptr || *abi != kWireVersion || start == nullptr) {
    throw DeviceError("boosters: " + path + ": expected version " + std::to_string(kWireVersion) +
                          ", found " + (abi == nullptr ? "none" : std::to_string(*abi)),
                      "build Rocket again: it is of another version");
  }
  check_launcher(static_cast<const char*>(dlsym(library, kWireKind)));
  return start_in_time(start, limit_seconds, interrupt);
}

}  // namespace

Wire& mpi_wire(double limit_seconds, const std::function<void()>& interrupt) {
  static Wire& wire = start_wire(limit_seconds, interrupt);
  return wire;
}

std::shared_ptr<Fabric> mpi_fabric(double limit_seconds, const std::function<void()>& interrupt) {
  static std::mutex mutex;
  static std::shared_ptr<Fabric> fabric;
  const std::lock_guard lock(mutex);
  if (!fabric) fabric = std::make_shared<WireFabric>(mpi_wire(limit_seconds, interrupt));
  fabric->set_limit(limit_seconds);
  return fabric;
}

}  // namespace rocket
