#include "experts/hint_reads.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <utility>

#include "base/error.h"

namespace rocket {
namespace {

// Stores end a read by themselves when a part of it takes longer than the limit. An expert has several parts: this many
// limits pass before the read as a whole is given up.
constexpr int kLimits = 4;

}  // namespace

// Of the thread and its user; the last of them frees it.
struct HintReads::State {
  std::shared_ptr<const ExpertStore> store;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<HintedRead>> waiting;
  std::shared_ptr<HintedRead> under_way;
  std::vector<Finished> finished;
  bool held = false, serving = false;

  // True: a job has to be posted that serves.
  bool wants_service() {
    if (held || serving || waiting.empty()) return false;
    return serving = true;
  }

  void serve() {
    std::unique_lock lock(mutex);
    while (!held && !waiting.empty()) {
      under_way = std::move(waiting.front());
      waiting.pop_front();
      const std::shared_ptr<HintedRead> read = under_way;
      lock.unlock();
      const bool there = bring(*read);
      lock.lock();
      under_way = nullptr;
      finished.push_back({read, there});
      changed.notify_all();
    }
    serving = false;
  }

  bool bring(const HintedRead& hinted) const {
    const ExpertRead read{hinted.expert, &hinted.layout, hinted.slot};
    try {
      store->fetch_all(hinted.layer, {&read, 1});
      return true;
    } catch (...) {
      return false;
    }
  }
};

HintReads::HintReads(std::shared_ptr<const ExpertStore> store)
    : state_(std::make_shared<State>()), limit_(kLimits * expert_read_limit()) {
  state_->store = std::move(store);
}

HintReads::~HintReads() {
  stop();
}

void HintReads::stop() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->held = true;
    state_->waiting.clear();
  }
  if (!hung_) wait();
}

void HintReads::start() {
  if (!threads_) threads_ = std::make_unique<ReadThreads>(1);
}

void HintReads::add(std::shared_ptr<HintedRead> read) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->waiting.push_back(std::move(read));
    if (!state_->wants_service()) return;
  }
  threads_->post([state = state_] { state->serve(); });
}

bool HintReads::drop(const HintedRead* read) {
  const std::lock_guard lock(state_->mutex);
  return std::erase_if(state_->waiting, [&](const auto& other) { return other.get() == read; }) > 0;
}

void HintReads::hold(bool on) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->held = on;
    if (!state_->wants_service()) return;
  }
  threads_->post([state = state_] { state->serve(); });
}

// False, and given up, where the read under way takes longer than it may.
bool HintReads::wait() {
  std::unique_lock lock(state_->mutex);
  if (state_->changed.wait_for(lock, limit_, [&] { return state_->under_way == nullptr; })) return true;
  hung_ = true;
  threads_->leave();
  return false;
}

void HintReads::settle() {
  if (!hung_ && wait()) return;
  const std::lock_guard lock(state_->mutex);
  const std::string what = state_->under_way
                               ? "expert " + std::to_string(state_->under_way->expert) + " of MoE layer " +
                                     std::to_string(state_->under_way->layer) + " (from 0)"
                               : "an expert";
  throw_hung(took_too_long(what + ", hinted: " + state_->store->name(), limit_));
}

std::vector<HintReads::Finished> HintReads::finished() {
  const std::lock_guard lock(state_->mutex);
  return std::exchange(state_->finished, {});
}

}  // namespace rocket
