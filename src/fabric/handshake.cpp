#include "fabric/handshake.h"

#include <algorithm>
#include <cstdio>

#include "base/error.h"
#include "fabric/parcel.h"

namespace rocket {
namespace {

constexpr char kHint[] = "start the same build with the same fuel, split and options on machines of one kind";

std::string packed(const Paper& paper) {
  ParcelWriter parcel;
  for (const auto& [name, value] : paper) {
    parcel.text(name);
    parcel.text(value);
  }
  return parcel.data();
}

Paper unpacked(const std::string& message) {
  Paper paper;
  for (ParcelReader parcel(message); !parcel.done();) {
    std::string name = parcel.text();
    paper.emplace_back(std::move(name), parcel.text());
  }
  return paper;
}

// Empty if there is none.
std::string difference(const Paper& mine, const Paper& other, int32_t rank) {
  const std::string who = "rank " + std::to_string(rank);
  for (size_t i = 0; i < std::max(mine.size(), other.size()); ++i) {
    if (i >= mine.size() || i >= other.size() || mine[i].first != other[i].first)
      return "boosters: " + who + " compares other things than rank 0: it is of another version";
    const auto& [name, value] = mine[i];
    if (value != other[i].second)
      return "boosters: " + name + ": rank 0 has " + value + ", " + who + " has " + other[i].second;
  }
  return {};
}

}  // namespace

void compare_papers(Fabric& fabric, const Paper& mine) {
  const std::vector<std::string> all = fabric.gather(packed(mine), "what it was started with");
  std::string found;
  for (size_t r = 1; r < all.size() && found.empty(); ++r)
    found = difference(mine, unpacked(all[r]), static_cast<int32_t>(r));
  if (fabric.rank() == 0) {
    fabric.tell(found);
  } else {
    found = fabric.hear("whether all ranks agree");
  }
  if (!found.empty()) throw DeviceError(found, kHint);
}

void follow_rank0(Fabric& fabric, std::vector<int64_t>& numbers, const std::string& what) {
  if (fabric.rank() == 0) {
    ParcelWriter parcel;
    parcel.array(numbers.data(), numbers.size());
    fabric.tell(parcel.data());
  } else {
    const std::string message = fabric.hear(what);
    ParcelReader(message).array(numbers);
  }
}

void least_of_all(Fabric& fabric, std::vector<int64_t>& numbers, const std::string& what) {
  ParcelWriter parcel;
  parcel.array(numbers.data(), numbers.size());
  const std::vector<std::string> all = fabric.gather(parcel.data(), what);
  for (const std::string& message : all) {
    std::vector<int64_t> other;
    ParcelReader(message).array(other);
    for (size_t i = 0; i < std::min(numbers.size(), other.size()); ++i)
      numbers[i] = std::min(numbers[i], other[i]);
  }
  follow_rank0(fabric, numbers, what);
}

std::string digest(const void* data, size_t bytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3u;
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

}  // namespace rocket
