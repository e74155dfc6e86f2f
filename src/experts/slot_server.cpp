#include "experts/slot_server.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "experts/slab.h"
#include "experts/stream.h"

namespace rocket {
namespace {

constexpr int64_t kPartBytes = int64_t{64} << 20;
constexpr int kSpins = 200;  // looks for a request before the thread sleeps between two
constexpr std::chrono::microseconds kNap{20};
constexpr std::chrono::nanoseconds kGrace = std::chrono::seconds(1);  // for the thread to end, at least

}  // namespace

SlotServer::Staging SlotServer::staging_for(int64_t slot_bytes, int32_t experts) {
  Staging staging;
  staging.place_bytes = (slot_bytes + kSlabAlignment - 1) / kSlabAlignment * kSlabAlignment;
  staging.places = std::clamp<int64_t>(kPartBytes / std::max<int64_t>(staging.place_bytes, 1), 1, experts);
  return staging;
}

// Of the server and its thread; the last of them frees it.
struct SlotServer::State {
  std::unique_ptr<SlotCarrier> carrier;
  std::unique_ptr<ExpertStore> store;
  std::vector<std::vector<SlotLayout>> layouts;  // [layers][experts]
  std::vector<int32_t> numbers;
  Staging staging;
  std::chrono::nanoseconds limit{};

  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<bool> looking = false, stop = false;  // set with the lock held
  bool ended = false, left = false;  // left: nobody waits for the thread, and the device's memory may be gone
  std::exception_ptr error;          // the first, for good

  std::mutex carrying;  // store and carrier are one thread's at a time
  uint64_t served = 0, arrived = 0;
  std::atomic<int32_t> brought = 0;  // of the request in hand

  ~State() {
    if (store && store->hung()) carrier->keep_staging();
  }
  static void serve(const std::shared_ptr<State>& state);
  bool wait_for_request();
  void answer();
  void bring(int32_t layer, std::span<const SlotMiss> misses, bool announce);
  void give_up();
  void fail(const std::exception_ptr& why);
  void throw_late();
};

// Reads a group while the one before it is copied.
void SlotServer::State::bring(int32_t layer, std::span<const SlotMiss> misses, bool announce) {
  const std::vector<SlotLayout>& layout = layouts[static_cast<size_t>(layer)];
  std::vector<ExpertRead> reads;
  int part = 0;
  for (size_t first = 0; first < misses.size() && !stop; part = (part + 1) % SlotCarrier::kParts) {
    const size_t count = std::min(misses.size() - first, static_cast<size_t>(staging.places));
    const std::span<const SlotMiss> group = misses.subspan(first, count);
    carrier->wait(part);
    reads.clear();
    for (const SlotMiss& miss : group) {
      char* const place = carrier->staging(part) + static_cast<int64_t>(reads.size()) * staging.place_bytes;
      reads.push_back({miss.expert, &layout[static_cast<size_t>(miss.expert)], place});
    }
    store->fetch_all(layer, reads);
    if (stop) return;  // the slots may be gone, where nobody waited for this thread
    for (size_t i = 0; i < count; ++i)
      carrier->copy(part, group[i].slot, static_cast<const char*>(reads[i].slot), reads[i].layout->bytes);
    first += count;
    if (!announce) continue;
    arrived += count;
    brought += static_cast<int32_t>(count);
    carrier->announce(arrived);
  }
}

// False: there will be none.
bool SlotServer::State::wait_for_request() {
  const std::atomic_ref<uint64_t> posted(carrier->mail().posted);
  for (int looks = 0; !stop; ++looks) {
    if (!looking) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return looking || stop; });
      looks = 0;
    }
    if (posted.load(std::memory_order_acquire) != served) return !stop;
    looks < kSpins ? std::this_thread::yield() : std::this_thread::sleep_for(kNap);
  }
  return false;
}

void SlotServer::State::answer() {
  const std::lock_guard lock(carrying);
  const SlotMail& mail = carrier->mail();
  brought = 0;
  bring(mail.layer, {mail.miss, static_cast<size_t>(mail.count)}, true);
  ++served;
}

void SlotServer::State::fail(const std::exception_ptr& why) {
  const std::lock_guard lock(mutex);
  looking = false;
  if (!error) error = why;
}

void SlotServer::State::give_up() {
  const std::lock_guard alone(carrying);
  const std::lock_guard lock(mutex);
  if (left) return;
  try {
    carrier->announce(kNothingMore);
  } catch (const Error&) {  // the device does not answer; its own limit ends the wait
    if (!error) error = std::current_exception();
  }
}

void SlotServer::State::serve(const std::shared_ptr<State>& state) {
  try {
    state->carrier->attach();
    while (state->wait_for_request()) state->answer();
  } catch (...) {
    state->fail(std::current_exception());
  }
  state->give_up();
  const std::lock_guard lock(state->mutex);
  state->ended = true;
  state->changed.notify_all();
}

// The device has stopped waiting; the request that it waited for is still in the mail.
void SlotServer::State::throw_late() {
  const SlotMail& mail = carrier->mail();
  const int32_t next = std::clamp(brought.load(), 0, std::max(mail.count - 1, 0));
  throw_hung(took_too_long(
      expert_name(mail.miss[next].expert, numbers[static_cast<size_t>(mail.layer)]) + ": " + store->name(),
      device_limit(limit)));
}

SlotServer::SlotServer(std::unique_ptr<ExpertStore> store, std::unique_ptr<SlotCarrier> carrier,
                       const Tables& tables, std::vector<int32_t> numbers, const Staging& staging,
                       std::chrono::nanoseconds limit)
    : state_(std::make_shared<State>()) {
  state_->carrier = std::move(carrier);
  state_->store = std::move(store);
  state_->numbers = std::move(numbers);
  state_->staging = staging;
  state_->limit = limit;
  for (const std::span<const ExpertWeights> table : tables) {
    std::vector<SlotLayout>& layouts = state_->layouts.emplace_back();
    for (const ExpertWeights& expert : table) layouts.push_back(slot_layout(expert));
  }
  try {
    thread_ = std::thread([state = state_] { State::serve(state); });
  } catch (const std::system_error& error) {
    throw DeviceError(std::string("thread for reading experts: the system refused it: ") + error.what(),
                      "allow this process more threads");
  }
}

SlotServer::~SlotServer() {
  bool ended = false;
  {
    std::unique_lock lock(state_->mutex);
    state_->stop = true;
    state_->changed.notify_all();
    ended = state_->changed.wait_for(lock, std::max(device_limit(state_->limit), kGrace),
                                     [&] { return state_->ended; });
    state_->left = !ended;
  }
  ended ? thread_.join() : thread_.detach();
}

void SlotServer::check() const {
  const std::lock_guard lock(state_->mutex);
  if (state_->error) std::rethrow_exception(state_->error);
}

void SlotServer::begin_pass() {
  check();
  const std::lock_guard lock(state_->mutex);
  state_->looking = true;
  state_->changed.notify_all();
}

void SlotServer::end_pass() {
  if (std::atomic_ref(state_->carrier->mail().late).load(std::memory_order_acquire) != 0) {
    try {
      state_->throw_late();
    } catch (...) {
      state_->fail(std::current_exception());
    }
  }
  state_->looking = false;
  check();
}

void SlotServer::bring(int32_t layer, std::span<const SlotMiss> misses) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    const std::lock_guard lock(state_->carrying);
    state_->bring(layer, misses, false);
    for (int part = 0; part < SlotCarrier::kParts; ++part) state_->carrier->wait(part);
  } catch (...) {
    state_->fail(std::current_exception());
    throw;
  }
  seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace rocket
