#include "experts/trace.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace rocket {
namespace {

constexpr uint32_t kVersion = 1;
constexpr size_t kFixed = 32;  // of the header, before the layer numbers
constexpr size_t kRowFixed = 13;
constexpr uint32_t kMaxLayers = 4096, kMaxExperts = 65536, kMaxTopk = 1024, kMaxLayerNumber = 65535;
constexpr size_t kBuffer = 1 << 18;
constexpr char kHint[] = "record the trace again, or give a copy that is whole";

std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? 0xEDB88320u : 0);
    table[i] = value;
  }
  return table;
}

uint32_t crc32(std::span<const uint8_t> data) {
  static const std::array<uint32_t, 256> table = crc_table();
  uint32_t crc = ~0u;
  for (const uint8_t byte : data) crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8);
  return ~crc;
}

void put(uint8_t* to, uint64_t value, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) to[i] = static_cast<uint8_t>(value >> (8 * i));
}
uint64_t get(const uint8_t* from, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes; ++i) value |= uint64_t{from[i]} << (8 * i);
  return value;
}
uint32_t get32(const uint8_t* from) {
  return static_cast<uint32_t>(get(from, 4));
}

std::string range(const char* what, uint64_t most, uint64_t found) {
  return std::string(what) + ": expected from 1 to " + std::to_string(most) + ", found " +
         std::to_string(found);
}

// What is wrong with the counts; empty: nothing.
std::string wrong_counts(uint64_t layers, uint64_t experts, uint64_t topk) {
  if (layers < 1 || layers > kMaxLayers) return range("MoE layers", kMaxLayers, layers);
  if (experts < 1 || experts > kMaxExperts) return range("experts", kMaxExperts, experts);
  const uint64_t most = std::min<uint64_t>(experts, kMaxTopk);
  if (topk < 1 || topk > most) return range("top-k", most, topk);
  return "";
}

std::string wrong_layers(const std::vector<int32_t>& layers) {
  int64_t before = -1;
  for (const int32_t layer : layers) {
    if (layer <= before || layer > static_cast<int32_t>(kMaxLayerNumber)) {
      return "layer numbers: expected them ascending from 0 to " + std::to_string(kMaxLayerNumber) +
             ", found " + std::to_string(layer);
    }
    before = layer;
  }
  return "";
}

DeviceError io_error(const char* what, const std::string& path) {
  return DeviceError(std::string("trace ") + path + ": cannot " + what + ": " + std::strerror(errno),
                     "check the folder, its permissions and the space left");
}

std::vector<uint8_t> header_bytes(const TraceHeader& h) {
  std::vector<uint8_t> bytes(h.header_bytes());
  std::memcpy(bytes.data(), kTraceMagic, 8);
  put(&bytes[8], kVersion, 4);
  put(&bytes[12], h.layers.size(), 4);
  put(&bytes[16], static_cast<uint64_t>(h.experts), 4);
  put(&bytes[20], static_cast<uint64_t>(h.topk), 4);
  put(&bytes[24], h.fingerprint, 8);
  for (size_t i = 0; i < h.layers.size(); ++i)
    put(&bytes[kFixed + 2 * i], static_cast<uint64_t>(h.layers[i]), 2);
  put(&bytes[bytes.size() - 4], crc32({bytes.data(), bytes.size() - 4}), 4);
  return bytes;
}

}  // namespace

TraceWriter::TraceWriter(const std::string& path, TraceHeader header)
    : path_(path), header_(std::move(header)) {
  const auto count = [](int32_t n) { return static_cast<uint64_t>(std::max(n, 0)); };
  std::string wrong = wrong_counts(header_.layers.size(), count(header_.experts), count(header_.topk));
  if (wrong.empty()) wrong = wrong_layers(header_.layers);
  if (!wrong.empty()) throw InputError("trace " + path + ": " + wrong);
  fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd_ < 0) throw io_error("write it", path);
  try {
    write_all(header_bytes(header_));
  } catch (...) {  // nothing is of use without it
    struct stat status;
    if (::fstat(fd_, &status) == 0 && S_ISREG(status.st_mode)) ::unlink(path.c_str());
    ::close(fd_);
    throw;
  }
}

TraceWriter::~TraceWriter() {
  try {
    close();
  } catch (const Error&) {  // whoever needs to know calls close()
  }
}

