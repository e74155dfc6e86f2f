#include "experts/slab_writer.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "base/arena.h"
#include "base/error.h"
#include "experts/slab_store.h"

namespace rocket {
namespace {

constexpr size_t kAtOnce = 4;  // experts in memory

int64_t aligned(int64_t bytes) {
  return (bytes + kSlabAlignment - 1) / kSlabAlignment * kSlabAlignment;
}

int64_t largest_slot(const SlabHeader& header) {
  int64_t bytes = 0;
  for (const SlabExpert& expert : header.slot) bytes = std::max(bytes, aligned(expert.bytes));
  return bytes;
}

// The file under its temporary name; gone again unless it is committed.
class Draft {
 public:
  Draft(const std::string& dir, int64_t bytes) : target_(slab_path(dir)), path_(target_ + ".part") {
    std::error_code error;
    std::filesystem::create_directories(dir, error);
    if (error) {
      throw DeviceError(dir + ": cannot make the folder: " + error.message(),
                        "give a folder that is yours, or can be made");
    }
    fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd_ < 0) fail("cannot write");
    if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      ::close(fd_);
      throw DeviceError(path_ + ": another process is writing this slab",
                        "wait for it, or give another folder");
    }
    try {
      if (::ftruncate(fd_, 0) != 0) fail("cannot empty");
      // Room for all of it before any of it is written, where the file system can.
      const int error = ::posix_fallocate(fd_, 0, bytes);
      if (error != 0 && error != EOPNOTSUPP && error != EINVAL) {
        errno = error;
        fail("cannot take " + std::to_string(bytes) + " bytes");
      }
    } catch (...) {
      remove();
      throw;
    }
  }
  ~Draft() { remove(); }
  Draft(const Draft&) = delete;
  Draft& operator=(const Draft&) = delete;

  void write(const void* from, int64_t bytes, int64_t at) {
    for (int64_t done = 0; done < bytes;) {
      const ssize_t put = ::pwrite(fd_, static_cast<const char*>(from) + done,
                                   static_cast<size_t>(bytes - done), static_cast<off_t>(at + done));
      if (put < 0 && errno == EINTR) continue;
      if (put <= 0) fail("cannot write at byte " + std::to_string(at + done));
      done += put;
    }
  }

  // On the disk, and out of the page cache, which others need.
  void settle() {
    if (::fdatasync(fd_) != 0) fail("cannot write to the disk");
    ::posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED);
  }

  std::string commit() {
    if (::fsync(fd_) != 0) fail("cannot write to the disk");
    if (::rename(path_.c_str(), target_.c_str()) != 0) fail("cannot rename to " + target_);
    ::close(std::exchange(fd_, -1));
    return target_;
  }

 private:
  void remove() {
    if (fd_ < 0) return;
    ::unlink(path_.c_str());
    ::close(std::exchange(fd_, -1));
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw DeviceError(path_ + ": " + what + ": " + std::strerror(errno),
                      "make room, or give a folder on another disk that is yours");
  }

  std::string target_, path_;
  int fd_ = -1;
};

struct Slots {
  Slots(const SlabHeader& header, std::span<const std::span<const ExpertWeights>> tables)
      : bytes(largest_slot(header)), memory(static_cast<size_t>(bytes) * kAtOnce, "slab slots") {
    base = static_cast<char*>(memory.take_bytes(static_cast<size_t>(bytes) * kAtOnce));
    for (const std::span<const ExpertWeights> table : tables) {
      std::vector<SlotLayout>& of = layouts.emplace_back();
      for (const ExpertWeights& expert : table) of.push_back(slot_layout(expert));
    }
  }

  // Calls see(expert, slot) for each of a few experts of a layer, from `first` on, once their bytes are there.
  template <typename See>
  void bring(const ExpertStore& from, int32_t layer, size_t first, See see) {
    const std::vector<SlotLayout>& of = layouts[static_cast<size_t>(layer)];
    const size_t end = std::min(of.size(), first + kAtOnce);
    std::memset(base, 0, static_cast<size_t>(bytes) * kAtOnce);  // what lies between parts
    std::vector<ExpertRead> reads;
    for (size_t e = first; e < end; ++e)
      reads.push_back({static_cast<int32_t>(e), &of[e], base + static_cast<int64_t>(e - first) * bytes});
    from.fetch_all(layer, reads);
    for (const ExpertRead& read : reads) see(read.expert, static_cast<const char*>(read.slot));
  }

  const char* slot(size_t i) const { return base + static_cast<int64_t>(i) * bytes; }

  int64_t bytes;
  Arena memory;
  char* base = nullptr;
  std::vector<std::vector<SlotLayout>> layouts;
};

// Throws FuelError if the slab's bytes of an expert are not the fuel's.
void compare(const std::string& path, const std::string& expert, const char* found, const char* wanted,
             int64_t bytes) {
  if (std::memcmp(found, wanted, static_cast<size_t>(bytes)) == 0) return;
  const int64_t at = std::mismatch(found, found + bytes, wanted).first - found;
  throw FuelError(expert + ": " + path + ": its bytes are not those of the fuel: they differ at byte " +
                      std::to_string(at) + " of " + std::to_string(bytes),
                  "remove the slab and write it again: rocket fuel slab FUEL DIR");
}

}  // namespace

std::string write_slab(const std::string& dir, SlabHeader header, const ExpertStore& from,
                       std::span<const std::span<const ExpertWeights>> tables, const SlabProgress& progress) {
  Slots slots(header, tables);
  Draft draft(dir, header.file_bytes);
  int64_t done = header.header_bytes();
  for (int32_t layer = 0; layer < static_cast<int32_t>(tables.size()); ++layer) {
    for (size_t first = 0; first < tables[static_cast<size_t>(layer)].size(); first += kAtOnce) {
      slots.bring(from, layer, first, [&](int32_t e, const char* slot) {
        SlabExpert& expert = header.slot[static_cast<size_t>(&header.at(layer, e) - header.slot.data())];
        expert.checksum = slab_checksum(slot, expert.bytes);
        draft.write(slot, aligned(expert.bytes), expert.at);
        done += aligned(expert.bytes);
      });
      if (progress) progress(done, header.file_bytes);
    }
    draft.settle();
  }
  const std::vector<uint8_t> front = pack_slab_header(header);
  draft.write(front.data(), static_cast<int64_t>(front.size()), 0);
  return draft.commit();
}

void verify_slab(const std::string& dir, const SlabHeader& expected, const ExpertStore& from,
                 std::span<const std::span<const ExpertWeights>> tables, const SlabProgress& progress) {
  const SlabStore store(dir, expected);
  Slots slots(expected, tables), wanted(expected, tables);
  int64_t done = expected.header_bytes();
  for (int32_t layer = 0; layer < static_cast<int32_t>(tables.size()); ++layer) {
    for (size_t first = 0; first < tables[static_cast<size_t>(layer)].size(); first += kAtOnce) {
      wanted.bring(from, layer, first, [](int32_t, const char*) {});
      slots.bring(store, layer, first, [&](int32_t e, const char* slot) {
        const int64_t bytes = expected.at(layer, e).bytes;
        compare(store.path(), expert_name(e, expected.layers[static_cast<size_t>(layer)]), slot,
                wanted.slot(static_cast<size_t>(e) - first), bytes);
        done += aligned(bytes);
      });
      if (progress) progress(done, expected.file_bytes);
    }
  }
}

}  // namespace rocket
