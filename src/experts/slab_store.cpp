#include "experts/slab_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace rocket {
namespace {

constexpr char kWriteAgain[] = "remove it and write it again: rocket fuel slab FUEL DIR";
constexpr char kAlone[] = "leave a slab alone while it is in use; start again once it is whole";

int64_t changed_ns(const struct stat& status) {
  return int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
}

int64_t aligned(int64_t bytes) {
  return (bytes + kSlabAlignment - 1) / kSlabAlignment * kSlabAlignment;
}

struct Free {
  void operator()(char* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<char, Free>;

Buffer make_buffer() {
  return Buffer(static_cast<char*>(
      std::aligned_alloc(static_cast<size_t>(kSlabAlignment), static_cast<size_t>(SlabStore::kReadBytes))));
}

bool can_read_direct(int fd) {
  const Buffer buffer = make_buffer();
  return buffer && ::pread(fd, buffer.get(), static_cast<size_t>(kSlabAlignment), 0) == kSlabAlignment;
}

// A part of an expert on its way.
struct Part {
  DiskRead read;
  size_t expert = 0;                    // of the call
  int64_t at = 0, bytes = 0, done = 0;  // in its slot
  bool retried = false, busy = false, bounced = false;
  Buffer bounce;  // where the slot itself cannot be read into past the page cache
};

}  // namespace

// The experts of one call on their way. Parts and their buffers serve call after call.
class SlabStore::Flight {
 public:
  Flight(const SlabStore& store, DiskReader& reader) : store_(store), reader_(reader), part_(kDepth) {}

  // Returns when all are there. Throws FuelError, or DeviceError for one that takes too long.
  void bring(int32_t layer, std::span<const ExpertRead> reads);

 private:
  const SlabExpert& of(const Part& part) const {
    return store_.header_.at(layer_, reads_[part.expert].expert);
  }
  char* slot(const Part& part) const { return static_cast<char*>(reads_[part.expert].slot); }
  std::string where(const Part& part) const { return store_.where(layer_, reads_[part.expert].expert); }
  void start_more();
  void start(Part& part);
  bool arrived(Part& part);
  void failed_read(Part& part);
  void check(size_t expert, int64_t at, int64_t bytes);
  void fail(const Part& part, const std::string& what, const std::string& hint);

  const SlabStore& store_;
  DiskReader& reader_;
  std::vector<Part> part_;

