#include "fuel/quantised.h"

#include <algorithm>
#include <cmath>

#include "fuel/nvfp4.h"
#include "fuel/read_ahead.h"

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

// --- where the bytes of a weight lie --------------------------------------------------------------------------

// Numbers or blocks of them, row by row.
struct Grid {
  int64_t rows, columns;
};

// Bytes in a tensor: runs of one length, each a stride behind the one before.
struct Runs {
  int64_t first, bytes, count, stride;
  int64_t total() const { return bytes * count; }
};

Runs runs_of(const TensorInfo& info, const Grid& whole, const Grid& first, const Grid& taken) {
  const int64_t row = static_cast<int64_t>(info.bytes) / whole.rows;
  if (taken.columns == whole.columns) return {first.rows * row, taken.rows * row, 1, 0};
  return {first.rows * row + row * first.columns / whole.columns, row * taken.columns / whole.columns,
          taken.rows, row};
}

Runs data_runs(const WeightSource& s) {
  return runs_of(*s.data->info, {s.whole_out, s.whole_in}, {s.first_row, s.first_column}, {s.out, s.in});
}

// Numbers that share a scale.
Grid block_of(const WeightSource& s) {
  switch (s.format) {
    case WeightFormat::kNVFP4:
      return {1, kNvfp4Block};
    case WeightFormat::kMXFP8:
      return {1, kMxfp8Block};
    case WeightFormat::kFP8Block:
      return {kFp8Block, kFp8Block};
    default:
      return {1, 1};
  }
}

bool one_scale(const WeightSource& s) {
  return s.format == WeightFormat::kFP8Block && is_scalar(*s.block_scale->info);
}

// Of a block scale that is there.
Runs scale_runs(const WeightSource& s) {
  const TensorInfo& info = *s.block_scale->info;
  if (one_scale(s)) return {0, static_cast<int64_t>(info.bytes), 1, 0};
  const Grid block = block_of(s);
  return runs_of(info, {ceil_div(s.whole_out, block.rows), ceil_div(s.whole_in, block.columns)},
                 {s.first_row / block.rows, s.first_column / block.columns},
                 {ceil_div(s.out, block.rows), ceil_div(s.in, block.columns)});
}

Runs row_scale_runs(const WeightSource& s) {
  return runs_of(*s.row_scale->info, {s.whole_out, 1}, {s.first_row, 0}, {s.out, 1});
}

void count_bytes(WeightSource& s) {
  s.disk_bytes = data_runs(s).total();
  if (s.block_scale != nullptr) s.disk_bytes += scale_runs(s).total();
  if (s.row_scale != nullptr) s.disk_bytes += row_scale_runs(s).total();
  if (s.global_scale != nullptr) s.disk_bytes += static_cast<int64_t>(s.global_scale->info->bytes);
  Weight weight;
  weight.format = s.format;
  weight.out = s.out;
  weight.in = s.in;
  s.memory_bytes = weight_bytes(weight) - (s.format == WeightFormat::kNVFP4 ? 4 : 0);
}

