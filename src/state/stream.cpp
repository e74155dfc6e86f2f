#include "state/stream.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "base/error.h"
#include "base/memory.h"

namespace rocket {

StatePool::Block StatePool::take(int64_t floats, const char* what) {
  const int64_t bytes = std::max<int64_t>(floats, 16) * 4;
  if (used_ + bytes > budget_) {
    throw PlanError(std::string(what) + ": the state of all streams would need " +
                        format_bytes(used_ + bytes) + ", the plan allows " + format_bytes(budget_),
                    "close streams or drop snapshots, or lower --max-context");
  }
  void* memory = memory_.allocate(static_cast<size_t>(bytes), what);
  used_ += bytes;
  return Block(static_cast<float*>(memory), [this, bytes](float* p) {
    used_ -= bytes;
    memory_.release(p);
  });
}

StatePool::Block StatePool::recurrent(const char* what) {
  return take(layout_.recurrent_floats(), what);
}

StatePool::Block StatePool::page() {
  return take(layout_.page_floats(), "page");
}

StatePool::Block StatePool::table(int64_t pages) {
  return take((pages * static_cast<int64_t>(sizeof(float*)) + 3) / 4, "page table");
}

StreamState::StreamState(StatePool& pool) : pool_(pool), recurrent_(pool.recurrent("stream")) {}

StreamState::StreamState(const StreamState& other)
    : pool_(other.pool_),
      recurrent_(other.pool_.recurrent("copy of a stream")),
      pages_(other.pages_),
      tokens_(other.tokens_),
      embeddings_(other.embeddings_) {
  pool_.memory().copy(recurrent_.get(), other.recurrent_.get(),
                      static_cast<size_t>(pool_.layout().recurrent_floats()) * 4);
  link_pages();
}

std::vector<std::pair<char*, size_t>> StreamState::runs(int part, int64_t rows) const {
  const PagedPart& info = pool_.layout().paged()[static_cast<size_t>(part)];
  std::vector<std::pair<char*, size_t>> all;
  for (size_t page = 0; rows > 0; ++page) {
    const int64_t here = std::min<int64_t>(rows, info.page_rows);
    all.emplace_back(reinterpret_cast<char*>(pages_[page].get() + info.offset),
                     static_cast<size_t>(here * info.row_bytes()));
    rows -= here;
  }
  return all;
}

// Brings the table that ops read up to date.
void StreamState::link_pages() {
  const auto count = static_cast<int64_t>(pages_.size());
  if (count > capacity_) {
    const int64_t wanted = std::max<int64_t>({count, 2 * capacity_, 8});
    table_ = pool_.table(wanted);
    capacity_ = wanted;
    unlinked_ = 0;
  }
  if (unlinked_ >= pages_.size()) return;
  std::vector<float*> address;
  for (size_t i = unlinked_; i < pages_.size(); ++i) address.push_back(pages_[i].get());
  pool_.memory().write(reinterpret_cast<float**>(table_.get()) + unlinked_, address.data(),
                       address.size() * sizeof(float*));
  unlinked_ = pages_.size();
}

void StreamState::reserve(int64_t count) {
  const StateLayout& layout = pool_.layout();
  if (layout.page_floats() == 0) return;
  const size_t needed = static_cast<size_t>(layout.pages(position() + count));
  // The first page that the new tokens touch. Pages before it stay shared.
  for (size_t i = static_cast<size_t>(position() / layout.page_tokens()); i < std::min(needed, pages_.size());
       ++i) {
    if (pages_[i].use_count() == 1) continue;
    StatePool::Block copy = pool_.page();
    pool_.memory().copy(copy.get(), pages_[i].get(), static_cast<size_t>(layout.page_floats()) * 4);
    pages_[i] = std::move(copy);
    unlinked_ = std::min(unlinked_, i);
  }
  while (pages_.size() < needed) pages_.push_back(pool_.page());
  link_pages();
}

void StreamState::push(int32_t token, const float* embedding, int64_t hidden) {
  if (embedding) embeddings_[position()] = std::vector<float>(embedding, embedding + hidden);
  tokens_.push_back(embedding ? -1 : token);
}

void StreamState::cut(int64_t position, StatePool::Block block) {
  recurrent_ = std::move(block);
  tokens_.resize(static_cast<size_t>(position));
  embeddings_.erase(embeddings_.lower_bound(position), embeddings_.end());
  const StateLayout& layout = pool_.layout();
  if (layout.page_floats() > 0)
    pages_.resize(std::min(pages_.size(), static_cast<size_t>(layout.pages(position))));
  unlinked_ = std::min(unlinked_, pages_.size());
}

bool StreamState::starts_with(const StreamState& past) const {
  if (past.position() > position()) return false;
  if (!std::equal(past.tokens_.begin(), past.tokens_.end(), tokens_.begin())) return false;
  for (const auto& [at, embedding] : past.embeddings_) {
    const auto mine = embeddings_.find(at);
    if (mine == embeddings_.end() || mine->second != embedding) return false;
  }
  return true;
}

void StreamState::set_history(std::vector<int32_t> tokens, std::map<int64_t, std::vector<float>> embeddings) {
  tokens_ = std::move(tokens);
  embeddings_ = std::move(embeddings);
}

}  // namespace rocket