void TraceWriter::begin_step(std::span<const TraceRow> rows) {
  open_.assign(rows.size() * header_.row_bytes(), 0);
  given_.assign(header_.layers.size(), false);
  for (size_t i = 0; i < rows.size(); ++i) {
    uint8_t* row = open_.data() + i * header_.row_bytes();
    put(row, step_, 4);
    put(row + 4, rows[i].stream, 4);
    put(row + 8, rows[i].position, 4);
    row[12] = rows[i].prefill ? 1 : 0;
  }
}

void TraceWriter::layer(int32_t index, std::span<const int32_t> ids) {
  const size_t k = static_cast<size_t>(header_.topk), rows = open_.size() / header_.row_bytes();
  if (index < 0 || static_cast<size_t>(index) >= given_.size() || given_[static_cast<size_t>(index)] ||
      ids.size() != rows * k) {
    throw InputError("trace " + path_ + ": layer " + std::to_string(index) + " of a step of " +
                     std::to_string(rows) + " rows: expected each layer once, with " +
                     std::to_string(rows * k) + " ids, found " + std::to_string(ids.size()));
  }
  given_[static_cast<size_t>(index)] = true;
  const size_t bytes = header_.id_bytes();
  for (size_t row = 0; row < rows; ++row) {
    sorted_.assign(ids.begin() + static_cast<int64_t>(row * k),
                   ids.begin() + static_cast<int64_t>((row + 1) * k));
    std::sort(sorted_.begin(), sorted_.end());
    const bool distinct = std::adjacent_find(sorted_.begin(), sorted_.end()) == sorted_.end();
    if (!distinct || sorted_.front() < 0 || sorted_.back() >= header_.experts) {
      throw InputError("trace " + path_ + ": layer " + std::to_string(index) +
                       ": expected distinct experts from 0 to " + std::to_string(header_.experts - 1) +
                       ", found " +
                       std::to_string(distinct && sorted_.front() >= 0 ? sorted_.back() : sorted_.front()));
    }
    uint8_t* to =
        open_.data() + row * header_.row_bytes() + kRowFixed + static_cast<size_t>(index) * k * bytes;
    for (size_t i = 0; i < k; ++i) put(to + i * bytes, static_cast<uint64_t>(sorted_[i]), bytes);
  }
}

void TraceWriter::end_step() {
  if (std::find(given_.begin(), given_.end(), false) != given_.end()) {
    throw InputError("trace " + path_ + ": a step ended before all its layers were given");
  }
  const size_t size = header_.row_bytes();
  for (size_t at = 0; at < open_.size(); at += size) {
    put(&open_[at + size - 4], crc32({&open_[at], size - 4}), 4);
    ++rows_;
  }
  if (!open_.empty()) ++step_;
  buffer_.insert(buffer_.end(), open_.begin(), open_.end());
  open_.clear();
  if (buffer_.size() >= kBuffer) flush();
}

void TraceWriter::flush() {
  // Emptied first: after a failure part of it may be in the file, and must not follow a second time.
  std::vector<uint8_t> rows;
  rows.swap(buffer_);
  if (fd_ >= 0) write_all(rows);
}

void TraceWriter::close() {
  if (fd_ < 0) return;
  std::vector<uint8_t> rows;
  rows.swap(buffer_);
  const int fd = fd_;
  try {
    write_all(rows);
  } catch (...) {
    fd_ = -1;
    ::close(fd);
    throw;
  }
  fd_ = -1;
  if (::close(fd) != 0) throw io_error("write it", path_);
}

void TraceWriter::write_all(const std::vector<uint8_t>& data) {
  size_t done = 0;
  while (done < data.size()) {
    const ssize_t n = ::write(fd_, data.data() + done, data.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const DeviceError error = io_error("write it", path_);
      drop_torn_row();
      throw error;
    }
    done += static_cast<size_t>(n);
  }
}

// Of a full disk, say. Where the file cannot be cut, readers leave such a row out.
void TraceWriter::drop_torn_row() const {
  const off_t end = ::lseek(fd_, 0, SEEK_CUR);
  const auto header = static_cast<off_t>(header_.header_bytes()),
             row = static_cast<off_t>(header_.row_bytes());
  if (end <= header || (end - header) % row == 0) return;
  if (::ftruncate(fd_, end - (end - header) % row) != 0) return;
}

