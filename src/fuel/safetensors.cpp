#include "fuel/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "base/json.h"

namespace rocket {

namespace {

constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr char kDownloadAgain[] = "download this file again";
constexpr char kStart[] = "leave a fuel's files alone while it is in use; start again once they are whole";

std::string text(uint64_t value) {
  return std::to_string(value);
}

int64_t changed_ns(const struct stat& status) {
  return int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
}

std::string what(const Json& json) {
  if (json.is_string()) return json_quote(json.string());
  if (const auto whole = json.integer()) return std::to_string(*whole);
  return json.kind_name();
}

// Reads one entry of a header; every message names the file and the tensor.
class EntryReader {
 public:
  EntryReader(const std::string& file, const std::string& name)
      : where_(file + ": tensor " + json_quote(name)) {}

  TensorInfo read(const std::string& name, const Json& entry) const {
    if (!entry.is_object()) fail("expected an object, found " + what(entry));
    TensorInfo info;
    info.name = name;
    info.dtype = dtype(field(entry, "dtype"));
    info.shape = shape(field(entry, "shape"));
    const Json& offsets = field(entry, "data_offsets");
    if (offsets.array().size() != 2) fail("data_offsets: expected [begin, end], found " + what(offsets));
    const uint64_t begin = offset(offsets.array()[0]);
    const uint64_t end = offset(offsets.array()[1]);
    if (end < begin) fail("data_offsets: the end " + text(end) + " lies before the begin " + text(begin));
    info.offset = begin;
    info.bytes = end - begin;
    const uint64_t expected = bytes(info);
    if (info.bytes != expected) {
      fail("expected " + text(expected) + " bytes for " + info.describe() + ", found " + text(info.bytes));
    }
    return info;
  }

  [[noreturn]] void fail(const std::string& message) const { throw FuelError(where_ + ": " + message); }

 private:
  const Json& field(const Json& entry, const char* key) const {
    const Json* value = entry.find(key);
    if (value == nullptr) fail(std::string("expected a field ") + key + ", found none");
    return *value;
  }

  DType dtype(const Json& json) const {
    if (!json.is_string()) fail("dtype: expected a string, found " + what(json));
    const auto parsed = dtype_parse(json.string());
    if (!parsed) fail("unknown dtype " + json_quote(json.string()));
    return *parsed;
  }

  std::vector<int64_t> shape(const Json& json) const {
    if (!json.is_array()) fail("shape: expected an array, found " + what(json));
    std::vector<int64_t> dims;
    dims.reserve(json.array().size());
    for (const Json& dim : json.array()) {
      const auto value = dim.integer();
      if (!value || *value < 0) fail("shape: expected whole numbers of at least 0, found " + what(dim));
      dims.push_back(*value);
    }
    return dims;
  }

  uint64_t offset(const Json& json) const {
    const auto value = json.unsigned_integer();
    if (!value) fail("data_offsets: expected whole numbers of at least 0, found " + what(json));
    return *value;
  }

  uint64_t bytes(const TensorInfo& info) const {
    int64_t total = static_cast<int64_t>(dtype_size(info.dtype));
    for (const int64_t dim : info.shape) {
      if (__builtin_mul_overflow(total, dim, &total)) fail("the size of " + info.describe() + " overflows");
    }
    return static_cast<uint64_t>(total);
  }