// Resolves one weight; a function for each way of storing it.
class Resolver {
 public:
  Resolver(const Checkpoint& checkpoint, const std::string& name, int64_t out, int64_t in)
      : checkpoint_(checkpoint) {
    source_.name = name;
    source_.out = source_.whole_out = out;
    source_.in = source_.whole_in = in;
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
    count_bytes(source_);
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

// What to read of a tensor and where its bytes go. 16-bit floats whose place has room for float32 are expanded; a
// scalar is repeated until its place is full; E4M3 is multiplied by the scale of its row if there is one.
struct Part {
  const Checkpoint::Entry* entry;
  Runs runs;
  void* out;
  int64_t out_bytes;
  const WeightSource* scaled_rows = nullptr;  // the weight, if each row has a scale
};

using Count = std::function<void(int64_t)>;

constexpr int64_t kChunk = 8 << 20;

uint64_t place_of(const Part& part, int64_t run, int64_t at) {
  return part.entry->info->offset + static_cast<uint64_t>(part.runs.first + run * part.runs.stride + at);
}

void multiply_rows(const Checkpoint& checkpoint, const Part& part, const Count& read_bytes) {
  const WeightSource& s = *part.scaled_rows;
  const std::vector<float> scale = checkpoint.read_f32(*s.row_scale);
  read_bytes(row_scale_runs(s).total());
  const int64_t columns = s.in;
  const int64_t step = part.runs.count > 1 ? 1 : std::max<int64_t>(1, kChunk / columns);
  std::vector<uint8_t> codes(static_cast<size_t>(std::min(step, s.out) * columns));
  float* out = static_cast<float*>(part.out);
  for (int64_t row = 0; row < s.out; row += step) {
    const int64_t now = std::min(step, s.out - row);
    const uint64_t at = part.runs.count > 1 ? place_of(part, row, 0) : place_of(part, 0, row * columns);
    part.entry->file->read(at, static_cast<uint64_t>(now * columns), codes.data());
    for (int64_t i = 0; i < now * columns; ++i) {
      const auto of = static_cast<size_t>(s.first_row + row + i / columns);
      *out++ = e4m3_to_f32(codes[static_cast<size_t>(i)]) * scale[of];
    }
    read_bytes(now * columns);
  }
}

// Of columns of a weight, which lie here and there, none are asked for.
std::vector<ReadAhead::Range> ranges_of(const std::vector<Part>& parts) {
  std::vector<ReadAhead::Range> ranges;
  for (const Part& part : parts) {
    const bool whole = part.runs.count == 1;
    ranges.push_back(
        {whole ? part.entry->file : nullptr, whole ? place_of(part, 0, 0) : 0, part.runs.total()});
  }
  return ranges;
}

void read_part(const Checkpoint& checkpoint, const Part& part, std::vector<uint16_t>& staging,
               const Count& read_bytes) {
  if (part.scaled_rows != nullptr) {
    multiply_rows(checkpoint, part, read_bytes);
    return;
  }
  const TensorInfo& info = *part.entry->info;
  const SafetensorsFile& file = *part.entry->file;
  const int64_t bytes = part.runs.bytes;
  if (is_scalar(info) && bytes != part.out_bytes) {
    const float value = checkpoint.read_f32(*part.entry)[0];
    std::fill_n(static_cast<float*>(part.out), part.out_bytes / 4, value);
    read_bytes(bytes);
    return;
  }
  const bool expand = part.runs.total() != part.out_bytes;
  if (expand) staging.resize(static_cast<size_t>(std::min(kChunk / 2, bytes) / 2));
  const int64_t step = expand ? kChunk / 2 : kChunk;
  for (int64_t run = 0; run < part.runs.count; ++run) {
    for (int64_t at = 0; at < bytes; at += step) {
      const int64_t now = std::min(step, bytes - at), done = run * bytes + at;
      void* const target = expand ? static_cast<void*>(staging.data()) : static_cast<char*>(part.out) + done;
      file.read(place_of(part, run, at), static_cast<uint64_t>(now), target);
      if (expand) {
        std::transform(staging.begin(), staging.begin() + now / 2, static_cast<float*>(part.out) + done / 2,
                       info.dtype == DType::kF16 ? f16_to_f32 : bf16_to_f32);
      }
      read_bytes(now);
    }
  }
}

Part data_part(const WeightSource& source, void* place) {
  return {source.data, data_runs(source), place, data_bytes(source),
          source.row_scale != nullptr ? &source : nullptr};
}

Part scale_part(const WeightSource& source, void* place) {
  return {source.block_scale, scale_runs(source), place, source.memory_bytes - data_bytes(source)};
}

// Whether each of the parts begins with a block or lies within one.
bool on_borders(int64_t whole, int32_t parts, int64_t block, bool within) {
  if (whole % parts != 0) return false;
  const int64_t part = whole / parts;
  if (part % block == 0) return true;
  for (int64_t first = 0; first < whole; first += part) {
    const bool inside = within && first / block == (first + part - 1) / block;
    if (first % block != 0 && !inside) return false;
  }
  return within;
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

bool can_cut(const WeightSource& whole, int32_t parts, bool columns) {
  const Grid block = one_scale(whole) ? Grid{1, 1} : block_of(whole);
  // Codes of fewer columns than share a scale are no weight in memory; FP8's last block may be cut short.
  const bool within = whole.format == WeightFormat::kFP8Block;
  return columns ? on_borders(whole.whole_in, parts, block.columns, within)
                 : on_borders(whole.whole_out, parts, block.rows, within);
}

WeightSource cut_weight(const WeightSource& whole, const WeightCut& cut) {
  if (cut.parts == 1) return whole;
  if (!can_cut(whole, cut.parts, cut.columns)) {
    const Grid block = block_of(whole);
    const int64_t all = cut.columns ? whole.whole_in : whole.whole_out;
    throw FuelError(where(*whole.data) + ": expected " + (cut.columns ? "columns" : "rows") + " in " +
                    std::to_string(cut.parts) + " parts of whole blocks of " +
                    std::to_string(cut.columns ? block.columns : block.rows) + ", found " +
                    std::to_string(all));
  }
  WeightSource part = whole;
  int64_t& size = cut.columns ? part.in : part.out;
  size /= cut.parts;
  (cut.columns ? part.first_column : part.first_row) = size * cut.part;
  part.in_place = false;
  count_bytes(part);
  return part;
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
  read_part(checkpoint, data_part(source, data), staging, no_count);
  if (source.block_scale != nullptr)
    read_part(checkpoint, scale_part(source, block_scale), staging, no_count);
}

int WeightLoader::add(const std::string& name, int64_t out, int64_t in, const WeightCut& cut) {
  const auto known = handles_.find(name);
  if (known != handles_.end()) {
    const WeightSource& source = sources_[static_cast<size_t>(known->second)];
    if (source.whole_out != out || source.whole_in != in) fail(*source.data, describe_shape({out, in}));
    return known->second;
  }
  const int handle = static_cast<int>(sources_.size());
  sources_.push_back(cut_weight(describe_weight(checkpoint_, name, out, in), cut));
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
    parts.push_back(data_part(source, place));
    if (source.block_scale != nullptr) {
      const int64_t scales = source.memory_bytes - data;
      void* const scale_place = arena.take_bytes(static_cast<size_t>(scales));
      weight.block_scale = scale_place;
      parts.push_back(scale_part(source, scale_place));
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
  ReadAhead ahead(ranges_of(parts));
  int64_t read = 0;
  for (const Part& part : parts) {
    read_part(checkpoint_, part, staging, [&](int64_t bytes) {
      ahead.reach(read += bytes);
      done += bytes;
      if (!progress || (done - reported < kReport && done < disk_bytes_)) return;
      reported = done;
      progress(done, disk_bytes_);
    });
  }
}

}  // namespace rocket
