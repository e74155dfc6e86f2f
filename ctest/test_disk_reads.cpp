// Reads that are continued, that fail and that hang, by every reader; threads that are left behind; pages that go away.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/mapped_file.h"
#include "check.h"
#include "experts/disk_reader.h"
#include "experts/read_threads.h"
#include "fuel_files.h"

using namespace rocket;
using namespace std::chrono_literals;
using check::expect;
using fuel_files::throws;

namespace {

struct Opened {
  explicit Opened(const std::string& path) : fd(::open(path.c_str(), O_RDONLY)) {}
  ~Opened() { ::close(fd); }
  int fd;
};

// More reads than may be under way, in whatever order they come.
void reads(DiskReader& reader, const std::string& what) {
  constexpr int kReads = 40;
  constexpr int64_t kBytes = 5000;
  const fuel_files::TempDir dir;
  const std::string content = fuel_files::pattern(kReads * kBytes + 100, 3);
  fuel_files::write_file(dir / "file", content);
  const Opened file(dir / "file");
  std::vector<std::string> got(kReads + 2, std::string(kBytes, '\0'));
  std::vector<DiskRead> read(kReads + 2);
  for (int i = 0; i < kReads; ++i) read[i] = {file.fd, i * kBytes, kBytes, got[i].data(), -1};
  read[kReads] = {file.fd, kReads * kBytes, kBytes, got[kReads].data(), -1};              // past the end
  read[kReads + 1] = {file.fd, 2 * kReads * kBytes, kBytes, got[kReads + 1].data(), -1};  // beyond it
  size_t next = 0, under_way = 0;
  for (size_t done = 0; done < read.size(); ++done) {
    for (; next < read.size() && under_way < static_cast<size_t>(reader.depth()); ++under_way)
      reader.start(read[next++]);
    DiskRead* const one = reader.wait(DiskReader::Clock::now() + 10s);
    if (!expect(one != nullptr, what + ": a read is done in time")) return;
    --under_way;
  }
  for (int i = 0; i < kReads; ++i) {
    expect(read[i].result == kBytes && got[i] == content.substr(i * kBytes, kBytes),
           what + ": its own bytes");
  }
  expect(read[kReads].result == 100, what + ": a read at the end is cut short");
  expect(read[kReads + 1].result == 0, what + ": one behind it gives nothing");

  DiskRead bad{-1, 0, 10, got[0].data(), 0};
  reader.start(bad);
  expect(reader.wait(DiskReader::Clock::now() + 10s) == &bad && bad.result == -EBADF,
         what + ": an error is told");
}

// A pipe into which nobody writes is a disk that hangs.
void hangs(std::unique_ptr<DiskReader> reader, const std::string& what) {
  int ends[2];
  expect(::pipe(ends) == 0, "a pipe");
  char to[16];
  DiskRead read{ends[0], 0, sizeof to, to, 0};
  reader->start(read);
  const auto start = DiskReader::Clock::now();
  expect(reader->wait(start + 50ms) == nullptr, what + ": a read that hangs is given up");
  const auto took = DiskReader::Clock::now() - start;
  expect(took >= 50ms && took < 5s, what + ": after the time it may take");
  reader.reset();  // must not wait for it either
  ::close(ends[1]);
  ::close(ends[0]);
}

void threads() {
  ReadThreads some(3);
  std::atomic<int> ran{0};
  std::vector<std::function<void()>> jobs(50, [&] { ++ran; });
  expect(some.run(jobs, 10s) == -1 && ran == 50, "every job ran");
  expect(some.run({}, 10s) == -1, "no jobs are done at once");
  jobs[7] = [] { throw FuelError("seven"); };
  jobs[30] = [] { throw FuelError("thirty"); };
  throws<FuelError>("jobs that throw", [&] { some.run(jobs, 10s); }, {"seven"});
  expect(ran == 50 + 48, "the others ran to their end");
  expect(some.run(jobs = {[&] { ++ran; }}, 10s) == -1 && !some.hung(), "they can be used again");
}

// The job outlives the threads' owner and everything but what it holds itself.
void threads_that_hang() {
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool open = false, passed = false;
  };
  const auto gate = std::make_shared<Gate>();
  {
    ReadThreads some(2);
    std::vector<std::function<void()>> jobs(4, [] {});
    jobs[2] = [gate] {
      std::unique_lock lock(gate->mutex);
      gate->changed.wait(lock, [&] { return gate->open; });
      gate->passed = true;
      gate->changed.notify_all();
    };
    expect(some.run(jobs, 50ms) == 2 && some.hung(), "the job that hangs is named");
  }
  std::unique_lock lock(gate->mutex);
  gate->open = true;
  gate->changed.notify_all();
  expect(gate->changed.wait_for(lock, 10s, [&] { return gate->passed; }), "its thread was left alone");
}