  std::string where_;
};

void check_metadata(const Json& metadata, const std::string& file) {
  if (!metadata.is_object()) {
    throw FuelError(file + ": __metadata__: expected an object of strings, found " + what(metadata));
  }
  for (const auto& [key, value] : metadata.object()) {
    if (value.is_string()) continue;
    throw FuelError(file + ": __metadata__: " + json_quote(key) + ": expected a string, found " +
                    what(value));
  }
}

// Tensors sorted by offset (relative to the data) must cover the data without gap or overlap.
void check_offsets(const std::vector<TensorInfo>& tensors, uint64_t header_bytes, uint64_t data_bytes,
                   const std::string& file) {
  const uint64_t file_bytes = header_bytes + data_bytes;
  uint64_t last = 0;
  for (const TensorInfo& tensor : tensors) last = std::max(last, tensor.offset + tensor.bytes);
  if (last > data_bytes) {
    uint64_t expected = 0;
    const bool overflow = __builtin_add_overflow(header_bytes, last, &expected);
    throw FuelError(file + ": truncated: expected " + (overflow ? "more than 2^64" : text(expected)) +
                        " bytes, found " + text(file_bytes),
                    kDownloadAgain);
  }
  uint64_t next = 0;
  for (const TensorInfo& tensor : tensors) {
    if (tensor.offset != next) {
      throw FuelError(file + ": tensor " + json_quote(tensor.name) + ": " +
                      (tensor.offset < next ? "overlaps the tensor before it" : "leaves a gap before it") +
                      ": expected data offset " + text(next) + ", found " + text(tensor.offset));
    }
    next += tensor.bytes;
  }
  if (next != data_bytes) {
    throw FuelError(file + ": expected " + text(header_bytes + next) + " bytes as the header says, found " +
                        text(file_bytes),
                    kDownloadAgain);
  }
}

}  // namespace

int64_t TensorInfo::elements() const {
  int64_t count = 1;
  for (const int64_t dim : shape) count *= dim;
  return count;
}

std::string TensorInfo::describe() const {
  return dtype_name(dtype) + (" " + describe_shape(shape));
}

std::string describe_shape(const std::vector<int64_t>& shape) {
  constexpr size_t kMaxDims = 16;
  std::string out = "[";
  for (size_t i = 0; i < shape.size() && i < kMaxDims; ++i) {
    if (i > 0) out += ", ";
    out += std::to_string(shape[i]);
  }
  if (shape.size() > kMaxDims) out += ", … " + std::to_string(shape.size()) + " dimensions";
  return out + "]";
}

std::vector<TensorInfo> parse_safetensors_header(std::string_view json, uint64_t header_bytes,
                                                 uint64_t data_bytes, const std::string& file) {
  // The format wants the object at the front; only its end may be padded.
  if (json.empty() || json.front() != '{') throw FuelError(file + ": header: expected '{' at its front");
  Json header;
  try {
    header = Json::parse(json);
  } catch (const JsonError& error) {
    throw FuelError(file + ": header: byte " + text(error.offset) + ": " + error.what());
  }
  std::vector<TensorInfo> tensors;
  tensors.reserve(header.object().size());
  for (const auto& [name, entry] : header.object()) {
    if (name == "__metadata__") {
      check_metadata(entry, file);
    } else {
      tensors.push_back(EntryReader(file, name).read(name, entry));
    }
  }
  // A tensor without elements shares its offset with the next one and comes before it.
  std::sort(tensors.begin(), tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    if (a.offset != b.offset) return a.offset < b.offset;
    if (a.bytes != b.bytes) return a.bytes < b.bytes;
    return a.name < b.name;
  });
  check_offsets(tensors, header_bytes, data_bytes, file);
  for (TensorInfo& tensor : tensors) tensor.offset += header_bytes;
  return tensors;
}

SafetensorsFile::SafetensorsFile(const std::string& path, bool map) : path_(path) {
  try {
    open_and_check(map);
  } catch (...) {
    close();
    throw;
  }
}

SafetensorsFile::~SafetensorsFile() {
  close();
}

