// Values in a message between ranks: written one after the other and read in the same order. Both ends run the same
// version of Rocket on machines of one byte order; a message that ends early is a DeviceError.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/error.h"

namespace rocket {

class ParcelWriter {
 public:
  template <typename T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    data_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void text(std::string_view value) {
    put(static_cast<uint64_t>(value.size()));
    data_.append(value);
  }
  template <typename T>
  void array(const T* values, size_t count) {
    put(static_cast<uint64_t>(count));
    data_.append(reinterpret_cast<const char*>(values), count * sizeof(T));
  }
  const std::string& data() const { return data_; }

 private:
  std::string data_;
};

class ParcelReader {
 public:
  explicit ParcelReader(std::string_view data) : data_(data) {}

  template <typename T>
  T get() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    std::memcpy(&value, take(1, sizeof value), sizeof value);
    return value;
  }
  std::string text() {
    const auto size = get<uint64_t>();
    return std::string(take(size, 1), size);
  }
  // Of values of any alignment.
  template <typename T>
  void array(std::vector<T>& values) {
    const auto count = get<uint64_t>();
    const char* const from = take(count, sizeof(T));
    values.resize(count);
    if (count > 0) std::memcpy(values.data(), from, count * sizeof(T));
  }
  bool done() const { return data_.empty(); }

 private:
  const char* take(uint64_t count, size_t size) {
    if (count > data_.size() / size) {
      throw DeviceError("boosters: a message of rank 0 ends early",
                        "start the same version of Rocket on all ranks");
    }
    const char* const at = data_.data();
    data_.remove_prefix(count * size);
    return at;
  }
  std::string_view data_;
};

}  // namespace rocket