  // Of the call in hand.
  int32_t layer_ = 0;
  std::span<const ExpertRead> reads_;
  std::vector<int64_t> left_;  // bytes of each expert
  std::vector<SlabChecksum> sum_;
  size_t expert_ = 0;  // what to start next
  int64_t at_ = 0;
  int busy_ = 0;
  std::string failed_, hint_;
};

void SlabStore::Flight::bring(int32_t layer, std::span<const ExpertRead> reads) {
  layer_ = layer, reads_ = reads, expert_ = 0, at_ = 0;
  failed_.clear();
  left_.clear();
  sum_.clear();
  for (const ExpertRead& read : reads) {
    left_.push_back(store_.header_.at(layer, read.expert).bytes);
    sum_.emplace_back(left_.back());
  }
  start_more();
  while (busy_ > 0) {
    DiskRead* const read = reader_.wait(DiskReader::Clock::now() + store_.limit_);
    if (read == nullptr) {
      const auto late = std::find_if(part_.begin(), part_.end(), [](const Part& part) { return part.busy; });
      throw_hung(took_too_long(where(*late), store_.limit_));
    }
    Part& part = *std::find_if(part_.begin(), part_.end(), [&](const Part& p) { return &p.read == read; });
    if (!arrived(part)) continue;
    part.busy = false;
    --busy_;
    if (!failed_.empty()) continue;  // what is under way comes to its end first: it writes into slots
    const size_t expert = part.expert;
    const int64_t at = part.at, bytes = part.bytes;
    start_more();  // perhaps with this part
    check(expert, at, bytes);
  }
  if (!failed_.empty()) throw FuelError(failed_, hint_);
}

void SlabStore::Flight::start_more() {
  for (Part& part : part_) {
    if (expert_ == reads_.size() || busy_ >= reader_.depth()) return;
    if (part.busy) continue;
    part.expert = expert_;
    part.at = at_;
    part.bytes = std::min(kReadBytes, of(part).bytes - at_);
    part.done = 0;
    part.retried = false;
    at_ += part.bytes;
    if (at_ == of(part).bytes) ++expert_, at_ = 0;
    start(part);
    part.busy = true;
    ++busy_;
  }
}

// What is left of a part. Past the page cache only whole blocks can be read, and only to aligned addresses.
void SlabStore::Flight::start(Part& part) {
  const int64_t at = part.at + part.done, rest = part.bytes - part.done;
  const int64_t bytes = store_.direct_ ? aligned(rest) : rest;
  char* const to = slot(part) + at;
  part.bounced = bytes > rest && at + bytes > of(part).bytes;
  part.bounced |= store_.direct_ && reinterpret_cast<uintptr_t>(to) % kSlabAlignment != 0;
  if (part.bounced && !part.bounce) part.bounce = make_buffer();
  part.read = {store_.fd_, of(part).at + at, bytes, part.bounced ? part.bounce.get() : to, 0};
  reader_.start(part.read);
}

// Takes what a read gave. False: the rest is under way.
bool SlabStore::Flight::arrived(Part& part) {
  if (part.read.result < 0) {
    const bool again = failed_.empty() && !std::exchange(part.retried, true);
    again ? start(part) : failed_read(part);
    return !again;
  }
  const int64_t rest = part.bytes - part.done;
  int64_t useful = std::min(part.read.result, rest);
  if (store_.direct_ && useful < rest) useful -= useful % kSlabAlignment;
  if (part.bounced) {
    std::memcpy(slot(part) + part.at + part.done, part.bounce.get(), static_cast<size_t>(useful));
  }
  part.done += useful;
  if (part.done == part.bytes || !failed_.empty()) return true;
  if (useful > 0) {
    start(part);
    return false;
  }
  fail(part,
       "truncated while in use: expected " + std::to_string(store_.header_.file_bytes) +
           " bytes, found an end at " + std::to_string(part.read.offset + part.read.result),
       kAlone);
  return true;
}

void SlabStore::Flight::failed_read(Part& part) {
  fail(part,
       "cannot read at byte " + std::to_string(part.read.offset) +
           ", tried twice: " + std::strerror(static_cast<int>(-part.read.result)),
       "look after the disk, or write the slab to another");
}

// A part that is there, while others are under way; and its expert, once all of its parts are.
void SlabStore::Flight::check(size_t expert, int64_t at, int64_t bytes) {
  const SlabExpert& wanted = store_.header_.at(layer_, reads_[expert].expert);
  sum_[expert].add(static_cast<const char*>(reads_[expert].slot) + at, at, bytes);
  left_[expert] -= bytes;
  if (left_[expert] > 0 || sum_[expert].value() == wanted.checksum || !failed_.empty()) return;
  failed_ = store_.where(layer_, reads_[expert].expert) +
            ": its bytes do not agree with their checksum: the slab is damaged, or was written to";
  hint_ = kWriteAgain;
}

void SlabStore::Flight::fail(const Part& part, const std::string& what, const std::string& hint) {
  if (!failed_.empty()) return;
  failed_ = where(part) + ": " + what;
  hint_ = hint;
}

SlabStore::SlabStore(const std::string& dir, const SlabHeader& expected, std::unique_ptr<DiskReader> reader)
    : path_(slab_path(dir)),
      header_(read_slab_header(path_, expected)),
      limit_(expert_read_limit()),
      reader_(std::move(reader)) {
  open();
  std::string why;
  if (!reader_) reader_ = make_disk_reader(kDepth, &why);
  flight_ = std::make_unique<Flight>(*this, *reader_);
  name_ = std::string("slab, ") + reader_->name() + ", " + (direct_ ? "O_DIRECT" : "buffered");
  note_ = "expert store: " + path_ + ", " + reader_->name() + (why.empty() ? "" : " (" + why + ")") +
          (direct_ ? ", O_DIRECT" : ", through the page cache (the file system refuses O_DIRECT)");
}

SlabStore::~SlabStore() {
  if (!hung_.empty()) keep_forever(std::move(flight_));
  reader_.reset();
  if (fd_ >= 0) ::close(fd_);
}

void SlabStore::open() {
#ifdef O_DIRECT
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  direct_ = fd_ >= 0 && can_read_direct(fd_);
  if (fd_ >= 0 && !direct_) ::close(std::exchange(fd_, -1));
#endif
  if (fd_ < 0) fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat status;
  if (fd_ < 0 || ::fstat(fd_, &status) != 0)
    throw FuelError(path_ + ": cannot open: " + std::strerror(errno));
  changed_ns_ = changed_ns(status);
}

bool SlabStore::hung() const {
  const std::lock_guard lock(mutex_);
  return !hung_.empty();
}

void SlabStore::fetch(int32_t layer, int32_t expert, int32_t, const SlotLayout& layout, void* slot) const {
  const ExpertRead read{expert, &layout, slot};
  fetch_all(layer, {&read, 1});
}

void SlabStore::fetch_all(int32_t layer, std::span<const ExpertRead> reads) const {
  if (reads.empty()) return;
  const std::lock_guard lock(mutex_);
  if (!hung_.empty()) throw_hung(hung_);
  try {
    flight_->bring(layer, reads);
  } catch (const DeviceError& error) {  // parts are still under way, and nobody waits for them
    hung_ = error.what();
    throw;
  }
  check_unchanged(where(layer, reads[0].expert));
}

std::string SlabStore::where(int32_t layer, int32_t expert) const {
  return expert_name(expert, header_.layers[static_cast<size_t>(layer)]) + ": " + path_;
}

void SlabStore::check_unchanged(const std::string& where) const {
  struct stat status;
  if (::fstat(fd_, &status) != 0)
    throw FuelError(where + ": cannot look at it again: " + std::strerror(errno));
  if (status.st_size != header_.file_bytes) {
    throw FuelError(where + ": changed while in use: expected " + std::to_string(header_.file_bytes) +
                        " bytes, found " + std::to_string(status.st_size),
                    kAlone);
  }
  if (changed_ns(status) != changed_ns_) {
    throw FuelError(where + ": changed while in use: its bytes were written after it was opened", kAlone);
  }
}

}  // namespace rocket
