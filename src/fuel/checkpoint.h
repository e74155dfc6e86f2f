// A checkpoint directory: one file, shards with an index, or shards without one.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/json.h"
#include "fuel/safetensors.h"

namespace rocket {

class Checkpoint {
 public:
  // Takes model.safetensors.index.json if present (every shard it names must be there and every tensor must
  // lie where it says), else all *.safetensors of the directory (names such as x-00001-of-00003 must be
  // complete). Throws FuelError: no directory, no shards, a shard missing, truncated, a Git LFS pointer,
  // empty, or with a header that lies; a tensor in two shards.
  explicit Checkpoint(const std::string& dir, bool map = true);

  struct Entry {
    const SafetensorsFile* file;
    const TensorInfo* info;
    const uint8_t* data() const { return file->data(*info); }
  };

  const Entry* find(const std::string& name) const;  // null if absent
  // Throws FuelError with the expected shape if absent, and with expected and found if the shape differs. []
  // and [1] are the same; so are [C, 1, K] and [C, K].
  const Entry& get(const std::string& name, const std::vector<int64_t>& shape) const;
  const std::vector<std::unique_ptr<SafetensorsFile>>& files() const { return files_; }
  const std::string& dir() const { return dir_; }
  size_t size() const { return entries_.size(); }

  // Throws FuelError if one of the files is not what it was when it was opened.
  void check_unchanged() const;

  // Reads small tensors as float32 (F32, BF16, F16 or F64 on disk).
  std::vector<float> read_f32(const Entry& entry) const;

  // Copies a tensor's bytes with pread, so that its pages never count as mapped; throws FuelError on a short
  // read.
  void read_bytes(const Entry& entry, void* out) const;

 private:
  void open_index(const std::string& path, bool map);
  void open_all(bool map);
  void add(const std::string& shard, bool map);

  std::string dir_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::unordered_map<std::string, Entry> entries_;
};

// [] and [1] are the same shape; so are [C, 1, K] and [C, K].
bool same_shape(const std::vector<int64_t>& a, const std::vector<int64_t>& b);

// The whole of a text file of a fuel (config.json, an index). Throws FuelError if it cannot be read, is
// empty, longer than `max_bytes`, or a Git LFS pointer.
std::string read_text_file(const std::string& path, uint64_t max_bytes = 256'000'000);

// read_text_file, parsed. Throws FuelError with line and column of what is wrong, or if it is not an object.
Json read_json_file(const std::string& path);

}  // namespace rocket
