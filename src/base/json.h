// A strict JSON reader for files that are not trusted: safetensors headers and config.json.
//
// RFC 8259, UTF-8 checked, duplicate keys refused, depth at most 64, at most 2^24 values (more than a header
// of 100 MB can honestly hold). Integers that fit in int64/uint64 stay exact.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace rocket {

class Json {
 public:
  enum class Kind { kNull, kBool, kInt, kUint, kDouble, kString, kArray, kObject };
  using Array = std::vector<Json>;
  using Object = std::vector<std::pair<std::string, Json>>;

  // Throws JsonError with the byte offset of what is wrong.
  static Json parse(std::string_view text);

  Kind kind() const { return static_cast<Kind>(value_.index()); }
  bool is_null() const { return kind() == Kind::kNull; }
  bool is_bool() const { return kind() == Kind::kBool; }
  bool is_number() const { return is_integer() || kind() == Kind::kDouble; }
  bool is_integer() const { return kind() == Kind::kInt || kind() == Kind::kUint; }
  bool is_string() const { return kind() == Kind::kString; }
  bool is_array() const { return kind() == Kind::kArray; }
  bool is_object() const { return kind() == Kind::kObject; }

  // Of a value of another kind these give false, nothing, 0 and empty.
  bool boolean() const;
  std::optional<int64_t> integer() const;  // exact, else nothing; 3.0 is not an integer
  std::optional<uint64_t> unsigned_integer() const;
  double number() const;
  const std::string& string() const;
  const Array& array() const;
  const Object& object() const;                  // in file order
  const Json* find(std::string_view key) const;  // null if absent or not an object

  // "null", "true or false", "a number", "a string", "an array", "an object".
  const char* kind_name() const;

 private:
  friend class JsonParser;
  struct Members {
    Object items;
    std::vector<uint32_t> by_key;  // indices into items, sorted by key; empty for few items
  };
  // In the order of Kind. Members are behind a pointer, since most values are numbers and short strings.
  std::variant<std::monostate, bool, int64_t, uint64_t, double, std::string, Array,
               std::shared_ptr<const Members>>
      value_;
};

class JsonError : public std::runtime_error {
 public:
  JsonError(const std::string& what, size_t offset) : std::runtime_error(what), offset(offset) {}
  size_t offset;
};

// Text from an untrusted file in double quotes for a message: always one line of printable characters, cut
// where long.
std::string json_quote(std::string_view text);

}  // namespace rocket
