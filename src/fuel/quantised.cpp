#include "fuel/quantised.h"

#include <algorithm>
#include <cmath>

#include "fuel/nvfp4.h"

namespace rocket {

namespace {

using Entry = Checkpoint::Entry;
using Shape = std::vector<int64_t>;

constexpr int64_t kNvfp4Block = 16;
constexpr int64_t kMxfp8Block = 32;
constexpr int64_t kFp8Block = 128;

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

bool is_scalar(const TensorInfo& info) {
  return same_shape(info.shape, {});
}

std::string where(const Entry& entry) {
  return entry.file->path() + ": tensor " + json_quote(entry.info->name);
}

[[noreturn]] void fail(const Entry& entry, const std::string& expected) {
  throw FuelError(where(entry) + ": expected " + expected + ", found " + entry.info->describe());
}

// Resolves one weight; a function for each way of storing it.
class Resolver {
 public:
  Resolver(const Checkpoint& checkpoint, const std::string& name, int64_t out, int64_t in)
      : checkpoint_(checkpoint) {
    source_.name = name;
    source_.out = out;
    source_.in = in;
  }

  WeightSource resolve() {
    const Entry* const weight = find(".weight");
    const Entry* const packed = find(".weight_packed");
    if (weight != nullptr && packed != nullptr) {
      throw FuelError(where(*packed) + ": expected one of " + json_quote(source_.name + ".weight") + " and " +
                      json_quote(source_.name + ".weight_packed") + ", found both");
    }
    source_.input_scale = find(".input_scale");
    if (source_.input_scale == nullptr) source_.input_scale = find(".input_global_scale");
    if (packed != nullptr) {
      nvfp4(*packed, ".weight_global_scale", true);
    } else if (weight != nullptr) {
      by_dtype(*weight);
    } else if (const Entry* const bare = find("")) {
      plain(*bare);
    } else {
      throw FuelError(checkpoint_.dir() + ": tensor " + json_quote(source_.name + ".weight") + ": expected " +
                      describe_shape({source_.out, source_.in}) + ", found none");
    }
    count_bytes();
    return source_;
  }

 private:
  const Entry* find(const char* suffix) const { return checkpoint_.find(source_.name + suffix); }

  const Entry& need(const char* suffix, const std::string& expected) const {
    const Entry* const entry = find(suffix);
    if (entry == nullptr) {
      throw FuelError(where(*source_.data) + ": expected " + json_quote(source_.name + suffix) + " " +
                      expected + " beside it, found none");
    }
    return *entry;
  }

  static void require(const Entry& entry, std::initializer_list<DType> dtypes, const Shape& shape) {
    const bool known = std::find(dtypes.begin(), dtypes.end(), entry.info->dtype) != dtypes.end();
    if (!known || !same_shape(entry.info->shape, shape)) fail(entry, describe(dtypes, shape));
  }

  static std::string describe(std::initializer_list<DType> dtypes, const Shape& shape) {
    std::string out;
    for (const DType dtype : dtypes) out += (out.empty() ? "" : " or ") + std::string(dtype_name(dtype));
    return out + " " + describe_shape(shape);
  }

  void by_dtype(const Entry& weight) {
    switch (weight.info->dtype) {
      case DType::kU8:
        nvfp4(weight, ".weight_scale_2", false);
        break;
      case DType::kF8E4M3:
        fp8(weight);
        break;
      default:
        plain(weight);
    }
  }

  void plain(const Entry& weight) {
    require(weight, {DType::kF32, DType::kBF16, DType::kF16}, {source_.out, source_.in});
    source_.data = &weight;
    source_.format = weight.info->dtype == DType::kBF16 ? WeightFormat::kBF16 : WeightFormat::kF32;
    source_.in_place = weight.info->dtype != DType::kF16;
  }

