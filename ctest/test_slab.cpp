// Slabs: what is written is read back bit for bit, from slots of any alignment, by readers that give parts, fail, lie or
// hang; and files that are no slab, another fuel's, damaged, or changed while in use.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "experts/slab_store.h"
#include "experts/slab_writer.h"
#include "fuel_files.h"

using namespace rocket;
using check::expect;
using fuel_files::TempDir;
using fuel_files::throws;

namespace {

constexpr int32_t kLayers = 2, kExperts = 9;

Weight shape(WeightFormat format, int64_t out, int64_t in) {
  return Weight{format, out, in, nullptr, nullptr, 1.0f};
}

// Of several sizes: less than a block, some blocks, more than one read.
ExpertWeights make_expert(int32_t layer, int32_t expert) {
  if (expert == 4 && layer == 1) {
    return {shape(WeightFormat::kBF16, 512, 640), shape(WeightFormat::kBF16, 512, 640),
            shape(WeightFormat::kBF16, 640, 512)};
  }
  const WeightFormat format = expert % 2 ? WeightFormat::kBF16 : WeightFormat::kNVFP4;
  const int64_t in = 64 + 16 * expert;
  return {shape(format, 32, in), shape(format, 32, in), shape(format, in, 32)};
}

// Bytes that tell every place of every expert apart.
class SourceStore : public ExpertStore {
 public:
  const char* name() const override { return "source"; }
  int32_t pieces() const override { return 3; }
  void fetch(int32_t layer, int32_t expert, int32_t piece, const SlotLayout& layout,
             void* slot) const override {
    const size_t part = static_cast<size_t>(piece);
    const int seed = (layer * kExperts + expert) * 3 + piece;
    const auto put = [&](int64_t at, int64_t bytes, int more) {
      const std::string some = fuel_files::pattern(static_cast<size_t>(bytes), seed + more);
      std::memcpy(static_cast<char*>(slot) + at, some.data(), some.size());
    };
    put(layout.data_at[part], layout.data_bytes[part], 0);
    if (layout.scale_bytes[part] > 0) put(layout.scale_at[part], layout.scale_bytes[part], 100);
  }
};

// The same, but for one byte of one expert.
class OtherStore : public SourceStore {
 public:
  void fetch(int32_t layer, int32_t expert, int32_t piece, const SlotLayout& layout,
             void* slot) const override {
    SourceStore::fetch(layer, expert, piece, layout, slot);
    if (layer == 1 && expert == 6 && piece == 0) static_cast<char*>(slot)[11] ^= 1;
  }
};

struct Fuel {
  Fuel() {
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      for (int32_t e = 0; e < kExperts; ++e) table[layer].push_back(make_expert(layer, e));
      tables.emplace_back(table[layer]);
    }
  }
  SlabHeader plan(uint64_t fingerprint = 7, uint64_t sample = 8) const {
    return plan_slab(fingerprint, sample, {3, 5}, tables);
  }
  void write(const std::string& dir) const { write_slab(dir, plan(), SourceStore(), tables, {}); }
  std::vector<ExpertWeights> table[kLayers];
  std::vector<std::span<const ExpertWeights>> tables;
};

// Slots that hold the experts asked for, `shift` bytes off a block.
struct Slots {
  Slots(const Fuel& fuel, int32_t layer, const std::vector<int32_t>& experts, int64_t shift) {
    for (const int32_t e : experts) layouts.push_back(slot_layout(fuel.table[layer][static_cast<size_t>(e)]));
    for (size_t i = 0; i < experts.size(); ++i) {
      std::vector<char>& room =
          memory.emplace_back(static_cast<size_t>(layouts[i].bytes + 2 * kSlabAlignment), '\xEE');
      char* base = room.data() + kSlabAlignment - reinterpret_cast<uintptr_t>(room.data()) % kSlabAlignment;
      reads.push_back({experts[i], &layouts[i], base + shift});
    }
  }
  // Every expert's own bytes, zeros between its parts, and nothing written behind it.
  bool right(int32_t layer) const {
    for (const ExpertRead& read : reads) {
      std::vector<char> wanted(static_cast<size_t>(read.layout->bytes), '\0');
      SourceStore source;
      for (int32_t piece = 0; piece < 3; ++piece)
        source.fetch(layer, read.expert, piece, *read.layout, wanted.data());
      const char* const slot = static_cast<const char*>(read.slot);
      if (std::memcmp(slot, wanted.data(), wanted.size()) != 0 || slot[wanted.size()] != '\xEE') return false;
    }
    return true;
  }
  std::deque<SlotLayout> layouts;
  std::deque<std::vector<char>> memory;
  std::vector<ExpertRead> reads;
};

