// Reads of files, several under way at a time, and a limit on each wait for them. Not for several threads.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace rocket {

struct DiskRead {
  int fd = -1;
  int64_t offset = 0, bytes = 0;
  void* to = nullptr;
  int64_t result = 0;  // bytes that were read, 0 at the end of the file, or -errno
};

class DiskReader {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~DiskReader() = default;
  virtual const char* name() const = 0;  // io_uring | preads
  virtual int depth() const = 0;         // reads that may be under way

  // The read stays where it is until wait() gives it back. Fewer than depth() are under way. Throws DeviceError.
  virtual void start(DiskRead& read) = 0;
  // One that is done; null: none was, until then. At least one is under way. A reader that gave null once may only be
  // destroyed, and what it was reading into must stay.
  virtual DiskRead* wait(Clock::time_point until) = 0;
};

// Null where the system refuses io_uring, as containers often do, or knows too little of it; `why` says so.
std::unique_ptr<DiskReader> make_uring_reader(int depth, std::string* why);
// A pool of threads with blocking reads.
std::unique_ptr<DiskReader> make_thread_reader(int depth);
// io_uring, else threads; ROCKET_IO_URING=0 stands for a system that refuses it.
std::unique_ptr<DiskReader> make_disk_reader(int depth, std::string* why);

}  // namespace rocket