void limits() {
  const char* const name = "ROCKET_EXPERT_READ_SECONDS";
  ::unsetenv(name);
  expect(expert_read_limit() == 30s, "30 s by default");
  ::setenv(name, "0.25", 1);
  expect(expert_read_limit() == 250ms, "as asked for");
  for (const char* bad : {"0", "-1", "nan", "inf", "1x", "x", "1e10"}) {
    ::setenv(name, bad, 1);
    throws<InputError>(bad, [] { expert_read_limit(); }, {name, "above 0", bad});
  }
  ::unsetenv(name);
}

// Pages behind the end of a file that was cut short are zeros, and that is known.
void pages_that_go_away() {
  const fuel_files::TempDir dir;
  const int64_t page = ::sysconf(_SC_PAGESIZE);
  fuel_files::write_file(dir / "a", std::string(static_cast<size_t>(8 * page), 'a'));
  fuel_files::write_file(dir / "b", std::string(static_cast<size_t>(8 * page), 'b'));
  for (int pass = 0; pass < 3; ++pass) {  // mappings come and go
    fuel_files::write_file(dir / "a", std::string(static_cast<size_t>(8 * page), 'a'));
    const Opened a(dir / "a"), b(dir / "b");
    MappedFile one, other;
    expect(one.map(a.fd, static_cast<size_t>(8 * page)), "mapped");
    expect(other.map(b.fd, static_cast<size_t>(8 * page)), "mapped");
    const volatile uint8_t* const at = one.data();
    expect(at[5 * page] == 'a' && !one.lost(), "whole, as long as the file is");
    expect(::truncate((dir / "a").c_str(), 2 * page) == 0, "cut short");
    expect(at[page] == 'a' && !one.lost(), "the pages that are left can be read");
    expect(at[3 * page + 17] == 0 && one.lost(), "the others are zeros, and it is known");
    expect(at[7 * page] == 0 && at[2 * page] == 0 && at[page] == 'a', "all of them");
    expect(other.data()[7 * page] == 'b' && !other.lost(), "another mapping is as it was");
  }
}

}  // namespace

int main() {
  for (const int depth : {1, 5, 32}) {
    reads(*make_thread_reader(depth), "preads");
    std::string why;
    if (const auto reader = make_uring_reader(depth, &why)) {
      reads(*reader, "io_uring");
      expect(std::string(reader->name()) == "io_uring", "its name");
    } else {
      std::printf("SKIP  io_uring: %s\n", why.c_str());
      expect(!why.empty(), "why io_uring cannot be had is said");
    }
  }
  std::string why;
  if (auto reader = make_uring_reader(4, &why)) hangs(std::move(reader), "io_uring");
  ::setenv("ROCKET_IO_URING", "0", 1);
  expect(std::string(make_disk_reader(4, &why)->name()) == "preads" && !why.empty(),
         "preads where io_uring is not");
  threads();
  threads_that_hang();
  limits();
  pages_that_go_away();
  return check::finish("test_disk_reads");
}