// Hands reads on, and changes what comes of them.
class BadReader : public DiskReader {
 public:
  struct Orders {
    int starts = 0;
    int64_t most = INT64_MAX;  // bytes a read gives
    int error = 0, error_from = 0, error_until = 0;
    int hang_from = INT32_MAX;
    bool lie = false;
  };
  BadReader(int depth, Orders* orders) : orders_(orders), under_(make_thread_reader(depth)) {}
  const char* name() const override { return "bad"; }
  int depth() const override { return under_->depth(); }
  void start(DiskRead& read) override {
    const int number = orders_->starts++;
    if (number >= orders_->hang_from) return;
    const bool fails = number >= orders_->error_from && number < orders_->error_until;
    if (fails) failing_.push_back(&read);
    read.bytes = std::min(read.bytes, orders_->most);
    under_->start(read);
  }
  DiskRead* wait(Clock::time_point until) override {
    DiskRead* const read = under_->wait(until);
    if (read == nullptr) return nullptr;
    if (const auto at = std::find(failing_.begin(), failing_.end(), read); at != failing_.end()) {
      failing_.erase(at);
      read->result = -orders_->error;
      std::memset(read->to, 0xDD, 100);
    } else if (orders_->lie && read->result > 50) {
      static_cast<char*>(read->to)[50] ^= 1;
    }
    return read;
  }

 private:
  Orders* orders_;
  std::unique_ptr<DiskReader> under_;
  std::vector<DiskRead*> failing_;
};

const std::vector<int32_t> kSome = {0, 1, 4, 5, 8};

void round_trip(const Fuel& fuel, const std::string& dir) {
  for (const bool uring : {true, false}) {
    ::setenv("ROCKET_IO_URING", uring ? "1" : "0", 1);
    const SlabStore store(dir, fuel.plan());
    expect(store.note().find(slab_path(dir)) != std::string::npos, "the note names the file");
    for (const int64_t shift : {int64_t{0}, int64_t{256}}) {
      for (int32_t layer = 0; layer < kLayers; ++layer) {
        Slots slots(fuel, layer, kSome, shift);
        store.fetch_all(layer, slots.reads);
        expect(slots.right(layer), std::string(store.name()) + ": what was written is read");
        Slots one(fuel, layer, {3}, shift);
        store.fetch(layer, 3, 0, one.layouts[0], one.reads[0].slot);
        expect(one.right(layer), std::string(store.name()) + ": one alone");
      }
    }
    store.fetch_all(0, {});
  }
  ::unsetenv("ROCKET_IO_URING");
  verify_slab(dir, fuel.plan(), SourceStore(), fuel.tables, {});
}

void bad_readers(const Fuel& fuel, const std::string& dir) {
  using Orders = BadReader::Orders;
  const auto fetch = [&](Orders& orders, int depth) {
    const SlabStore store(dir, fuel.plan(), std::make_unique<BadReader>(depth, &orders));
    Slots slots(fuel, 1, kSome, 256);
    store.fetch_all(1, slots.reads);
    expect(slots.right(1), "the right bytes");
  };
  for (const int depth : {1, 3, 32}) {
    Orders parts{.most = 4096};
    fetch(parts, depth);
    expect(parts.starts > 400, "many parts of one read");
    Orders once{.error = EIO, .error_from = 1, .error_until = 2};
    fetch(once, depth);
    Orders always{.error = EIO, .error_from = 2, .error_until = 1000};
    throws<FuelError>(
        "a read that fails twice", [&] { fetch(always, depth); },
        {"expert ", " of layer 5: ", "experts.slab: cannot read at byte ", "Input/output error"});
    Orders lie{.lie = true};
    throws<FuelError>("a disk that lies", [&] { fetch(lie, depth); },
                      {" of layer 5: ", "experts.slab: its bytes do not agree with their checksum"});
    ::setenv("ROCKET_EXPERT_READ_SECONDS", "0.05", 1);
    Orders hang{.hang_from = 3};
    throws<DeviceError>("a disk that hangs", [&] { fetch(hang, depth); },
                        {" of layer 5: ", "experts.slab: the disk gave nothing for 0.05 s"});
    ::unsetenv("ROCKET_EXPERT_READ_SECONDS");
  }
}

