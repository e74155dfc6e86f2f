// The state of streams: blocks and pages from one budget, copy-on-write pages, token history.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/memory_space.h"
#include "ops/pages.h"
#include "state/layout.h"

namespace rocket {

// Hands out zeroed float blocks of a memory space and counts them against a budget in bytes.
class StatePool {
 public:
  StatePool(const StateLayout& layout, int64_t budget_bytes, MemorySpace& memory = host_memory())
      : layout_(layout), budget_(budget_bytes), memory_(memory) {}

  using Block = std::shared_ptr<float>;
  Block recurrent(const char* what);  // throws PlanError over budget, with both sides
  Block page();
  Block table(int64_t pages);  // room for so many pointers to pages

  int64_t used_bytes() const { return used_; }
  int64_t budget_bytes() const { return budget_; }
  const StateLayout& layout() const { return layout_; }
  MemorySpace& memory() const { return memory_; }

 private:
  Block take(int64_t floats, const char* what);

  StateLayout layout_;
  int64_t budget_;
  MemorySpace& memory_;
  int64_t used_ = 0;
};

// A stream's past: what was fed, and the state after it. Copying shares pages; the recurrent block is copied.
class StreamState {
 public:
  explicit StreamState(StatePool& pool);
  StreamState(const StreamState& other);  // throws PlanError
  StreamState& operator=(const StreamState&) = delete;

  int64_t position() const { return static_cast<int64_t>(tokens_.size()); }
  const std::vector<int32_t>& tokens() const { return tokens_; }  // -1 where an embedding was fed
  const std::map<int64_t, std::vector<float>>& embeddings() const { return embeddings_; }  // by position

  // Both in the pool's memory space, which may be a device's.
  float* recurrent() const { return recurrent_.get(); }
  float* const* page_table() const { return reinterpret_cast<float* const*>(table_.get()); }

  // Runs of whole rows of a paged part (index in StateLayout::paged()) that lie together: address in the pool's
  // memory space and bytes, for the first `rows` rows.
  std::vector<std::pair<char*, size_t>> runs(int part, int64_t rows) const;

  // Makes room for `count` more tokens: allocates pages, and copies those that others share. Throws PlanError
  // and changes nothing that can be seen.
  void reserve(int64_t count);
  void push(int32_t token, const float* embedding, int64_t hidden);
  // Cuts to `position` tokens; the recurrent block is then `block`, which is taken over.
  void cut(int64_t position, StatePool::Block block);
  bool starts_with(const StreamState& past) const;  // the past's tokens are the first ones of this stream
  void set_history(std::vector<int32_t> tokens, std::map<int64_t, std::vector<float>> embeddings);

 private:
  void link_pages();

  StatePool& pool_;
  StatePool::Block recurrent_;
  std::vector<StatePool::Block> pages_;
  StatePool::Block table_;  // [capacity_] addresses of the pages, in the pool's memory space
  int64_t capacity_ = 0;
  size_t unlinked_ = 0;  // pages from here on are not in the table yet
  std::vector<int32_t> tokens_;
  std::map<int64_t, std::vector<float>> embeddings_;
};

}  // namespace rocket
