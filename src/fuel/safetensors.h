// One safetensors file, mapped read-only.
//
// File: u64 little-endian header length, a JSON object {name: {dtype, shape, data_offsets: [begin, end]},
// "__metadata__": {string: string}}, then the data. The header is not trusted. Refused with FuelError, which
// names the file: header longer than 100 MB or than the file, JSON that is not an object, duplicate names,
// unknown dtypes, negative or overflowing shapes, a size that is not shape x dtype, offsets with gaps or
// overlaps, a last offset that is not the file's size. A file of zero bytes and a Git LFS pointer are named
// as such.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "base/mapped_file.h"

namespace rocket {

struct TensorInfo {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<int64_t> shape;  // [] is a scalar
  uint64_t offset = 0;         // of the first byte, from the start of the file
  uint64_t bytes = 0;

  int64_t elements() const;
  std::string describe() const;  // "BF16 [24, 16384]"
};

std::string describe_shape(const std::vector<int64_t>& shape);  // "[24, 16384]"

// Parses and checks a header. `data_bytes` is the file's size less 8 less the header's length; `header_bytes`
// is 8 + that length. Tensors are in file order. The entry that is fuzzed.
std::vector<TensorInfo> parse_safetensors_header(std::string_view json, uint64_t header_bytes,
                                                 uint64_t data_bytes, const std::string& file);

class SafetensorsFile {
 public:
  // map = false reads and checks the header only; data() is then not available (hollow and huge fuels).
  explicit SafetensorsFile(const std::string& path, bool map = true);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  uint64_t file_bytes() const { return file_bytes_; }
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const uint8_t* data(const TensorInfo& tensor) const { return map_.data() + tensor.offset; }
  int fd() const { return fd_; }

  // Copies bytes [offset, offset + bytes) of the file with pread, so that its pages never count as mapped.
  // Throws FuelError on a short read.
  void read(uint64_t offset, uint64_t bytes, void* out) const;
  // Asks the system to have these bytes ready; it may or may not.
  void will_read(uint64_t offset, uint64_t bytes) const noexcept;

  // Throws FuelError if the file's length or time of change is not what it was when the file was opened, or if a
  // mapped page of it could not be read.
  void check_unchanged() const;

  bool sparse() const { return sparse_; }  // all hole behind the header: no data was written

 private:
  void open_and_check(bool map);
  void close();

  std::string path_;
  uint64_t file_bytes_ = 0;
  int64_t changed_ns_ = 0;  // when its data last changed, as of opening
  std::vector<TensorInfo> tensors_;
  MappedFile map_;
  int fd_ = -1;
  bool sparse_ = false;
};

}  // namespace rocket
