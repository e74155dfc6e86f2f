// Routing traces: which experts each row of each step took in each MoE layer. A compact file that can be read while it
// is being written.
//
//   header   8 bytes  "RKTROUTE"
//            u32      version, 1
//            u32      MoE layers L
//            u32      experts a layer
//            u32      experts a token takes, k
//            u64      fingerprint of the fuel, 0 = unknown
//            u16 x L  the model's number of each MoE layer, ascending
//            u32      CRC-32 of all before it
//   a row    u32      step; never falls from row to row
//            u32      stream
//            u32      position in the stream
//            u8       flags: 1 = prefill
//            L x k    expert ids, u8 up to 256 experts, else u16; ascending within a layer
//            u32      CRC-32 of the row before it
//
// A step here is what is looked up together: where decode rows run in a pass apart from prompts (Session::passes), a step
// of both is two, and replays as it was counted.
//
// All little-endian. Rows have one size, so a last row that is not whole (still being written, or cut by a crash) is
// known for what it is and left out. Anything else that is wrong is an InputError that names the row.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace rocket {

inline constexpr char kTraceMagic[] = "RKTROUTE";

struct TraceHeader {
  int32_t experts = 0;
  int32_t topk = 0;
  uint64_t fingerprint = 0;
  std::vector<int32_t> layers;  // the model's numbers of the MoE layers, ascending

  size_t ids() const { return layers.size() * static_cast<size_t>(topk); }  // of a row
  size_t id_bytes() const { return experts <= 256 ? 1 : 2; }
  size_t header_bytes() const { return 36 + 2 * layers.size(); }
  size_t row_bytes() const { return 17 + ids() * id_bytes(); }
};

struct TraceRow {
  uint32_t step = 0;  // counted by the writer
  uint32_t stream = 0;
  uint32_t position = 0;
  bool prefill = false;
};

class TraceWriter {
 public:
  // Makes or empties the file. Throws InputError (a header that cannot be), DeviceError (the file).
  TraceWriter(const std::string& path, TraceHeader header);
  ~TraceWriter();  // writes what is left, without a word about failures
  TraceWriter(const TraceWriter&) = delete;
  TraceWriter& operator=(const TraceWriter&) = delete;

  // A step: its rows, then each MoE layer once, in any order, then the end. Nothing of a step that is begun and not
  // ended is written. ids: [rows, topk], in any order within a row.
  void begin_step(std::span<const TraceRow> rows);
  void layer(int32_t index, std::span<const int32_t> ids);
  void end_step();

  void flush();  // whole rows only
  void close();  // flushes; throws where the destructor would be silent
  int64_t rows() const { return rows_; }

 private:
  void write_all(const std::vector<uint8_t>& data);
  void drop_torn_row() const;

  std::string path_;
  TraceHeader header_;
  int fd_ = -1;
  uint32_t step_ = 0;
  int64_t rows_ = 0;
  std::vector<uint8_t> open_;    // rows of the step that is begun
  std::vector<bool> given_;      // layers of it
  std::vector<uint8_t> buffer_;  // whole rows, not yet written
  std::vector<int32_t> sorted_;
};

class TraceReader {
 public:
  // Throws InputError (no such file, no trace), DeviceError (a read error).
  explicit TraceReader(const std::string& path);
  ~TraceReader();
  TraceReader(const TraceReader&) = delete;
  TraceReader& operator=(const TraceReader&) = delete;

  const TraceHeader& header() const { return header_; }
  // The next row; ids: [layers, topk]. False where no whole row is left: more may come while it is being written.
  bool next(TraceRow* row, std::span<int32_t> ids);
  int64_t rows() const { return rows_; }       // read so far
  size_t torn_bytes() const { return torn_; }  // of a row that is not whole, when next() said false

 private:
  size_t read_at(int64_t offset, std::span<uint8_t> to);
  void read_header();
  bool refill();
  [[noreturn]] void wrong(const std::string& what) const;

  std::string path_;
  TraceHeader header_;
  int fd_ = -1;
  int64_t offset_ = 0;  // of what comes after the buffer
  int64_t rows_ = 0;
  uint32_t step_ = 0;
  size_t torn_ = 0;
  std::vector<uint8_t> buffer_;
  size_t at_ = 0, end_ = 0;  // of the buffer, in bytes
};

}  // namespace rocket
