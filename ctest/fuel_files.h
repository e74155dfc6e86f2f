// Checkpoints made on the spot for tests: a temporary directory, a plain safetensors writer, checks of
// errors.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "check.h"

namespace fuel_files {

class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "rocket-test-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot make a temporary directory");
    path_ = pattern;
  }
  ~TempDir() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline void write_file(const std::string& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
}

struct Tensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};

template <typename T>
Tensor tensor(const std::string& name, const std::string& dtype, std::vector<int64_t> shape,
              const std::vector<T>& values) {
  return {name, dtype, std::move(shape),
          std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T))};
}

// `count` bytes of a pattern that tells tensors apart.
inline std::string pattern(size_t count, int seed) {
  std::string bytes(count, '\0');
  for (size_t i = 0; i < count; ++i)
    bytes[i] = static_cast<char>((i * 131 + static_cast<size_t>(seed) * 29 + 7) & 0xFF);
  return bytes;
}

inline std::string frame(const std::string& header, const std::string& data) {
  std::string out(8, '\0');
  for (size_t i = 0; i < 8; ++i) out[i] = static_cast<char>((header.size() >> (8 * i)) & 0xFF);
  return out + header + data;
}

inline std::string header_entry(const Tensor& tensor, size_t begin) {
  std::string shape;
  for (const int64_t dim : tensor.shape) shape += (shape.empty() ? "" : ",") + std::to_string(dim);
  return "\"" + tensor.name + "\":{\"dtype\":\"" + tensor.dtype + "\",\"shape\":[" + shape +
         "],\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(begin + tensor.bytes.size()) +
         "]}";
}

inline std::string safetensors(const std::vector<Tensor>& tensors) {
  std::string header = "{\"__metadata__\":{\"format\":\"pt\"}", data;
  for (const Tensor& tensor : tensors) {
    header += "," + header_entry(tensor, data.size());
    data += tensor.bytes;
  }
  return frame(header + "}", data);
}

inline void write_safetensors(const std::string& path, const std::vector<Tensor>& tensors) {
  write_file(path, safetensors(tensors));
}

// The call must throw E with a message of one line that holds every one of `parts`.
template <typename E, typename F>
void throws(const std::string& what, F&& call, std::initializer_list<std::string> parts) {
  try {
    call();
  } catch (const E& error) {
    const std::string message = error.what();
    check::expect(message.find('\n') == std::string::npos, what + ": one line: " + message);
    for (const std::string& part : parts) {
      check::expect(message.find(part) != std::string::npos,
                    what + ": expected \"" + part + "\" in: " + message);
    }
    return;
  } catch (const std::exception& error) {
    check::expect(false, what + ": another type of error: " + error.what());
    return;
  }
  check::expect(false, what + ": no error");
}

}  // namespace fuel_files
