// Results of benchmarks as lines of JSON, at the end of the file that ROCKET_BENCH_OUT names.
#pragma once

#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/error.h"

namespace check {

// Null where no file is named.
inline const char* results_path() {
  const char* path = std::getenv("ROCKET_BENCH_OUT");
  return path && *path ? path : nullptr;
}

// Throws DeviceError where the file cannot be opened or written. No text only opens it, for a program that would find
// out late.
inline void append_result(const std::string& text) {
  const char* path = results_path();
  if (!path) return;
  std::FILE* file = std::fopen(path, "a");
  bool whole = file != nullptr;
  int error = errno;
  if (file) {
    whole = std::fwrite(text.data(), 1, text.size(), file) == text.size();
    if (!whole) error = errno;
    if (std::fclose(file) != 0 && whole) whole = false, error = errno;
  }
  if (whole) return;
  throw rocket::DeviceError(std::string("ROCKET_BENCH_OUT: expected a file to append to, found ") + path +
                            ": " + std::strerror(error));
}

// One object on one line: add() its fields, then append().
class ResultLine {
 public:
  ResultLine& add(const char* key, const std::string& text) { return put(key, quoted(text)); }
  ResultLine& add(const char* key, const char* text) { return put(key, quoted(text)); }
  ResultLine& add(const char* key, bool value) { return put(key, value ? "true" : "false"); }
  ResultLine& add(const char* key, int32_t value) { return put(key, std::to_string(value)); }
  ResultLine& add(const char* key, int64_t value) { return put(key, std::to_string(value)); }
  // What is not finite is null.
  ResultLine& add(const char* key, double value) {
    char number[32];
    std::snprintf(number, sizeof number, "%.9g", value);
    return put(key, std::isfinite(value) ? number : "null");
  }
  void append() const { append_result("{" + fields_ + "}\n"); }

 private:
  static std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (const char c : text) {
      char escaped[8];
      if (c == '"' || c == '\\') {
        out += {'\\', c};
      } else if (static_cast<unsigned char>(c) < 0x20) {
        std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(c));
        out += escaped;
      } else {
        out += c;
      }
    }
    return out + '"';
  }
  ResultLine& put(const char* key, const std::string& value) {
    if (!fields_.empty()) fields_ += ", ";
    fields_ += quoted(key) + ": " + value;
    return *this;
  }
  std::string fields_;
};

}  // namespace check
