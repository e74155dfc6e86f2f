// A file mapped read-only, whose pages may go away: a file that is cut short while it is mapped, or a disk that fails,
// turns the next touch of a page into SIGBUS. For these mappings that signal is answered with pages of zeros, and with
// lost(): whoever computes with the bytes asks for it before a result leaves the house.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rocket {

class MappedFile {
 public:
  MappedFile() = default;
  ~MappedFile() { unmap(); }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  // Once. Shared, so that every process on the machine reads one copy. False with errno if the system refuses.
  bool map(int fd, size_t bytes);
  void unmap();

  const uint8_t* data() const { return data_; }
  bool lost() const;  // some of what was read since map() were zeros in place of the file's bytes

 private:
  struct Entry;
  struct Registry;
  const uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
  Entry* entry_ = nullptr;
};

}  // namespace rocket
