// Routing traces: what is written is read, while it is being written, after any cut, and never after a change.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>

#include "base/error.h"
#include "check.h"
#include "experts/trace.h"

using namespace rocket;
using check::expect;

namespace {

std::mt19937_64 rng(20261201);
int32_t draw(int32_t low, int32_t high) {
  return std::uniform_int_distribution<int32_t>(low, high)(rng);
}

struct Folder {
  Folder() {
    path = (std::filesystem::temp_directory_path() / "rocket-trace-XXXXXX").string();
    if (!mkdtemp(path.data())) std::abort();
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string operator/(const std::string& name) const { return path + "/" + name; }
  std::string path;
};

struct Recorded {
  TraceHeader header;
  std::vector<TraceRow> rows;
  std::vector<std::vector<int32_t>> ids;  // of each row [layers, topk], ascending in a layer
};

TraceHeader header_of(int32_t layers, int32_t experts, int32_t topk) {
  TraceHeader header;
  header.experts = experts;
  header.topk = topk;
  header.fingerprint = 0x0123456789abcdefull;
  for (int32_t i = 0; i < layers; ++i) header.layers.push_back(3 + i);
  return header;
}

// Writes one step of random rows, and notes what must be read back.
void write_step(TraceWriter& writer, Recorded& recorded, int32_t count) {
  const size_t layers = recorded.header.layers.size(), k = static_cast<size_t>(recorded.header.topk);
  const uint32_t step = recorded.rows.empty() ? 0 : recorded.rows.back().step + 1;
  std::vector<TraceRow> rows;
  for (int32_t i = 0; i < count; ++i) {
    rows.push_back(
        {step, static_cast<uint32_t>(draw(0, 3)), static_cast<uint32_t>(draw(0, 1 << 20)), draw(0, 1) == 1});
  }
  std::vector<std::vector<int32_t>> given(layers);
  const size_t first = recorded.ids.size();
  recorded.ids.resize(first + rows.size(), std::vector<int32_t>(layers * k));
  for (size_t layer = 0; layer < layers; ++layer) {
    for (size_t row = 0; row < rows.size(); ++row) {
      std::vector<int32_t> all(static_cast<size_t>(recorded.header.experts));
      for (size_t e = 0; e < all.size(); ++e) all[e] = static_cast<int32_t>(e);
      std::shuffle(all.begin(), all.end(), rng);
      all.resize(k);
      given[layer].insert(given[layer].end(), all.begin(), all.end());
      std::sort(all.begin(), all.end());
      std::copy(all.begin(), all.end(), recorded.ids[first + row].begin() + static_cast<int64_t>(layer * k));
    }
  }
  writer.begin_step(rows);
  for (size_t layer = layers; layer-- > 0;) writer.layer(static_cast<int32_t>(layer), given[layer]);
  writer.end_step();
  recorded.rows.insert(recorded.rows.end(), rows.begin(), rows.end());
}

// Reads on to the end; gives the number of rows, or -1 if one is not what was recorded.
int64_t read_on(TraceReader& reader, const Recorded& recorded) {
  TraceRow row;
  std::vector<int32_t> ids(recorded.header.ids());
  while (true) {
    const size_t at = static_cast<size_t>(reader.rows());
    if (!reader.next(&row, ids)) return reader.rows();
    if (at >= recorded.rows.size()) return -1;
    const TraceRow& expected = recorded.rows[at];
    if (row.step != expected.step || row.stream != expected.stream || row.position != expected.position ||
        row.prefill != expected.prefill || ids != recorded.ids[at]) {
      return -1;
    }
  }
}

std::vector<char> bytes_of(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void write_bytes(const std::string& file, const std::vector<char>& bytes) {
  std::ofstream(file, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

void round_trips(const Folder& folder) {
  for (const int32_t experts : {1, 16, 256, 257, 288}) {
    const std::string file = folder / "trip";
    Recorded recorded{header_of(draw(1, 6), experts, std::min(experts, draw(1, 8))), {}, {}};
    TraceWriter writer(file, recorded.header);
    TraceReader live(file);  // open from the first byte on
    expect(read_on(live, recorded) == 0, "a trace without rows");
    int64_t written = 0;
    for (int step = 0; step < 40; ++step) {
      const int32_t rows = draw(0, 4) ? 1 : draw(0, 40);
      write_step(writer, recorded, rows);
      written += rows;
      if (draw(0, 3)) continue;
      writer.flush();
      expect(read_on(live, recorded) == written, "read while being written");
    }
    writer.close();
    expect(read_on(live, recorded) == written && writer.rows() == written, "read to its end");
    TraceReader reader(file);
    expect(reader.header().layers == recorded.header.layers && reader.header().experts == experts &&
               reader.header().topk == recorded.header.topk &&
               reader.header().fingerprint == recorded.header.fingerprint,
           "the header");
    expect(read_on(reader, recorded) == written && reader.torn_bytes() == 0, "read afterwards");
    expect(bytes_of(file).size() ==
               recorded.header.header_bytes() + static_cast<size_t>(written) * recorded.header.row_bytes(),
           "rows of one size");
  }
}

// The first `rows` rows were read rightly and an InputError with these words followed.
void refused(const std::string& what, const std::string& file, const Recorded& recorded,
             const std::string& word) {
  try {
    TraceReader reader(file);
    const int64_t rows = read_on(reader, recorded);
    expect(false, what + ": expected an error, read " + std::to_string(rows) + " rows");
  } catch (const InputError& error) {
    const std::string text = error.what();
    expect(
        text.find(word) != std::string::npos && text.find(file) != std::string::npos && !error.hint().empty(),
        what + ": '" + word + "' in: " + text);
  }
}

void every_cut_and_every_change(const Folder& folder) {
  const std::string file = folder / "whole", other = folder / "other";
  Recorded recorded{header_of(2, 20, 3), {}, {}};
  {
    TraceWriter writer(file, recorded.header);
    for (int step = 0; step < 3; ++step) write_step(writer, recorded, 2);
  }
  const std::vector<char> whole = bytes_of(file);
  const size_t head = recorded.header.header_bytes(), row = recorded.header.row_bytes();
  for (size_t size = 0; size < whole.size(); ++size) {
    write_bytes(other, {whole.begin(), whole.begin() + static_cast<int64_t>(size)});
    if (size < head) {
      refused("cut at " + std::to_string(size), other, recorded,
              size < 8 ? "routing trace" : "header: expected");
      continue;
    }
    TraceReader reader(other);
    expect(read_on(reader, recorded) == static_cast<int64_t>((size - head) / row) &&
               reader.torn_bytes() == (size - head) % row,
           "cut at " + std::to_string(size));
  }
  for (size_t at = 0; at < whole.size(); ++at) {
    for (const int bit : {0, 3, 7}) {
      std::vector<char> changed = whole;
      changed[at] = static_cast<char>(changed[at] ^ (1 << bit));
      write_bytes(other, changed);
      const std::string expected = at < head ? "expected" : "row " + std::to_string((at - head) / row);
      const bool sum = at < head && at >= 24;  // what has no range of its own is caught by the checksum
      refused("bit " + std::to_string(bit) + " of byte " + std::to_string(at), other, recorded,
              sum                     ? "checksum"
              : at >= 12 && at < head ? ""
                                      : expected);
    }
  }
  std::vector<char> swapped = whole;  // whole rows in another order
  std::swap_ranges(swapped.begin() + static_cast<int64_t>(head),
                   swapped.begin() + static_cast<int64_t>(head + row),
                   swapped.begin() + static_cast<int64_t>(head + 5 * row));
  write_bytes(other, swapped);
  refused("rows out of order", other, {recorded.header, {recorded.rows.back()}, {recorded.ids.back()}},
          "step: expected at least 2");
  std::vector<char> hole = whole;
  std::fill(hole.begin() + static_cast<int64_t>(head + row), hole.end(), 0);
  write_bytes(other, hole);
  refused("a hole", other, recorded, "row 1 (from 0): the checksum");
}

template <typename E>
void throws(const std::string& what, const std::string& word, const std::function<void()>& call) {
  try {
    call();
    expect(false, what + ": expected an error");
  } catch (const E& error) {
    expect(std::string(error.what()).find(word) != std::string::npos, what + ": " + error.what());
  }
}

void wrong_calls(const Folder& folder) {
  const std::string file = folder / "wrong";
  const auto open = [&](TraceHeader header) { return [&file, header] { TraceWriter writer(file, header); }; };
  throws<InputError>("no layers", "MoE layers", open(header_of(0, 8, 2)));
  throws<InputError>("more than all", "top-k: expected from 1 to 8, found 9", open(header_of(1, 8, 9)));
  throws<InputError>("no experts", "experts", open(header_of(1, -1, 1)));
  TraceHeader twice = header_of(2, 8, 2);
  twice.layers[1] = twice.layers[0];
  throws<InputError>("a layer twice", "ascending", open(twice));
  expect(!std::filesystem::exists(file), "a header that cannot be leaves no file");
  throws<DeviceError>("no folder", "cannot write",
                      [&] { TraceWriter writer(folder / "no/where", header_of(1, 8, 2)); });
  throws<InputError>("no file", "cannot read", [&] { TraceReader reader(folder / "nowhere"); });
  throws<DeviceError>("a folder", "cannot read", [&] { TraceReader reader(folder.path); });
  TraceWriter writer(file, header_of(2, 8, 2));
  const std::vector<TraceRow> one(1);
  const auto layer = [&](int32_t index, std::vector<int32_t> ids) {
    return [&writer, index, ids] { writer.layer(index, ids); };
  };
  writer.begin_step(one);
  throws<InputError>("twice the same expert", "distinct experts", layer(0, {3, 3}));
  writer.begin_step(one);
  throws<InputError>("an expert there is not", "found 8", layer(0, {3, 8}));
  writer.begin_step(one);
  throws<InputError>("too few ids", "2 ids, found 1", layer(0, {3}));
  throws<InputError>("a layer there is not", "layer 2", layer(2, {3, 4}));
  writer.layer(0, std::vector<int32_t>{3, 4});
  throws<InputError>("a layer twice in a step", "once", layer(0, {3, 4}));
  throws<InputError>("a step that is not whole", "before all its layers", [&] { writer.end_step(); });
  writer.begin_step(one);
  writer.layer(0, std::vector<int32_t>{3, 4});
  writer.close();
  expect(bytes_of(file).size() == header_of(2, 8, 2).header_bytes(), "nothing of an open step is written");
}

void a_full_disk() {
  if (::access("/dev/full", W_OK) != 0) {
    std::printf("SKIP  a full disk: this machine has no /dev/full\n");
    return;
  }
  throws<DeviceError>("a full disk", "/dev/full",
                      [] { TraceWriter writer("/dev/full", header_of(1, 8, 2)); });
}

}  // namespace

int main() {
  const Folder folder;
  round_trips(folder);
  every_cut_and_every_change(folder);
  wrong_calls(folder);
  a_full_disk();
  return check::finish("test_trace");
}