  void nvfp4(const Entry& packed, const char* global, bool divides) {
    source_.data = &packed;
    source_.format = WeightFormat::kNVFP4;
    require_divisible(packed, kNvfp4Block, "NVFP4");
    require(packed, {DType::kU8}, {source_.out, source_.in / 2});
    const Shape blocks = {source_.out, source_.in / kNvfp4Block};
    const Entry& scale = need(".weight_scale", describe({DType::kF8E4M3}, blocks));
    require(scale, {DType::kF8E4M3}, blocks);
    const Entry& scalar = need(global, describe({DType::kF32}, {}));
    require(scalar, {DType::kF32, DType::kBF16, DType::kF16}, {});
    source_.block_scale = &scale;
    source_.global_scale = &scalar;
    source_.global_divides = divides;
  }

  void fp8(const Entry& weight) {
    source_.data = &weight;
    require(weight, {DType::kF8E4M3}, {source_.out, source_.in});
    const Entry* const inverse = find(".weight_scale_inv");
    const Entry& scale = inverse != nullptr
                             ? *inverse
                             : need(".weight_scale", "or " + json_quote(source_.name + ".weight_scale_inv"));
    source_.block_scale = &scale;
    const DType dtype = scale.info->dtype;
    if (dtype == DType::kU8 || dtype == DType::kF8E8M0) {
      require_divisible(weight, kMxfp8Block, "MXFP8");
      require(scale, {DType::kU8, DType::kF8E8M0}, {source_.out, source_.in / kMxfp8Block});
      source_.format = WeightFormat::kMXFP8;
      return;
    }
    source_.format = WeightFormat::kFP8Block;
    const Shape blocks = {ceil_div(source_.out, kFp8Block), ceil_div(source_.in, kFp8Block)};
    const Shape spread = {blocks[0], 1, blocks[1], 1};
    const Shape rows = {source_.out}, column = {source_.out, 1};
    const bool a_row = scale.info->shape == rows || scale.info->shape == column;
    if (inverse == nullptr && a_row && source_.out > 1) {
      fp8_rows(scale);
      return;
    }
    if (inverse != nullptr || scale.info->shape == blocks || scale.info->shape == spread) {
      require(scale, {DType::kF32, DType::kBF16}, inverse == nullptr ? scale.info->shape : blocks);
      source_.in_place = dtype == DType::kF32;
      return;
    }
    // One scale for all: the same number for every block.
    require(scale, {DType::kF32, DType::kBF16, DType::kF16}, {});
    source_.in_place = false;
  }

  // No format of a weight in memory has such scales: the products are taken, each rounded once.
  void fp8_rows(const Entry& scale) {
    require(scale, {DType::kF32, DType::kBF16, DType::kF16}, scale.info->shape);
    source_.block_scale = nullptr;
    source_.row_scale = &scale;
    source_.format = WeightFormat::kF32;
    source_.in_place = false;
  }

  void require_divisible(const Entry& entry, int64_t block, const char* format) const {
    if (source_.in % block == 0) return;
    throw FuelError(where(entry) + ": expected a number of columns that " + std::to_string(block) +
                    " divides (" + format + "), found " + std::to_string(source_.in));
  }

  void count_bytes() {
    for (const Entry* entry : {source_.data, source_.block_scale, source_.global_scale, source_.row_scale}) {
      if (entry != nullptr) source_.disk_bytes += static_cast<int64_t>(entry->info->bytes);
    }
    Weight weight;
    weight.format = source_.format;
    weight.out = source_.out;
    weight.in = source_.in;
    source_.memory_bytes = weight_bytes(weight) - (source_.format == WeightFormat::kNVFP4 ? 4 : 0);
  }

