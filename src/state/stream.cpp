#include "state/stream.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
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
  void* memory = std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64));
  if (!memory) throw PlanError(std::string(what) + ": the system refused " + format_bytes(bytes));
  std::memset(memory, 0, static_cast<size_t>(bytes));
  used_ += bytes;
  return Block(static_cast<float*>(memory), [this, bytes](float* p) {
    used_ -= bytes;
    std::free(p);
  });
}

StatePool::Block StatePool::recurrent(const char* what) {
  return take(layout_.recurrent_floats(), what);
}

StatePool::Block StatePool::page() {
  return take(layout_.page_floats(), "page");
}

StreamState::StreamState(StatePool& pool)
    : pool_(pool), recurrent_(pool.recurrent("stream")), part_pages_(pool.layout().paged().size()) {}

StreamState::StreamState(const StreamState& other)
    : pool_(other.pool_),
      recurrent_(other.pool_.recurrent("copy of a stream")),
      pages_(other.pages_),
      part_pages_(other.part_pages_),
      tokens_(other.tokens_),
      embeddings_(other.embeddings_) {
  std::memcpy(recurrent_.get(), other.recurrent_.get(),
              static_cast<size_t>(pool_.layout().recurrent_floats()) * 4);
}

PagedRows StreamState::rows(int part) const {
  const PagedPart& info = pool_.layout().paged()[static_cast<size_t>(part)];
  return {part_pages_[static_cast<size_t>(part)].data(), info.page_rows, info.width};
}

void StreamState::link_page(size_t index) {
  for (size_t part = 0; part < part_pages_.size(); ++part) {
    std::vector<float*>& pages = part_pages_[part];
    if (pages.size() <= index) pages.resize(index + 1);
    pages[index] = pages_[index].get() + pool_.layout().paged()[part].offset;
  }
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
    std::memcpy(copy.get(), pages_[i].get(), static_cast<size_t>(layout.page_floats()) * 4);
    pages_[i] = std::move(copy);
    link_page(i);
  }
  while (pages_.size() < needed) {
    pages_.push_back(pool_.page());
    link_page(pages_.size() - 1);
  }
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
  for (std::vector<float*>& pages : part_pages_) pages.resize(pages_.size());
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