void hung_for_good(const Fuel& fuel, const std::string& dir) {
  ::setenv("ROCKET_EXPERT_READ_SECONDS", "0.05", 1);
  BadReader::Orders orders{.hang_from = 0};
  const SlabStore store(dir, fuel.plan(), std::make_unique<BadReader>(4, &orders));
  Slots slots(fuel, 0, {2}, 0);
  expect(!store.hung(), "not yet hung");
  throws<DeviceError>("hangs", [&] { store.fetch_all(0, slots.reads); }, {"expert 2 of layer 3"});
  orders.hang_from = INT32_MAX;
  throws<DeviceError>("and is not asked again", [&] { store.fetch_all(0, slots.reads); },
                      {"expert 2 of layer 3"});
  expect(store.hung(), "its slots must stay");
  ::unsetenv("ROCKET_EXPERT_READ_SECONDS");
}

void flip(const std::string& path, int64_t at, char with = 1) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  const char byte = static_cast<char>(file.get() ^ with);
  file.seekp(at);
  file.put(byte);
}

void changes_while_in_use(const Fuel& fuel) {
  const auto after = [&](const std::string& what, std::initializer_list<std::string> words, auto change) {
    const TempDir dir;
    fuel.write(dir.path());
    const SlabStore store(dir.path(), fuel.plan());
    Slots slots(fuel, 1, kSome, 0);
    store.fetch_all(1, slots.reads);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // files have the time of the last tick
    change(slab_path(dir.path()), store.header());
    throws<FuelError>(what, [&] { store.fetch_all(1, slots.reads); }, words);
  };
  after("cut before an expert", {"expert ", " of layer 5", "truncated while in use"},
        [](const std::string& path, const SlabHeader& header) {
          std::filesystem::resize_file(path, static_cast<uintmax_t>(header.at(1, 3).at));
        });
  after("cut within an expert", {" of layer 5", "truncated while in use"},
        [](const std::string& path, const SlabHeader& header) {
          std::filesystem::resize_file(path, static_cast<uintmax_t>(header.at(1, 4).at + 5000));
        });
  after("cut behind what is read", {"of layer 5", "changed while in use", "expected"},
        [](const std::string& path, const SlabHeader& header) {
          std::filesystem::resize_file(path, static_cast<uintmax_t>(header.file_bytes - 1));
        });
  after("written to where nobody looks", {"of layer 5", "changed while in use", "written"},
        [](const std::string& path, const SlabHeader& header) { flip(path, header.at(0, 0).at); });
  after("written to", {"expert 5 of layer 5", "checksum"},
        [](const std::string& path, const SlabHeader& header) { flip(path, header.at(1, 5).at + 9); });
}

