// A strict JSON reader for files that are not trusted: safetensors headers and config.json.
//
// RFC 8259, UTF-8 checked, duplicate keys refused, depth at most 64. Integers that fit in int64/uint64 stay exact.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace rocket {

class Json {
 public:
  enum class Kind { kNull, kBool, kInt, kUint, kDouble, kString, kArray, kObject };

  // Throws JsonError with the byte offset of what is wrong.
  static Json parse(std::string_view text);

  Kind kind() const { return kind_; }
  bool is_null() const { return kind_ == Kind::kNull; }
  bool is_bool() const { return kind_ == Kind::kBool; }
  bool is_number() const { return kind_ == Kind::kInt || kind_ == Kind::kUint || kind_ == Kind::kDouble; }
  bool is_integer() const { return kind_ == Kind::kInt || kind_ == Kind::kUint; }
  bool is_string() const { return kind_ == Kind::kString; }
  bool is_array() const { return kind_ == Kind::kArray; }
  bool is_object() const { return kind_ == Kind::kObject; }

  bool boolean() const { return bool_; }
  std::optional<int64_t> integer() const;    // exact, else nothing
  std::optional<uint64_t> unsigned_integer() const;
  double number() const;
  const std::string& string() const { return string_; }
  const std::vector<Json>& array() const { return array_; }
  const std::vector<std::pair<std::string, Json>>& object() const { return object_; }  // in file order
  const Json* find(std::string_view key) const;  // null if absent or not an object

 private:
  friend class JsonParser;
  Kind kind_ = Kind::kNull;
  bool bool_ = false;
  int64_t int_ = 0;
  uint64_t uint_ = 0;
  double double_ = 0;
  std::string string_;
  std::vector<Json> array_;
  std::vector<std::pair<std::string, Json>> object_;
};

class JsonError : public std::runtime_error {
 public:
  JsonError(const std::string& what, size_t offset) : std::runtime_error(what), offset(offset) {}
  size_t offset;
};

}  // namespace rocket
