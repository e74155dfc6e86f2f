#include "fuel/checkpoint.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "base/text_file.h"

namespace rocket {

namespace {

namespace fs = std::filesystem;

constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr char kSuffix[] = ".safetensors";

std::string join(const std::string& dir, const std::string& name) {
  return (fs::path(dir) / name).string();
}

bool exists(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error);
}

// An index is not trusted: a shard lies in the checkpoint's own directory.
void check_shard_name(const std::string& index, const std::string& shard) {
  bool inside = !shard.empty() && shard.front() != '/' && shard.find('\0') == std::string::npos;
  for (const fs::path& part : fs::path(shard)) inside = inside && part != "..";
  if (!inside)
    throw FuelError(index + ": expected the name of a file in this directory, found " + json_quote(shard));
}

// "x-00002-of-00005.safetensors" -> {"x-%-of-00005.safetensors", 2, 5}
struct ShardName {
  std::string series;
  int64_t number = 0, count = 0;
  size_t width = 0;

  std::string sibling(int64_t n) const {
    std::string digits = std::to_string(n);
    if (digits.size() < width) digits.insert(0, width - digits.size(), '0');
    std::string name = series;
    return name.replace(name.find('%'), 1, digits);
  }
};

bool parse_shard_name(const std::string& name, ShardName& out) {
  const auto number_before = [&](size_t end, int64_t& value) {
    size_t begin = end;
    while (begin > 0 && std::isdigit(static_cast<unsigned char>(name[begin - 1]))) --begin;
    if (begin == end || end - begin > 9) return std::string::npos;
    value = std::stoll(name.substr(begin, end - begin));
    return begin;
  };
  constexpr std::string_view kOf = "-of-";
  const size_t count_begin = number_before(name.size() - (sizeof kSuffix - 1), out.count);
  if (count_begin == std::string::npos || count_begin < kOf.size() + 2) return false;
  const size_t of = count_begin - kOf.size();
  if (name.compare(of, kOf.size(), kOf) != 0) return false;
  const size_t begin = number_before(of, out.number);
  if (begin == std::string::npos || begin == 0 || name[begin - 1] != '-') return false;
  if (name.find('%') != std::string::npos) return false;
  out.width = of - begin;
  out.series = name.substr(0, begin) + "%" + name.substr(of);
  return true;
}

void check_series_complete(const std::string& dir, const std::set<std::string>& shards) {
  std::map<std::string, std::vector<ShardName>> series;
  for (const std::string& shard : shards) {
    ShardName name;
    if (parse_shard_name(shard, name)) series[name.series].push_back(name);
  }
  for (const auto& [key, found] : series) {
    const int64_t count = found.front().count;
    // Series that do not count from 1 to `count` follow a rule of their own.
    const bool usual = std::all_of(found.begin(), found.end(), [&](const ShardName& name) {
      return name.number >= 1 && name.number <= count;
    });
    if (!usual || static_cast<int64_t>(found.size()) >= count) continue;
    int64_t missing = 1;
    while (shards.count(found.front().sibling(missing)) != 0) ++missing;
    throw FuelError(join(dir, found.front().sibling(missing)) + ": missing: expected " +
                        std::to_string(count) + " shards, found " + std::to_string(found.size()),
                    "download the missing files");
  }
}

std::vector<int64_t> without_middle_one(const std::vector<int64_t>& shape) {
  if (shape.size() == 1 && shape[0] == 1) return {};
  if (shape.size() == 3 && shape[1] == 1) return {shape[0], shape[2]};
  return shape;
}

}  // namespace

bool same_shape(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  return without_middle_one(a) == without_middle_one(b);
}

std::string read_text_file(const std::string& path, uint64_t max_bytes) {
  std::error_code error;
  const bool regular = fs::is_regular_file(path, error);
  if (error) throw FuelError(path + ": cannot open: " + error.message());
  if (!regular) {
    throw FuelError(path + ": expected a regular file, found " +
                    (fs::is_directory(path, error) ? "a directory" : "a device or a pipe"));
  }
  const uint64_t bytes = fs::file_size(path, error);
  if (error) throw FuelError(path + ": cannot read: " + error.message());
  if (bytes == 0) throw FuelError(path + ": empty: expected JSON, found 0 bytes", "download this file again");
  if (bytes > max_bytes) {
    throw FuelError(path + ": expected at most " + std::to_string(max_bytes) + " bytes, found " +
                    std::to_string(bytes));
  }
  const std::optional<std::string> read = read_file(path, max_bytes);
  if (!read) throw FuelError(path + ": cannot read: " + std::strerror(errno));
  const std::string& text = *read;
  if (text.rfind("version https://git-lfs", 0) == 0) {
    throw FuelError(path + ": expected JSON, found a Git LFS pointer", "fetch the file itself: git lfs pull");
  }
  return text;
}

Json read_json_file(const std::string& path) {
  const std::string text = read_text_file(path);
  try {
    Json json = Json::parse(text);
    if (!json.is_object()) throw FuelError(path + ": expected an object, found " + json.kind_name());
    return json;
  } catch (const JsonError& error) {
    const size_t at = std::min(error.offset, text.size());
    const auto line = std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(at), '\n') + 1;
    const size_t line_begin = at == 0 ? std::string::npos : text.rfind('\n', at - 1);
    const size_t column = line_begin == std::string::npos ? at + 1 : at - line_begin;
    throw FuelError(path + ": line " + std::to_string(line) + ", column " + std::to_string(column) + ": " +
                    error.what());
  }
}