void refused(const Fuel& fuel) {
  const auto of = [&](const std::string& what, std::initializer_list<std::string> words, auto change,
                      const SlabHeader& expected) {
    const TempDir dir;
    fuel.write(dir.path());
    change(slab_path(dir.path()));
    throws<FuelError>(what, [&] { SlabStore(dir.path(), expected); }, words);
  };
  const SlabHeader mine = fuel.plan();
  const auto nothing = [](const std::string&) {};
  const auto cut = [](int64_t bytes) {
    return [bytes](const std::string& path) {
      std::filesystem::resize_file(path, static_cast<uintmax_t>(bytes));
    };
  };
  of(
      "no file", {"experts.slab: cannot open"},
      [](const std::string& path) { std::filesystem::remove(path); }, mine);
  of(
      "another file", {"not a slab"},
      [](const std::string& path) { fuel_files::write_file(path, "something"); }, mine);
  of("an empty file", {"not a slab"}, cut(0), mine);
  of("cut in its front", {"truncated", "found 20"}, cut(20), mine);
  of("cut in its header", {"truncated", "header"}, cut(100), mine);
  of("cut by a byte", {"truncated: expected", "found"}, cut(mine.file_bytes - 1), mine);
  of("grown", {"damaged: expected", "found"}, cut(mine.file_bytes + 4096), mine);
  of("another version", {"version 2", "version 3"}, [](const std::string& path) { flip(path, 8, 1); }, mine);
  of(
      "layers beyond reason", {"MoE layers", "do not go with"},
      [](const std::string& path) { flip(path, 15, 64); }, mine);
  of("a damaged header", {"checksum"}, [](const std::string& path) { flip(path, 60); }, mine);
  of("another fuel", {"another fuel", "shapes"}, nothing, fuel.plan(1, 8));
  of("other weights", {"another fuel", "other weights"}, nothing, fuel.plan(7, 9));
  SlabHeader fewer = mine;
  fewer.layers.pop_back();
  of("other layers", {"another fuel", "1 MoE layers"}, nothing, fewer);
  SlabHeader other = mine;
  other.slot[10].formats ^= 1;
  of("another format", {"expert 1 of layer 5", "formats"}, nothing, other);

  const TempDir dir;
  fuel.write(dir.path());
  flip(slab_path(dir.path()), mine.at(1, 2).at + 77);
  throws<FuelError>("verified", [&] { verify_slab(dir.path(), mine, SourceStore(), fuel.tables, {}); },
                    {"expert 2 of layer 5", "checksum"});
  const TempDir whole;
  fuel.write(whole.path());
  throws<FuelError>("a slab whose fuel has another byte",
                    [&] { verify_slab(whole.path(), mine, OtherStore(), fuel.tables, {}); },
                    {"expert 6 of layer 5", "not those of the fuel", "differ at byte 11 of"});
}

void writing(const Fuel& fuel) {
  const TempDir dir;
  const auto files = [&] {
    return std::distance(std::filesystem::directory_iterator(dir.path()),
                         std::filesystem::directory_iterator());
  };
  struct Stop {};
  int64_t last = 0, all = 0;
  try {
    write_slab(dir.path(), fuel.plan(), SourceStore(), fuel.tables, [](int64_t, int64_t) { throw Stop(); });
    expect(false, "stopped");
  } catch (const Stop&) {
  }
  expect(files() == 0, "what was stopped leaves nothing");
  fuel_files::write_file(dir / "experts.slab.part", std::string(123456, 'x'));  // left by a crash
  write_slab(dir.path(), fuel.plan(), SourceStore(), fuel.tables, [&](int64_t done, int64_t total) {
    expect(done > last && done <= total, "progress goes forward");
    last = done, all = total;
  });
  expect(last == all && all == fuel.plan().file_bytes, "up to the end");
  expect(files() == 1, "one file is left");
  expect(static_cast<int64_t>(std::filesystem::file_size(slab_path(dir.path()))) == all,
         "of the planned size");
  fuel.write(dir / "made/for/it");
  SlabStore(dir / "made/for/it", fuel.plan());
  fuel_files::write_file(dir / "file", "x");
  throws<DeviceError>("a file in place of the folder", [&] { fuel.write(dir / "file"); },
                      {"file: cannot make the folder"});
}

// Any change of a byte, and any two words that change places, give another checksum.
void checksums() {
  std::string data = fuel_files::pattern(1003, 1);
  const auto sum = [&] { return slab_checksum(data.data(), static_cast<int64_t>(data.size())); };
  const uint64_t before = sum();
  bool all = true;
  for (char& byte : data) {
    byte ^= 16;
    all &= sum() != before;
    byte ^= 16;
  }
  for (size_t i = 0; i + 16 <= data.size(); i += 8) {
    std::swap_ranges(&data[i], &data[i] + 8, data.end() - 8);
    all &= sum() != before;
    std::swap_ranges(&data[i], &data[i] + 8, data.end() - 8);
  }
  expect(all && sum() == before, "checksums tell changes");
  expect(slab_checksum(data.data(), 64) != slab_checksum(data.data(), 128), "and sizes");
  const std::string zeros(256, '\0');
  expect(slab_checksum(zeros.data(), 64) != slab_checksum(zeros.data(), 128), "even of zeros");
}

}  // namespace

int main() {
  checksums();
  const Fuel fuel;
  const TempDir dir;
  fuel.write(dir.path());
  round_trip(fuel, dir.path());
  bad_readers(fuel, dir.path());
  hung_for_good(fuel, dir.path());
  changes_while_in_use(fuel);
  refused(fuel);
  writing(fuel);
  return check::finish("test_slab");
}