TraceReader::TraceReader(const std::string& path) : path_(path) {
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd_ < 0) {
    throw InputError("trace " + path + ": cannot read it: " + std::strerror(errno),
                     "give a file that exists");
  }
  try {
    read_header();
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

TraceReader::~TraceReader() {
  ::close(fd_);
}

void TraceReader::wrong(const std::string& what) const {
  throw InputError("trace " + path_ + ": " + what, kHint);
}

size_t TraceReader::read_at(int64_t offset, std::span<uint8_t> to) {
  size_t done = 0;
  while (done < to.size()) {
    const ssize_t n = ::pread(fd_, to.data() + done, to.size() - done, offset + static_cast<int64_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw io_error("read it", path_);
    if (n == 0) break;
    done += static_cast<size_t>(n);
  }
  return done;
}

void TraceReader::read_header() {
  std::vector<uint8_t> bytes(kFixed);
  const size_t found = read_at(0, bytes);
  if (found < 8 || std::memcmp(bytes.data(), kTraceMagic, 8) != 0) {
    wrong(std::string("expected a routing trace, which begins with ") + kTraceMagic);
  }
  const auto short_of = [&](size_t expected, size_t size) {
    wrong("header: expected " + std::to_string(expected) + " bytes, found " + std::to_string(size));
  };
  if (found < kFixed) short_of(kFixed, found);
  if (get32(&bytes[8]) != kVersion) {
    wrong("version: expected " + std::to_string(kVersion) + ", found " + std::to_string(get32(&bytes[8])));
  }
  const uint32_t layers = get32(&bytes[12]), experts = get32(&bytes[16]), topk = get32(&bytes[20]);
  if (const std::string what = wrong_counts(layers, experts, topk); !what.empty()) wrong(what);
  header_.experts = static_cast<int32_t>(experts);
  header_.topk = static_cast<int32_t>(topk);
  header_.fingerprint = get(&bytes[24], 8);
  header_.layers.resize(layers);
  bytes.resize(header_.header_bytes());
  if (const size_t size = read_at(0, bytes); size < bytes.size()) short_of(bytes.size(), size);
  if (get32(&bytes[bytes.size() - 4]) != crc32({bytes.data(), bytes.size() - 4})) {
    wrong("header: the checksum does not match");
  }
  for (size_t i = 0; i < layers; ++i)
    header_.layers[i] = static_cast<int32_t>(get(&bytes[kFixed + 2 * i], 2));
  if (const std::string what = wrong_layers(header_.layers); !what.empty()) wrong(what);
  offset_ = static_cast<int64_t>(bytes.size());
  buffer_.resize(std::max<size_t>(1, kBuffer / header_.row_bytes()) * header_.row_bytes());
}

// Whole rows only: what is there of another is read again when more of it may have come.
bool TraceReader::refill() {
  const size_t found = read_at(offset_, buffer_);
  torn_ = found % header_.row_bytes();
  at_ = 0;
  end_ = found - torn_;
  offset_ += static_cast<int64_t>(end_);
  return end_ > 0;
}

bool TraceReader::next(TraceRow* row, std::span<int32_t> ids) {
  if (at_ == end_ && !refill()) return false;
  const std::span<const uint8_t> bytes(buffer_.data() + at_, header_.row_bytes());
  const std::string where = "row " + std::to_string(rows_) + " (from 0): ";
  if (get32(&bytes[bytes.size() - 4]) != crc32(bytes.first(bytes.size() - 4))) {
    wrong(where + "the checksum does not match");
  }
  *row = {get32(&bytes[0]), get32(&bytes[4]), get32(&bytes[8]), bytes[12] == 1};
  if (bytes[12] > 1) wrong(where + "flags: expected 0 or 1, found " + std::to_string(bytes[12]));
  if (row->step < step_) {
    wrong(where + "step: expected at least " + std::to_string(step_) + ", found " +
          std::to_string(row->step));
  }
  const size_t id_bytes = header_.id_bytes(), k = static_cast<size_t>(header_.topk);
  for (size_t i = 0; i < header_.ids(); ++i) {
    ids[i] = static_cast<int32_t>(get(&bytes[kRowFixed + i * id_bytes], id_bytes));
    if (ids[i] >= header_.experts || (i % k != 0 && ids[i] <= ids[i - 1])) {
      wrong(where + "layer " + std::to_string(i / k) + ": expected ascending experts from 0 to " +
            std::to_string(header_.experts - 1) + ", found " + std::to_string(ids[i]));
    }
  }
  step_ = row->step;
  at_ += bytes.size();
  ++rows_;
  return true;
}

}  // namespace rocket
