// Where each layer keeps its state for a stream.
//
// Two kinds. The recurrent block has a fixed size and is overwritten by every row: KDA matrix and conv tail,
// and the raw keys and gates of the indexer's unfinished pool. A checkpoint or snapshot copies it. The paged
// part only ever grows: a page holds, for page_tokens tokens, each sparse-MLA layer's latents and pooled
// indexer keys. Going back is cutting the length, so pages are shared between streams and snapshots until
// somebody writes to one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace rocket {

struct RecurrentPart {
  std::string name;            // "kda/3"
  std::vector<int64_t> shape;  // of the floats
  int64_t offset = 0;          // floats from the start of the block
  int64_t floats = 0;
};

struct PagedPart {
  std::string name;            // "latent/3"
  int32_t tokens_per_row = 1;  // pooled keys: one row for `pool` tokens
  int32_t width = 0;           // elements a row
  bool bf16 = false;           // stored as bfloat16, else as float32
  int64_t offset = 0;          // floats from the start of a page
  int32_t page_rows = 0;       // rows of this part in a page

  int64_t row_bytes() const { return int64_t{width} * (bf16 ? 2 : 4); }
};

class StateLayout {
 public:
  // page_tokens is rounded up to a multiple of every tokens_per_row that is added later.
  explicit StateLayout(int32_t page_tokens = 64) : page_tokens_(page_tokens) {}

  int add_recurrent(const std::string& name, const std::vector<int64_t>& shape);  // index of the part
  int add_paged(const std::string& name, int32_t tokens_per_row, int32_t width, bool bf16 = false);
  void finish();  // fixes offsets

  const std::vector<RecurrentPart>& recurrent() const { return recurrent_; }
  const std::vector<PagedPart>& paged() const { return paged_; }
  int64_t recurrent_floats() const { return recurrent_floats_; }
  int64_t page_floats() const { return page_floats_; }
  int32_t page_tokens() const { return page_tokens_; }

  int64_t stream_bytes() const { return recurrent_floats_ * 4; }
  double token_bytes() const;  // paged bytes a token
  int64_t pages(int64_t tokens) const { return (tokens + page_tokens_ - 1) / page_tokens_; }
  // Blocks, pages and page table (which doubles as it grows) of a stream of so many tokens.
  int64_t bytes(int64_t tokens) const {
    return stream_bytes() + pages(tokens) * (page_floats_ * 4 + 24) + 1024;
  }

 private:
  std::vector<RecurrentPart> recurrent_;
  std::vector<PagedPart> paged_;
  int64_t recurrent_floats_ = 0, page_floats_ = 0;
  int32_t page_tokens_;
};

}  // namespace rocket
