#include "runtime/snapshot_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "fuel/safetensors.h"

namespace rocket {
namespace {

struct Piece {
  std::string name, dtype;
  std::vector<int64_t> shape;
  std::vector<std::pair<const void*, size_t>> runs;  // bytes in order
  size_t bytes = 0;
  bool state = false;  // lies in the memory space of the state, else on the host

  void add(const void* data, size_t size) {
    runs.emplace_back(data, size);
    bytes += size;
  }
};

std::string hex(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

// The fingerprint is the name of an empty tensor: any safetensors reader shows it, and ours needs no
// metadata.
std::string fingerprint_name(uint64_t fingerprint) {
  return "fuel." + hex(fingerprint);
}

std::vector<Piece> pieces(const StreamState& state, const StateLayout& layout, uint64_t fingerprint,
                          std::vector<int64_t>& embedded_at) {
  std::vector<Piece> all;
  all.push_back({fingerprint_name(fingerprint), "U8", {0}, {}, 0, false});
  Piece tokens{"tokens", "I32", {state.position()}, {}, 0, false};
  tokens.add(state.tokens().data(), state.tokens().size() * 4);
  all.push_back(tokens);
  Piece at{"embedded_at", "I64", {}, {}, 0, false}, embeddings{"embeddings", "F32", {}, {}, 0, false};
  int64_t hidden = 0;
  for (const auto& [position, embedding] : state.embeddings()) {
    embedded_at.push_back(position);
    hidden = static_cast<int64_t>(embedding.size());
    embeddings.add(embedding.data(), embedding.size() * 4);
  }
  at.add(embedded_at.data(), embedded_at.size() * 8);
  at.shape = {static_cast<int64_t>(embedded_at.size())};
  embeddings.shape = {static_cast<int64_t>(embedded_at.size()), hidden};
  all.push_back(at);
  all.push_back(embeddings);
  for (const RecurrentPart& part : layout.recurrent()) {
    Piece piece{part.name, "F32", part.shape, {}, 0, true};
    piece.add(state.recurrent() + part.offset, static_cast<size_t>(part.floats) * 4);
    all.push_back(piece);
  }
  for (size_t i = 0; i < layout.paged().size(); ++i) {
    const PagedPart& part = layout.paged()[i];
    const int64_t count = state.position() / part.tokens_per_row;
    Piece piece{part.name, part.bf16 ? "BF16" : "F32", {count, part.width}, {}, 0, true};
    for (const auto& [from, bytes] : state.runs(static_cast<int>(i), count)) piece.add(from, bytes);
    all.push_back(piece);
  }
  return all;
}

std::string header(const std::vector<Piece>& all) {
  std::string text = "{\"__metadata__\":{\"format\":\"rocket-snapshot-1\"}";
  size_t offset = 0;
  for (const Piece& piece : all) {
    text += ",\"" + piece.name + "\":{\"dtype\":\"" + piece.dtype + "\",\"shape\":[";
    for (size_t i = 0; i < piece.shape.size(); ++i) text += (i ? "," : "") + std::to_string(piece.shape[i]);
    text +=
        "],\"data_offsets\":[" + std::to_string(offset) + "," + std::to_string(offset + piece.bytes) + "]}";
    offset += piece.bytes;
  }
  text += "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

[[noreturn]] void fail(const std::string& file, const char* what) {
  throw DeviceError(file + ": " + what + ": " + std::strerror(errno),
                    "choose a folder that can be written and has room");
}

// A rename would put a regular file in the place of a device or a folder.
void check_target(const std::string& file) {
  struct stat status{};
  if (::stat(file.c_str(), &status) != 0 || S_ISREG(status.st_mode)) return;
  throw DeviceError(file + ": expected a regular file or none, found something else",
                    "choose the name of a new file");
}

// A file that is removed again unless it was finished.
class NewFile {
 public:
  explicit NewFile(const std::string& file)
      : file_(file), temporary_(file + ".tmp-" + std::to_string(getpid())) {
    check_target(file_);
    out_ = std::fopen(temporary_.c_str(), "wb");
    if (!out_) fail(file_, "cannot be written");
  }
  ~NewFile() {
    if (out_) std::fclose(out_);
    if (!finished_) std::remove(temporary_.c_str());
  }
  void write(const void* data, size_t bytes) {
    if (bytes && std::fwrite(data, 1, bytes, out_) != bytes) fail(file_, "writing failed");
  }
  void finish() {
    const bool flushed = std::fflush(out_) == 0 && fsync(fileno(out_)) == 0;
    const bool closed = std::fclose(out_) == 0;
    out_ = nullptr;
    if (!flushed || !closed) fail(file_, "writing failed");
    if (std::rename(temporary_.c_str(), file_.c_str()) != 0) fail(file_, "cannot be renamed into place");
    finished_ = true;
  }

 private:
  std::string file_, temporary_;
  std::FILE* out_ = nullptr;
  bool finished_ = false;
};

// One tensor of a snapshot file, checked against what this engine expects.
const TensorInfo& part(const SafetensorsFile& file, const std::string& name, DType dtype,
                       const std::vector<int64_t>& shape) {
  for (const TensorInfo& tensor : file.tensors()) {
    if (tensor.name != name) continue;
    TensorInfo expected;
    expected.dtype = dtype;
    expected.shape = shape;
    if (tensor.dtype == dtype && tensor.shape == shape) return tensor;
    throw FuelError(file.path() + ": tensor " + name + ": expected " + expected.describe() + ", found " +
                    tensor.describe());
  }
  throw FuelError(file.path() + ": tensor " + name + " is missing, this is no snapshot of this fuel");
}

const TensorInfo* find(const SafetensorsFile& file, const std::string& name) {
  for (const TensorInfo& tensor : file.tensors()) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

}  // namespace

void write_snapshot(const StreamState& state, const StatePool& pool, uint64_t fingerprint,
                    const std::string& file) {
  std::vector<int64_t> embedded_at;
  const std::vector<Piece> all = pieces(state, pool.layout(), fingerprint, embedded_at);
  const std::string text = header(all);
  const uint64_t length = text.size();
  MemorySpace& memory = pool.memory();
  NewFile out(file);
  out.write(&length, sizeof length);
  out.write(text.data(), text.size());
  std::vector<char> staging;
  for (const Piece& piece : all) {
    for (const auto& [data, bytes] : piece.runs) {
      if (!piece.state) {
        out.write(data, bytes);
        continue;
      }
      staging.resize(bytes);
      memory.read(staging.data(), data, bytes);
      out.write(staging.data(), bytes);
    }
  }
  out.finish();
}

std::unique_ptr<StreamState> read_snapshot(StatePool& pool, uint64_t fingerprint, int32_t hidden,
                                           int32_t vocab, int64_t max_context, const std::string& path) {
  const SafetensorsFile file(path);
  const TensorInfo* tokens_info = find(file, "tokens");
  if (!tokens_info || tokens_info->dtype != DType::kI32 || tokens_info->shape.size() != 1) {
    throw FuelError(path + ": is no snapshot (it has no I32 tensor 'tokens')");
  }
  if (!find(file, fingerprint_name(fingerprint))) {
    throw FuelError(path + ": is a snapshot of another fuel, expected fingerprint " + hex(fingerprint),
                    "load it with the fuel it was made with");
  }
  const int64_t count = tokens_info->shape[0];
  if (count > max_context) {
    throw PlanError(path + ": holds " + std::to_string(count) + " tokens, the context holds " +
                        std::to_string(max_context),
                    "raise --max-context");
  }
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  if (count > 0) std::memcpy(tokens.data(), file.data(*tokens_info), tokens.size() * 4);
  const TensorInfo* at_info = find(file, "embedded_at");
  const int64_t embedded = at_info && at_info->shape.size() == 1 ? at_info->shape[0] : 0;
  part(file, "embedded_at", DType::kI64, {embedded});
  const TensorInfo embeddings_info = part(file, "embeddings", DType::kF32, {embedded, embedded ? hidden : 0});
  std::map<int64_t, std::vector<float>> embeddings;
  for (int64_t i = 0; i < embedded; ++i) {
    int64_t position = 0;
    std::memcpy(&position, file.data(*at_info) + i * 8, 8);
    if (position < 0 || position >= count) throw FuelError(path + ": an embedding lies outside the context");
    std::vector<float>& embedding = embeddings[position];
    embedding.resize(static_cast<size_t>(hidden));
    std::memcpy(embedding.data(), file.data(embeddings_info) + i * hidden * 4,
                static_cast<size_t>(hidden) * 4);
  }
  for (int64_t i = 0; i < count; ++i) {
    const int32_t token = tokens[static_cast<size_t>(i)];
    if (token >= vocab || token < -1 || (token == -1) != (embeddings.count(i) == 1)) {
      throw FuelError(path + ": token " + std::to_string(token) + " at position " + std::to_string(i) +
                      " cannot be");
    }
  }
  auto state = std::make_unique<StreamState>(pool);
  state->reserve(count);
  state->set_history(std::move(tokens), std::move(embeddings));
  const StateLayout& layout = pool.layout();
  for (const RecurrentPart& info : layout.recurrent()) {
    const TensorInfo& tensor = part(file, info.name, DType::kF32, info.shape);
    pool.memory().write(state->recurrent() + info.offset, file.data(tensor),
                        static_cast<size_t>(info.floats) * 4);
  }
  for (size_t i = 0; i < layout.paged().size(); ++i) {
    const PagedPart& info = layout.paged()[i];
    const int64_t rows = count / info.tokens_per_row;
    const DType dtype = info.bf16 ? DType::kBF16 : DType::kF32;
    const uint8_t* from = file.data(part(file, info.name, dtype, {rows, info.width}));
    for (const auto& [to, bytes] : state->runs(static_cast<int>(i), rows)) {
      pool.memory().write(to, from, bytes);
      from += bytes;
    }
  }
  return state;
}

}  // namespace rocket
