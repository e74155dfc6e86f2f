// io_uring through its system calls: two rings shared with the kernel, one of what to read and one of what was read.
#include <unistd.h>

#include "experts/disk_reader.h"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

#ifdef IORING_ENTER_EXT_ARG
#include <sys/mman.h>
#include <sys/syscall.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/error.h"

namespace rocket {
namespace {

constexpr int kSetup = 425, kEnter = 426, kRegister = 427;  // the same on every architecture

class Mapping {
 public:
  Mapping() = default;
  ~Mapping() {
    if (base_ != nullptr) ::munmap(base_, bytes_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  bool map(int fd, size_t bytes, off_t offset) {
    void* const p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
    if (p == MAP_FAILED) return false;
    base_ = static_cast<char*>(p);
    bytes_ = bytes;
    return true;
  }
  template <typename T>
  T* at(uint32_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }

 private:
  char* base_ = nullptr;
  size_t bytes_ = 0;
};

class UringReader final : public DiskReader {
 public:
  ~UringReader() override {
    if (fd_ >= 0) ::close(fd_);  // calls back what is under way, as far as that can be
  }
  UringReader() = default;
  UringReader(const UringReader&) = delete;
  UringReader& operator=(const UringReader&) = delete;

  // What is missing; null: nothing.
  const char* open(int depth) {
    io_uring_params params{};
    fd_ = static_cast<int>(::syscall(kSetup, static_cast<unsigned>(depth), &params));
    if (fd_ < 0) return std::strerror(errno);
    constexpr uint32_t kNeeded = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_EXT_ARG | IORING_FEAT_NODROP;
    if ((params.features & kNeeded) != kNeeded) return "the kernel's is too old";
    if (!can_read()) return "the kernel's cannot read";
    const size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
    const size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    if (!rings_.map(fd_, std::max(sq_bytes, cq_bytes), IORING_OFF_SQ_RING) ||
        !entries_.map(fd_, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES)) {
      return std::strerror(errno);
    }
    sq_tail_ = rings_.at<uint32_t>(params.sq_off.tail);
    sq_mask_ = *rings_.at<uint32_t>(params.sq_off.ring_mask);
    sq_array_ = rings_.at<uint32_t>(params.sq_off.array);
    cq_head_ = rings_.at<uint32_t>(params.cq_off.head);
    cq_tail_ = rings_.at<uint32_t>(params.cq_off.tail);
    cq_mask_ = *rings_.at<uint32_t>(params.cq_off.ring_mask);
    cqes_ = rings_.at<io_uring_cqe>(params.cq_off.cqes);
    depth_ = depth;
    return nullptr;
  }

  const char* name() const override { return "io_uring"; }
  int depth() const override { return depth_; }

  void start(DiskRead& read) override {
    const uint32_t tail = *sq_tail_, index = tail & sq_mask_;  // only this side moves the tail
    io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[index];
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = IORING_OP_READ;
    entry.fd = read.fd;
    entry.off = static_cast<uint64_t>(read.offset);
    entry.addr = reinterpret_cast<uint64_t>(read.to);
    entry.len = static_cast<uint32_t>(read.bytes);
    entry.user_data = reinterpret_cast<uint64_t>(&read);
    sq_array_[index] = index;
    std::atomic_ref(*sq_tail_).store(tail + 1, std::memory_order_release);
    ++unsent_;
    enter(0, nullptr);
  }

  DiskRead* wait(Clock::time_point until) override {
    while (true) {
      if (DiskRead* const read = take()) return read;
      const auto left = until - Clock::now();
      if (left <= Clock::duration::zero()) return nullptr;
      const int64_t ns = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
      __kernel_timespec time{ns / 1'000'000'000, ns % 1'000'000'000};
      enter(1, &time);
    }
  }

 private:
  bool can_read() const {
    alignas(io_uring_probe) char room[sizeof(io_uring_probe) + 64 * sizeof(io_uring_probe_op)] = {};
    auto* const probe = reinterpret_cast<io_uring_probe*>(room);
    if (::syscall(kRegister, fd_, IORING_REGISTER_PROBE, probe, 64) < 0) return false;
    return probe->last_op >= IORING_OP_READ &&
           (probe->ops[IORING_OP_READ].flags & IO_URING_OP_SUPPORTED) != 0;
  }

  DiskRead* take() {
    const uint32_t head = *cq_head_;
    if (head == std::atomic_ref(*cq_tail_).load(std::memory_order_acquire)) return nullptr;
    const io_uring_cqe& entry = cqes_[head & cq_mask_];
    auto* const read = reinterpret_cast<DiskRead*>(entry.user_data);
    read->result = entry.res;
    std::atomic_ref(*cq_head_).store(head + 1, std::memory_order_release);
    return read;
  }

  // Hands over what was not yet, and waits for some to be done, until the time is over or a signal comes.
  void enter(uint32_t wanted, __kernel_timespec* time) {
    io_uring_getevents_arg argument{};
    argument.ts = reinterpret_cast<uint64_t>(time);
    const uint32_t flags = wanted > 0 ? IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG : 0;
    const long sent = ::syscall(kEnter, fd_, unsent_, wanted, flags, wanted > 0 ? &argument : nullptr,
                                wanted > 0 ? sizeof argument : 0);
    if (sent >= 0) {
      unsent_ -= static_cast<uint32_t>(sent);
      return;
    }
    switch (errno) {
      case ETIME:
      case EINTR:
        return;
      case EAGAIN:  // short of memory: what was not handed over is, with the next call
      case EBUSY:
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return;
      default:
        throw DeviceError(std::string("io_uring: cannot read: ") + std::strerror(errno),
                          "ROCKET_IO_URING=0 does without");
    }
  }

  int fd_ = -1, depth_ = 0;
  Mapping rings_, entries_;
  uint32_t *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  uint32_t sq_mask_ = 0, cq_mask_ = 0, unsent_ = 0;
  io_uring_cqe* cqes_ = nullptr;
};

}  // namespace

std::unique_ptr<DiskReader> make_uring_reader(int depth, std::string* why) {
  auto reader = std::make_unique<UringReader>();
  const char* const missing = reader->open(depth);
  if (missing == nullptr) return reader;
  *why = std::string("io_uring is refused: ") + missing;
  return nullptr;
}

}  // namespace rocket

#else

namespace rocket {

std::unique_ptr<DiskReader> make_uring_reader(int, std::string* why) {
  *why = "built without io_uring";
  return nullptr;
}

}  // namespace rocket

#endif