  const Checkpoint& checkpoint_;
  WeightSource source_;
};

int64_t data_bytes(const WeightSource& source) {
  const int64_t elements = source.out * source.in;
  switch (source.format) {
    case WeightFormat::kF32:
      return elements * 4;
    case WeightFormat::kBF16:
      return elements * 2;
    case WeightFormat::kNVFP4:
      return elements / 2;
    default:
      return elements;
  }
}

// A tensor to read and where its bytes go. 16-bit floats whose place has room for float32 are expanded; a
// scalar is repeated until its place is full; E4M3 is multiplied by the scale of its row if there is one.
struct Part {
  const Checkpoint::Entry* entry;
  void* out;
  int64_t out_bytes;
  const Checkpoint::Entry* row_scale = nullptr;
};

using Count = std::function<void(int64_t)>;

void multiply_rows(const Checkpoint& checkpoint, const Part& part, const Count& read_bytes) {
  constexpr int64_t kChunk = 8 << 20;
  const std::vector<float> scale = checkpoint.read_f32(*part.row_scale);
  read_bytes(static_cast<int64_t>(part.row_scale->info->bytes));
  const int64_t rows = static_cast<int64_t>(scale.size());
  const int64_t columns = part.out_bytes / 4 / rows, step = std::max<int64_t>(1, kChunk / columns);
  std::vector<uint8_t> codes(static_cast<size_t>(std::min(step, rows) * columns));
  float* out = static_cast<float*>(part.out);
  for (int64_t row = 0; row < rows; row += step) {
    const int64_t now = std::min(step, rows - row);
    const uint64_t at = part.entry->info->offset + static_cast<uint64_t>(row * columns);
    part.entry->file->read(at, static_cast<uint64_t>(now * columns), codes.data());
    for (int64_t i = 0; i < now * columns; ++i) {
      *out++ = e4m3_to_f32(codes[static_cast<size_t>(i)]) * scale[static_cast<size_t>(row + i / columns)];
    }
    read_bytes(now * columns);
  }
}

void read_part(const Checkpoint& checkpoint, const Part& part, std::vector<uint16_t>& staging,
               const Count& read_bytes) {
  if (part.row_scale != nullptr) {
    multiply_rows(checkpoint, part, read_bytes);
    return;
  }
  constexpr int64_t kChunk = 8 << 20;
  const TensorInfo& info = *part.entry->info;
  const SafetensorsFile& file = *part.entry->file;
  const int64_t bytes = static_cast<int64_t>(info.bytes);
  if (is_scalar(info) && bytes != part.out_bytes) {
    const float value = checkpoint.read_f32(*part.entry)[0];
    std::fill_n(static_cast<float*>(part.out), part.out_bytes / 4, value);
    read_bytes(bytes);
    return;
  }
  const bool expand = bytes != part.out_bytes;
  if (expand) staging.resize(static_cast<size_t>(std::min(kChunk / 2, bytes) / 2));
  const int64_t step = expand ? kChunk / 2 : kChunk;
  for (int64_t at = 0; at < bytes; at += step) {
    const int64_t now = std::min(step, bytes - at);
    void* const target = expand ? static_cast<void*>(staging.data()) : static_cast<char*>(part.out) + at;
    file.read(info.offset + static_cast<uint64_t>(at), static_cast<uint64_t>(now), target);
    if (expand) {
      std::transform(staging.begin(), staging.begin() + now / 2, static_cast<float*>(part.out) + at / 2,
                     info.dtype == DType::kF16 ? f16_to_f32 : bf16_to_f32);
    }
    read_bytes(now);
  }
}

}  // namespace

bool has_weight(const Checkpoint& checkpoint, const std::string& name) {
  for (const char* suffix : {".weight", ".weight_packed", ""}) {
    if (checkpoint.find(name + suffix) != nullptr) return true;
  }
  return false;
}

WeightSource describe_weight(const Checkpoint& checkpoint, const std::string& name, int64_t out, int64_t in) {
  return Resolver(checkpoint, name, out, in).resolve();
}

float read_global_scale(const Checkpoint& checkpoint, const WeightSource& source) {
  if (source.global_scale == nullptr) return 1.0f;
  const float stored = checkpoint.read_f32(*source.global_scale)[0];
  const bool zero = stored == 0.0f;
  const float multiplier = source.global_divides && !zero ? 1.0f / stored : stored;
  if (!(stored >= 0.0f) || !std::isfinite(stored) || !std::isfinite(multiplier)) {
    throw FuelError(where(*source.global_scale) + ": expected a finite global scale of at least 0, found " +
                    std::to_string(stored));
  }
  return zero ? 0.0f : multiplier;
}

Weight unplaced_weight(const Checkpoint& checkpoint, const WeightSource& source) {
  Weight weight;
  weight.format = source.format;
  weight.out = source.out;
  weight.in = source.in;
  weight.global_scale = read_global_scale(checkpoint, source);
  return weight;
}

Weight map_weight(const Checkpoint& checkpoint, const WeightSource& source) {
  if (!source.in_place) fail(*source.data, "a format that can be used where it lies");
  Weight weight = unplaced_weight(checkpoint, source);
  weight.data = source.data->data();
  if (source.block_scale != nullptr) weight.block_scale = source.block_scale->data();
  return weight;
}

void read_weight(const Checkpoint& checkpoint, const WeightSource& source, void* data, void* block_scale) {
  const Count no_count = [](int64_t) {};
  std::vector<uint16_t> staging;
  const int64_t bytes = data_bytes(source);
  read_part(checkpoint, {source.data, data, bytes, source.row_scale}, staging, no_count);
  if (source.block_scale == nullptr) return;
  read_part(checkpoint, {source.block_scale, block_scale, source.memory_bytes - bytes}, staging, no_count);
}

int WeightLoader::add(const std::string& name, int64_t out, int64_t in) {
  const auto known = handles_.find(name);
  if (known != handles_.end()) {
    const WeightSource& source = sources_[static_cast<size_t>(known->second)];
    if (source.out != out || source.in != in) fail(*source.data, describe_shape({out, in}));
    return known->second;
  }
  const int handle = static_cast<int>(sources_.size());
  sources_.push_back(describe_weight(checkpoint_, name, out, in));
  handles_.emplace(name, handle);
  const WeightSource& source = sources_.back();
  const int64_t data = data_bytes(source);
  arena_bytes_ += static_cast<int64_t>(Arena::padded(static_cast<size_t>(data)));
  if (source.block_scale != nullptr) {
    arena_bytes_ += static_cast<int64_t>(Arena::padded(static_cast<size_t>(source.memory_bytes - data)));
  }
  disk_bytes_ += source.disk_bytes;
  return handle;
}

void WeightLoader::load(Arena& arena, const Progress& progress) {
  std::vector<Part> parts;
  weights_.clear();
  int64_t done = 0, reported = 0;
  for (const WeightSource& source : sources_) {
    Weight weight = unplaced_weight(checkpoint_, source);
    if (source.global_scale != nullptr) done += static_cast<int64_t>(source.global_scale->info->bytes);
    const int64_t data = data_bytes(source);
    void* const place = arena.take_bytes(static_cast<size_t>(data));
    weight.data = place;
    parts.push_back({source.data, place, data, source.row_scale});
    if (source.block_scale != nullptr) {
      const int64_t scales = source.memory_bytes - data;
      void* const scale_place = arena.take_bytes(static_cast<size_t>(scales));
      weight.block_scale = scale_place;
      parts.push_back({source.block_scale, scale_place, scales});
    }
    weights_.push_back(weight);
  }
  std::unordered_map<const SafetensorsFile*, size_t> file_order;
  for (const auto& file : checkpoint_.files()) file_order.emplace(file.get(), file_order.size());
  std::sort(parts.begin(), parts.end(), [&](const Part& a, const Part& b) {
    const size_t file_a = file_order.at(a.entry->file), file_b = file_order.at(b.entry->file);
    return file_a != file_b ? file_a < file_b : a.entry->info->offset < b.entry->info->offset;
  });
  constexpr int64_t kReport = 8 << 20;
  std::vector<uint16_t> staging;
  for (const Part& part : parts) {
    read_part(checkpoint_, part, staging, [&](int64_t bytes) {
      done += bytes;
      if (!progress || (done - reported < kReport && done < disk_bytes_)) return;
      reported = done;
      progress(done, disk_bytes_);
    });
  }
}

}  // namespace rocket