Checkpoint::Checkpoint(const std::string& dir, bool map) : dir_(dir) {
  std::error_code error;
  if (!fs::is_directory(dir, error)) {
    throw FuelError(dir + ": expected a directory that holds a checkpoint, found " +
                    (exists(dir) ? "a file" : "nothing"));
  }
  const std::string index = join(dir, kIndexName);
  if (fs::symlink_status(index, error).type() != fs::file_type::not_found) {
    open_index(index, map);
  } else {
    open_all(map);
  }
}

void Checkpoint::open_index(const std::string& path, bool map) {
  const Json index = read_json_file(path);
  const Json* weight_map = index.find("weight_map");
  if (weight_map == nullptr || !weight_map->is_object()) {
    throw FuelError(path + ": weight_map: expected an object {tensor: file}, found " +
                    (weight_map == nullptr ? "none" : weight_map->kind_name()));
  }
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : weight_map->object()) {
    if (!shard.is_string()) {
      throw FuelError(path + ": weight_map: " + json_quote(tensor) + ": expected a file name, found " +
                      shard.kind_name());
    }
    if (shards.insert(shard.string()).second) check_shard_name(path, shard.string());
  }
  if (shards.empty()) throw FuelError(path + ": weight_map: expected tensors, found none");
  // All that is missing is named before the first file is read.
  std::vector<std::string> missing;
  for (const std::string& shard : shards) {
    if (!exists(join(dir_, shard))) missing.push_back(shard);
  }
  if (!missing.empty()) {
    throw FuelError(join(dir_, missing.front()) + ": missing: expected " + std::to_string(shards.size()) +
                        " shards as " + kIndexName + " says, found " +
                        std::to_string(shards.size() - missing.size()),
                    "download the missing files");
  }
  std::map<std::string, const SafetensorsFile*> opened;
  for (const std::string& shard : shards) {
    add(shard, map);
    opened[shard] = files_.back().get();
  }
  for (const auto& [tensor, shard] : weight_map->object()) {
    const Entry* const entry = find(tensor);
    const SafetensorsFile* const expected = opened.at(shard.string());
    if (entry != nullptr && entry->file == expected) continue;
    throw FuelError(path + ": tensor " + json_quote(tensor) + ": expected in " + expected->path() +
                        ", found " + (entry == nullptr ? "in no shard" : "in " + entry->file->path()),
                    "download this file and its index again");
  }
}

void Checkpoint::open_all(bool map) {
  std::set<std::string> shards;
  std::error_code error;
  for (fs::directory_iterator it(dir_, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (it->path().extension() == kSuffix && name.front() != '.') shards.insert(name);
  }
  if (error) throw FuelError(dir_ + ": cannot list: " + error.message());
  if (shards.empty()) throw FuelError(dir_ + ": expected *.safetensors, found none");
  check_series_complete(dir_, shards);
  for (const std::string& shard : shards) add(shard, map);
}

void Checkpoint::add(const std::string& shard, bool map) {
  files_.push_back(std::make_unique<SafetensorsFile>(join(dir_, shard), map));
  const SafetensorsFile* const file = files_.back().get();
  for (const TensorInfo& info : file->tensors()) {
    const auto [at, added] = entries_.emplace(info.name, Entry{file, &info});
    if (added) continue;
    throw FuelError(file->path() + ": tensor " + json_quote(info.name) +
                    ": expected in one shard, found in " + at->second.file->path() + " too");
  }
}

const Checkpoint::Entry* Checkpoint::find(const std::string& name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : &found->second;
}

const Checkpoint::Entry& Checkpoint::get(const std::string& name, const std::vector<int64_t>& shape) const {
  const Entry* const entry = find(name);
  if (entry == nullptr) {
    throw FuelError(dir_ + ": tensor " + json_quote(name) + ": expected " + describe_shape(shape) +
                    ", found none");
  }
  if (!same_shape(entry->info->shape, shape)) {
    throw FuelError(entry->file->path() + ": tensor " + json_quote(name) + ": expected " +
                    describe_shape(shape) + ", found " + entry->info->describe());
  }
  return *entry;
}

void Checkpoint::check_unchanged() const {
  for (const std::unique_ptr<SafetensorsFile>& file : files_) file->check_unchanged();
}

std::vector<float> Checkpoint::read_f32(const Entry& entry) const {
  const TensorInfo& info = *entry.info;
  const size_t count = static_cast<size_t>(info.elements());
  std::vector<float> values(count);
  const auto raw = [&]<typename T>(T) {
    std::vector<T> stored(count);
    read_bytes(entry, stored.data());
    return stored;
  };
  switch (info.dtype) {
    case DType::kF32:
      read_bytes(entry, values.data());
      break;
    case DType::kBF16: {
      const auto stored = raw(uint16_t{});
      std::transform(stored.begin(), stored.end(), values.begin(), bf16_to_f32);
      break;
    }
    case DType::kF16: {
      const auto stored = raw(uint16_t{});
      std::transform(stored.begin(), stored.end(), values.begin(), f16_to_f32);
      break;
    }
    case DType::kF64: {
      const auto stored = raw(double{});
      std::transform(stored.begin(), stored.end(), values.begin(),
                     [](double v) { return static_cast<float>(v); });
      break;
    }
    default:
      throw FuelError(entry.file->path() + ": tensor " + json_quote(info.name) +
                      ": expected F32, BF16, F16 or F64, found " + info.describe());
  }
  return values;
}

void Checkpoint::read_bytes(const Entry& entry, void* out) const {
  entry.file->read(entry.info->offset, entry.info->bytes, out);
}

}  // namespace rocket
