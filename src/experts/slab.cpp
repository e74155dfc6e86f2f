#include "experts/slab.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace rocket {
namespace {

constexpr char kMagic[] = "RKTSLAB\n";
constexpr uint32_t kVersion = 2;
constexpr int64_t kFrontBytes = 48, kExpertBytes = 32;
constexpr int64_t kMostHeaderBytes = int64_t{1} << 28;
constexpr char kWriteAgain[] = "remove it and write it again: rocket fuel slab FUEL DIR";

int64_t aligned(int64_t bytes) {
  return (bytes + kSlabAlignment - 1) / kSlabAlignment * kSlabAlignment;
}

uint32_t formats_of(const ExpertWeights& e) {
  return static_cast<uint32_t>(e.gate.format) | static_cast<uint32_t>(e.up.format) << 8 |
         static_cast<uint32_t>(e.down.format) << 16;
}

class Packer {
 public:
  template <typename T>
  void put(T value) {
    for (size_t i = 0; i < sizeof(T); ++i)
      bytes.push_back(static_cast<uint8_t>(static_cast<uint64_t>(value) >> (8 * i)));
  }
  std::vector<uint8_t> bytes;
};

class Unpacker {
 public:
  explicit Unpacker(const uint8_t* from) : at_(from) {}
  template <typename T>
  T get() {
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(T); ++i) value |= uint64_t{*at_++} << (8 * i);
    return static_cast<T>(value);
  }

 private:
  const uint8_t* at_;
};

struct File {
  explicit File(const std::string& path) : fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {}
  ~File() {
    if (fd >= 0) ::close(fd);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd;
};

std::vector<uint8_t> read_front(const std::string& path, int fd, int64_t bytes) {
  std::vector<uint8_t> front(static_cast<size_t>(bytes));
  int64_t done = 0;
  while (done < bytes) {
    const ssize_t got = ::pread(fd, front.data() + done, static_cast<size_t>(bytes - done), done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw FuelError(path + ": cannot read: " + std::strerror(errno));
    if (got == 0) break;
    done += got;
  }
  front.resize(static_cast<size_t>(done));
  return front;
}

std::string number(int64_t value) {
  return std::to_string(value);
}

[[noreturn]] void wrong(const std::string& path, const std::string& what) {
  throw FuelError(path + ": " + what, kWriteAgain);
}

[[noreturn]] void other_fuel(const std::string& path, const std::string& what) {
  throw FuelError(path + ": a slab of another fuel: " + what,
                  "give the folder of this fuel's slab; rocket fuel slab FUEL DIR writes one");
}

void check_expected(const std::string& path, const SlabHeader& found, const SlabHeader& expected) {
  if (found.fingerprint != expected.fingerprint) {
    other_fuel(path, "config.json, or names, types or shapes of tensors are not those of this fuel");
  }
  if (found.sample != expected.sample) other_fuel(path, "the same shapes, but other weights");
  if (found.layers != expected.layers || found.experts != expected.experts) {
    other_fuel(path, "expected " + number(static_cast<int64_t>(expected.layers.size())) + " MoE layers of " +
                         number(expected.experts) + " experts");
  }
  for (size_t i = 0; i < expected.slot.size(); ++i) {
    const SlabExpert &f = found.slot[i], &e = expected.slot[i];
    if (f.at == e.at && f.bytes == e.bytes && f.formats == e.formats) continue;
    const size_t experts = static_cast<size_t>(expected.experts);
    wrong(path, "expert " + number(static_cast<int64_t>(i % experts)) + " of layer " +
                    number(expected.layers[i / experts]) + ": expected " + number(e.bytes) +
                    " bytes of other formats or at another place, found " + number(f.bytes));
  }
}

// Of a header whose front and checksum are sound.
SlabHeader unpack(const std::string& path, const std::vector<uint8_t>& bytes, int64_t layers,
                  int64_t experts) {
  Unpacker in(bytes.data() + 24);
  SlabHeader header;
  header.experts = static_cast<int32_t>(experts);
  header.file_bytes = in.get<int64_t>();
  header.fingerprint = in.get<uint64_t>();
  header.sample = in.get<uint64_t>();
  for (int64_t i = 0; i < layers; ++i) header.layers.push_back(in.get<int32_t>());
  for (int64_t i = 0; i < layers * experts; ++i) {
    SlabExpert e;
    e.at = in.get<int64_t>();
    e.bytes = in.get<int64_t>();
    e.checksum = in.get<uint64_t>();
    e.formats = in.get<uint32_t>();
    if (in.get<uint32_t>() != 0) wrong(path, "header: expected 0 after the formats of an expert");
    header.slot.push_back(e);
  }
  return header;
}

// A header's bytes, less those behind its checksum.
int64_t header_content(int64_t layers, int64_t experts) {
  return kFrontBytes + 4 * layers + kExpertBytes * layers * experts + 8;
}

}  // namespace

// A word counts in `sums` as often as there are steps from its own to the end.
void SlabChecksum::add(const void* part, int64_t at, int64_t bytes) {
  std::array<uint64_t, kLanes> sum{}, sums{}, word{};
  const char* from = static_cast<const char*>(part);
  const auto step = [&] {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      sum[lane] += word[lane];
      sums[lane] += sum[lane];
    }
  };
  const int64_t whole = bytes / kStep, rest = bytes % kStep;
  for (int64_t i = 0; i < whole; ++i, from += kStep) {
    std::memcpy(word.data(), from, kStep);
    step();
  }
  if (rest > 0) {
    word = {};
    std::memcpy(word.data(), from, static_cast<size_t>(rest));
    step();
  }
  const uint64_t after = static_cast<uint64_t>((bytes_ - at - bytes + kStep - 1) / kStep);
  for (size_t lane = 0; lane < kLanes; ++lane) {
    sum_[lane] += sum[lane];
    sums_[lane] += sums[lane] + after * sum[lane];
  }
}