void SafetensorsFile::close() {
  map_.unmap();
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void SafetensorsFile::open_and_check(bool map) {
  // O_NONBLOCK: opening a pipe would wait for a writer. It changes nothing for a regular file.
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat status;
  if (fd_ < 0 || ::fstat(fd_, &status) != 0)
    throw FuelError(path_ + ": cannot open: " + std::strerror(errno));
  if (!S_ISREG(status.st_mode)) {
    throw FuelError(path_ + ": expected a regular file, found " +
                    (S_ISDIR(status.st_mode) ? "a directory" : "a device or a pipe"));
  }
  file_bytes_ = static_cast<uint64_t>(status.st_size);
  changed_ns_ = changed_ns(status);
  if (file_bytes_ == 0)
    throw FuelError(path_ + ": empty: expected a safetensors file, found 0 bytes", kDownloadAgain);

  uint8_t front[24] = {};
  read(0, std::min<uint64_t>(sizeof front, file_bytes_), front);
  constexpr std::string_view kLfs = "version https://git-lfs";
  if (std::string_view(reinterpret_cast<char*>(front), sizeof front).substr(0, kLfs.size()) == kLfs) {
    throw FuelError(path_ + ": expected a safetensors file, found a Git LFS pointer",
                    "fetch the file itself: git lfs pull");
  }
  if (file_bytes_ < 8) {
    throw FuelError(path_ + ": truncated: expected at least 8 bytes, found " + text(file_bytes_),
                    kDownloadAgain);
  }
  uint64_t header_length = 0;
  for (int i = 7; i >= 0; --i) header_length = header_length << 8 | front[i];
  if (header_length > kMaxHeaderBytes) {
    throw FuelError(path_ + ": not a safetensors file: expected a header of at most " +
                    text(kMaxHeaderBytes) + " bytes, found " + text(header_length));
  }
  const uint64_t header_bytes = 8 + header_length;
  if (header_bytes > file_bytes_) {
    throw FuelError(path_ + ": truncated: expected at least " + text(header_bytes) +
                        " bytes for the header, found " + text(file_bytes_),
                    kDownloadAgain);
  }
  std::string json(header_length, '\0');
  read(8, header_length, json.data());
  tensors_ = parse_safetensors_header(json, header_bytes, file_bytes_ - header_bytes, path_);

  // No data behind the blocks that the header touches. Asked of the file system rather than guessed from the
  // number of blocks, which some network file systems always give as 0.
  constexpr uint64_t kBlock = 64 * 1024;
  const uint64_t behind = (header_bytes + kBlock - 1) / kBlock * kBlock;
  sparse_ = behind < file_bytes_ && ::lseek(fd_, static_cast<off_t>(behind), SEEK_DATA) < 0 && errno == ENXIO;
  if (!map) return;
  if (!map_.map(fd_, file_bytes_)) throw FuelError(path_ + ": cannot map: " + std::strerror(errno));
}

void SafetensorsFile::check_unchanged() const {
  struct stat status;
  if (::fstat(fd_, &status) != 0)
    throw FuelError(path_ + ": cannot look at it again: " + std::strerror(errno));
  if (static_cast<uint64_t>(status.st_size) != file_bytes_) {
    throw FuelError(path_ + ": changed while in use: expected " + text(file_bytes_) + " bytes, found " +
                        text(static_cast<uint64_t>(status.st_size)),
                    kStart);
  }
  if (changed_ns(status) != changed_ns_) {
    throw FuelError(path_ + ": changed while in use: its bytes were written after it was opened", kStart);
  }
  if (map_.lost()) throw FuelError(path_ + ": the disk failed to give some of its bytes", kStart);
}

void SafetensorsFile::read(uint64_t offset, uint64_t bytes, void* out) const {
  uint64_t done = 0;
  bool failed = false;
  while (done < bytes) {
    const size_t ask = static_cast<size_t>(std::min<uint64_t>(bytes - done, uint64_t{1} << 30));
    const ssize_t got =
        ::pread(fd_, static_cast<uint8_t*>(out) + done, ask, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EIO && !std::exchange(failed, true)) continue;
    if (got < 0)
      throw FuelError(path_ + ": cannot read at byte " + text(offset + done) + ": " + std::strerror(errno));
    if (got == 0) {
      throw FuelError(path_ + ": truncated while in use: expected " + text(bytes) + " bytes at byte " +
                          text(offset) + ", found " + text(done),
                      kDownloadAgain);
    }
    done += static_cast<uint64_t>(got);
  }
}

void SafetensorsFile::will_read(uint64_t offset, uint64_t bytes) const noexcept {
#ifdef POSIX_FADV_WILLNEED
  // Linux heeds no more of a call than the disk's largest request, or its usual read-ahead: 128 KiB as a rule.
  constexpr uint64_t kStep = 128 << 10;
  for (uint64_t done = 0; done < bytes; done += kStep) {
    ::posix_fadvise(fd_, static_cast<off_t>(offset + done), static_cast<off_t>(std::min(kStep, bytes - done)),
                    POSIX_FADV_WILLNEED);
  }
#endif
}

}  // namespace rocket
