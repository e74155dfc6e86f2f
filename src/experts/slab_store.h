// Experts from a slab, each one contiguous read past the page cache, several under way at a time.
//
// Every expert that was read is held against its checksum, and the file against what it was when it was opened: a slab
// that shrinks, is written to or rots ends in an error, never in other weights. A read that gave a part of what was
// asked for is continued; one that failed is tried once more. No wait is longer than the limit.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "experts/disk_reader.h"
#include "experts/slab.h"
#include "experts/store.h"

namespace rocket {

class SlabStore : public ExpertStore {
 public:
  static constexpr int kDepth = 32;               // reads under way
  static constexpr int64_t kReadBytes = 1 << 20;  // of one; a multiple of kSlabAlignment

  // expected: as planned for the fuel. reader: null = make_disk_reader's. Throws FuelError, as read_slab_header.
  SlabStore(const std::string& dir, const SlabHeader& expected, std::unique_ptr<DiskReader> reader = nullptr);
  ~SlabStore() override;

  const char* name() const override { return name_.c_str(); }
  std::string note() const override { return note_; }
  int32_t pieces() const override { return 1; }
  void fetch(int32_t layer, int32_t expert, int32_t piece, const SlotLayout& layout,
             void* slot) const override;
  void fetch_all(int32_t layer, std::span<const ExpertRead> reads) const override;
  bool hung() const override;

  const std::string& path() const { return path_; }
  const SlabHeader& header() const { return header_; }

 private:
  class Flight;
  void open();
  std::string where(int32_t layer, int32_t expert) const;
  void check_unchanged(const std::string& where) const;

  std::string path_, name_, note_;
  SlabHeader header_;
  int fd_ = -1;
  bool direct_ = false;
  int64_t changed_ns_ = 0;
  std::chrono::nanoseconds limit_;
  mutable std::mutex mutex_;  // the reader is one thread's at a time
  mutable std::unique_ptr<DiskReader> reader_;
  mutable std::unique_ptr<Flight> flight_;
  mutable std::string hung_;  // what took too long; after that nothing is read any more
};

}  // namespace rocket