uint64_t SlabChecksum::value() const {
  uint64_t folded = static_cast<uint64_t>(bytes_) * 0x9e3779b97f4a7c15u;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    for (const uint64_t value : {sum_[lane], sums_[lane]}) {
      folded = (folded ^ value) * 0xff51afd7ed558ccdu;
      folded ^= folded >> 32;
    }
  }
  return folded;
}

uint64_t slab_checksum(const void* data, int64_t bytes) {
  SlabChecksum sum(bytes);
  sum.add(data, 0, bytes);
  return sum.value();
}

int64_t SlabHeader::header_bytes() const {
  return aligned(header_content(static_cast<int64_t>(layers.size()), experts));
}

SlabHeader plan_slab(uint64_t fingerprint, uint64_t sample, std::vector<int32_t> layers,
                     std::span<const std::span<const ExpertWeights>> tables) {
  SlabHeader header;
  header.fingerprint = fingerprint;
  header.sample = sample;
  header.layers = std::move(layers);
  header.experts = tables.empty() ? 0 : static_cast<int32_t>(tables[0].size());
  int64_t at = header.header_bytes();
  for (const std::span<const ExpertWeights> table : tables) {
    for (const ExpertWeights& expert : table) {
      const int64_t bytes = slot_layout(expert).bytes;
      header.slot.push_back({at, bytes, 0, formats_of(expert)});
      at += aligned(bytes);
    }
  }
  header.file_bytes = at;
  return header;
}

std::string slab_path(const std::string& dir) {
  return dir + (!dir.empty() && dir.back() == '/' ? "" : "/") + "experts.slab";
}

std::vector<uint8_t> pack_slab_header(const SlabHeader& header) {
  Packer out;
  for (int i = 0; i < 8; ++i) out.put(static_cast<uint8_t>(kMagic[i]));
  out.put(kVersion);
  out.put(static_cast<uint32_t>(header.layers.size()));
  out.put(header.experts);
  out.put(static_cast<uint32_t>(header.header_bytes()));
  out.put(header.file_bytes);
  out.put(header.fingerprint);
  out.put(header.sample);
  for (const int32_t layer : header.layers) out.put(layer);
  for (const SlabExpert& e : header.slot) {
    out.put(e.at);
    out.put(e.bytes);
    out.put(e.checksum);
    out.put(e.formats);
    out.put(uint32_t{0});
  }
  out.put(slab_checksum(out.bytes.data(), static_cast<int64_t>(out.bytes.size())));
  out.bytes.resize(static_cast<size_t>(header.header_bytes()));
  return std::move(out.bytes);
}

SlabHeader read_slab_header(const std::string& path, const SlabHeader& expected) {
  const File file(path);
  struct stat status;
  if (file.fd < 0 || ::fstat(file.fd, &status) != 0) {
    throw FuelError(path + ": cannot open: " + std::strerror(errno),
                    "give a folder that has a slab; rocket fuel slab FUEL DIR writes one");
  }
  if (!S_ISREG(status.st_mode)) wrong(path, "expected a regular file");
  const std::vector<uint8_t> front = read_front(path, file.fd, kFrontBytes);
  if (front.size() < 8 || std::memcmp(front.data(), kMagic, 8) != 0) wrong(path, "not a slab of experts");
  if (front.size() < kFrontBytes) {
    wrong(path, "truncated: expected a header of at least " + number(kFrontBytes) + " bytes, found " +
                    number(static_cast<int64_t>(front.size())));
  }
  Unpacker in(front.data() + 8);
  const uint32_t version = in.get<uint32_t>();
  if (version != kVersion) {
    wrong(path, "expected a slab of version " + number(kVersion) + ", found version " + number(version));
  }
  const int64_t layers = in.get<uint32_t>(), experts = in.get<uint32_t>(), bytes = in.get<uint32_t>();
  const bool counts = layers < kMostHeaderBytes / kExpertBytes && experts < kMostHeaderBytes / kExpertBytes &&
                      layers * experts < kMostHeaderBytes / kExpertBytes;
  const int64_t content = counts ? header_content(layers, experts) : 0;
  if (!counts || bytes != aligned(content)) {
    wrong(path, "header: " + number(layers) + " MoE layers of " + number(experts) +
                    " experts do not go with " + number(bytes) + " bytes of header");
  }
  const std::vector<uint8_t> all = read_front(path, file.fd, content);
  if (static_cast<int64_t>(all.size()) < content) {
    wrong(path, "truncated: expected " + number(bytes) + " bytes of header, found " +
                    number(static_cast<int64_t>(all.size())));
  }
  if (Unpacker(all.data() + content - 8).get<uint64_t>() != slab_checksum(all.data(), content - 8)) {
    wrong(path, "header: its checksum does not agree with it: the file is damaged");
  }
  SlabHeader header = unpack(path, all, layers, experts);
  check_expected(path, header, expected);
  if (header.file_bytes != expected.file_bytes || status.st_size != header.file_bytes) {
    wrong(path, std::string(status.st_size < header.file_bytes ? "truncated" : "damaged") + ": expected " +
                    number(expected.file_bytes) + " bytes, found " + number(status.st_size));
  }
  return header;
}

}  // namespace rocket
