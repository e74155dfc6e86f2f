#include "fabric/wire_fabric.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/error.h"

namespace rocket {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 30;  // of one message on the wire
constexpr size_t kFirstBytes = 2048;              // of a message that comes in one piece, its length included
constexpr double kChooseSeconds = 0.5;
constexpr double kGoneSeconds = 0.5;   // in which what a rank sent before it ended may still come
constexpr double kStoppedSeconds = 1;  // between two looks that are microseconds apart
constexpr uint64_t kMostMessage = uint64_t{1} << 30;

std::string rank_name(int32_t rank) {
  return "rank " + std::to_string(rank);
}

void copy_text(const std::string& text, char* to, size_t bytes) {
  const size_t length = std::min(text.size(), bytes - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

double seconds_since(std::chrono::steady_clock::time_point when) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - when).count();
}

std::string shown(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", seconds);
  return text;
}

// Gives the processor away, and after a while more and more of it.
void pause_for(double waited) {
  if (waited < 0.02) {
    sched_yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(waited < 0.2 ? 20 : 200));
  }
}

}  // namespace

WireFabric::WireFabric(Wire& wire)
    : wire_(wire), rank_(wire.rank()), ranks_(wire.ranks()), peers_(static_cast<size_t>(ranks_)) {
  const std::lock_guard lock(mutex_);
  each_other([&](int32_t r) {
    Peer& peer = peers_[static_cast<size_t>(r)];
    peer.heard = Clock::now();
    call(wire_.receive(r, kControl, &peer.received, sizeof(Control), &peer.request), r, "receive");
  });
  if (ranks_ > 1) beater_ = std::thread([this] { beat(); });
}

WireFabric::~WireFabric() {
  stop_beating();
}

// --- signs of life and of failure -----------------------------------------------------------------------------

// Runs in a thread of its own.
void WireFabric::beat() {
  static const Control alive;
  std::unique_lock wake(beat_mutex_);
  while (!beat_stop_) {
    beat_wake_.wait_for(wake, std::chrono::duration<double>(std::clamp(limit_ / 8, 0.02, 5.0)));
    if (beat_stop_ || failed_) continue;
    const std::lock_guard lock(mutex_);
    each_other([&](int32_t r) {
      Peer& peer = peers_[static_cast<size_t>(r)];
      bool done = true;
      if (peer.gone || (peer.beat_flying && (wire_.test(&peer.beat, &done) != 0 || !done))) return;
      peer.beat_flying = wire_.send(r, kControl, &alive, sizeof alive, &peer.beat) == 0;
    });
  }
}

void WireFabric::stop_beating() {
  {
    const std::lock_guard lock(beat_mutex_);
    beat_stop_ = true;
  }
  beat_wake_.notify_all();
  if (beater_.joinable()) beater_.join();
}

void WireFabric::take_control(int32_t r) {
  Peer& peer = peers_[static_cast<size_t>(r)];
  peer.heard = Clock::now();
  const Control& c = peer.received;
  if (c.sign == Sign::kFailure && failure_ && r < rank_) failure_->told = true;
  if (c.sign == Sign::kFailure && !failure_) {
    failure_ = Failure{r, true, c.message, c.hint};
    failed_ = true;
  }
  if (c.sign == Sign::kBye) {
    peer.gone = true;
    peer.gone_at = peer.heard;
    return;
  }
  call(wire_.receive(r, kControl, &peer.received, sizeof(Control), &peer.request), r, "receive");
}

void WireFabric::retire() {
  while (!outgoing_.empty() && done(outgoing_.front().flying)) outgoing_.pop_front();
}

void WireFabric::poll() {
  retire();
  each_other([&](int32_t r) {
    Peer& peer = peers_[static_cast<size_t>(r)];
    for (bool done = true; done && !peer.gone;) {
      call(wire_.test(&peer.request, &done), r, "receive");
      if (done) take_control(r);
    }
  });
}

void WireFabric::send_control(int32_t r, const Control& control) {
  outgoing_.push_back({std::string(reinterpret_cast<const char*>(&control), sizeof control), {r, 0}});
  Outgoing& out = outgoing_.back();
  call(wire_.send(r, kControl, out.data.data(), static_cast<int64_t>(out.data.size()), &out.flying.request),
       r, "send");
}

void WireFabric::call(int code, int32_t r, const char* what) {
  if (code == 0) return;
  if (failure_) rethrow();
  failure_ = Failure{r, false, "", "see whether the processes and machines of all ranks are there"};
  failure_->message = rank_name(rank_) + ": " + what + " with " + rank_name(r) + ": " + wire_.error(code);
  failed_ = true;
  rethrow();
}

void WireFabric::rethrow() const {
  throw DeviceError("boosters: " + failure_->message, failure_->hint);
}

void WireFabric::check() {
  if (failure_) rethrow();
}

void WireFabric::broken(int32_t r, const std::string& message, const std::string& hint) {
  failure_ = Failure{r, false, message, hint};
  failed_ = true;
  Control control;
  control.sign = Sign::kFailure;
  copy_text(message, control.message, sizeof control.message);
  copy_text(hint, control.hint, sizeof control.hint);
  each_other([&](int32_t other) {
    if (!peers_[static_cast<size_t>(other)].gone) send_control(other, control);
  });
  rethrow();
}

// When rank 0 is silent all others find it so at about the same time: the first of them is to say it.
void WireFabric::choose_speaker() {
  const Clock::time_point start = Clock::now();
  while (!rank0_knows() && seconds_since(start) < kChooseSeconds) {
    {
      const std::lock_guard lock(mutex_);
      try {
        poll();
      } catch (const Error&) {
        return;
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void WireFabric::fail(const std::string& message, const std::string& hint) {
  if (failed_) return choose_speaker();
  const std::lock_guard lock(mutex_);
  try {
    broken(rank_, rank_name(rank_) + ": " + message, hint);
  } catch (const Error&) {
  }
}

// Whoever was not told by another has told rank 0, unless that is the one which does not answer.
bool WireFabric::rank0_knows() const {
  return rank_ == 0 || !failure_ || failure_->told || failure_->rank != 0;
}

// --- waiting --------------------------------------------------------------------------------------------------

bool WireFabric::done(Flying& flying) {
  bool done = false;
  call(wire_.test(&flying.request, &done), flying.rank, "a message");
  return done;
}

void WireFabric::wait(Flying flying, const std::string& what, Patience patience) {
  Clock::time_point start = Clock::now(), last = start;
  for (int64_t turn = 0;; ++turn) {
    {
      const std::lock_guard lock(mutex_);
      if (done(flying)) return;
      if (seconds_since(last) > kStoppedSeconds) {  // it was this process that stood still
        start = Clock::now();
        for (Peer& peer : peers_) peer.heard = start;
      }
      last = Clock::now();
      if (turn % 16 == 15) {
        poll();
        check();
        overdue(flying.rank, what, start, patience);
      }
    }
    pause_for(seconds_since(start));
  }
}

void WireFabric::overdue(int32_t r, const std::string& what, Clock::time_point since, Patience patience) {
  const Peer& peer = peers_[static_cast<size_t>(r)];
  const std::string who =
      rank_name(rank_) + " waited " + shown(seconds_since(since)) + " for " + what + " from " + rank_name(r);
  // Its last sign may come before a message that it sent earlier.
  if (peer.gone) {
    if (seconds_since(peer.gone_at) <= kGoneSeconds) return;
    broken(r, who + ", which has ended", "see what that rank said");
  }
  const double silent = seconds_since(peer.heard);
  if (seconds_since(since) <= limit_ || (patience == Patience::kWhileAlive && silent <= limit_)) return;
  const bool dead = silent > limit_;
  broken(r, who + (dead ? ", which gives no sign of life" : ", which lives but does not get there"),
         dead ? "see whether its process and its machine are there, and reached over the network"
              : "raise --booster-wait if it only needs longer");
}

// --- rows -----------------------------------------------------------------------------------------------------

void WireFabric::receive_rows(std::span<const RowBlock> blocks, const std::string& what) {
  const std::lock_guard lock(mutex_);
  check();
  awaited_ = what;
  for (const RowBlock& block : blocks) {
    for (int64_t at = 0; at < block.bytes; at += kMostBytes) {
      incoming_.push_back({{block.rank, 0}, what});
      call(wire_.receive(block.rank, kRows, static_cast<char*>(block.data) + at,
                         std::min(kMostBytes, block.bytes - at), &incoming_.back().flying.request),
           block.rank, "receive");
    }
    figures_.rows_received += block.rows;
  }
}

void WireFabric::send_rows(const RowBlock& mine) {
  const std::lock_guard lock(mutex_);
  check();
  each_other([&](int32_t r) {
    for (int64_t at = 0; at < mine.bytes; at += kMostBytes) {
      outgoing_rows_.push_back({r, 0});
      call(wire_.send(r, kRows, static_cast<const char*>(mine.data) + at,
                      std::min(kMostBytes, mine.bytes - at), &outgoing_rows_.back().request),
           r, "send");
    }
    figures_.rows_sent += mine.rows;
  });
}

void WireFabric::wait_rows() {
  const Clock::time_point start = Clock::now();
  for (const Awaited& block : incoming_) wait(block.flying, block.what, Patience::kNone);
  incoming_.clear();
  for (const Flying& flying : outgoing_rows_) wait(flying, "the receipt of " + awaited_, Patience::kNone);
  outgoing_rows_.clear();
  figures_.wait_seconds += seconds_since(start);
}

void WireFabric::watch(const std::function<int64_t()>& look, const std::string& what) {
  Clock::time_point start = Clock::now(), last = start;
  int64_t seen = -1;
  for (int64_t turn = 0;; ++turn) {
    const int64_t found = look();
    if (found < 0) return;
    {
      const std::lock_guard lock(mutex_);
      const bool stood_still = seconds_since(last) > kStoppedSeconds;
      last = Clock::now();
      if (stood_still) {
        for (Peer& peer : peers_) peer.heard = last;
      }
      if (stood_still || found != seen) start = last;
      seen = found;
      if (turn % 16 == 15) {
        poll();
        check();
        each_other([&](int32_t r) {  // whoever is silent is to blame
          const Peer& peer = peers_[static_cast<size_t>(r)];
          if (peer.gone || seconds_since(peer.heard) > limit_) overdue(r, what, start, Patience::kNone);
        });
        each_other([&](int32_t r) { overdue(r, what, start, Patience::kNone); });
      }
    }
    pause_for(seconds_since(start));
  }
}

void WireFabric::count_rows(const FabricFigures& more) {
  figures_.rows_sent += more.rows_sent;
  figures_.rows_received += more.rows_received;
  figures_.wait_seconds += more.wait_seconds;
}

// --- messages -------------------------------------------------------------------------------------------------

// A message begins with its length. What does not fit into the first piece follows in a second.
void WireFabric::send(int32_t r, std::string_view message) {
  const uint64_t length = message.size();
  std::string first(reinterpret_cast<const char*>(&length), sizeof length);
  const size_t inside = std::min(message.size(), kFirstBytes - sizeof length);
  first.append(message.substr(0, inside));
  first.resize(kFirstBytes);
  std::string_view rest = message.substr(inside);
  for (std::string piece : {std::move(first), std::string(rest)}) {
    if (piece.empty()) continue;
    outgoing_.push_back({std::move(piece), {r, 0}});
    Outgoing& out = outgoing_.back();
    call(
        wire_.send(r, kMessages, out.data.data(), static_cast<int64_t>(out.data.size()), &out.flying.request),
        r, "send");
  }
}

std::string WireFabric::receive(int32_t r, const std::string& what) {
  std::string message(kFirstBytes, '\0');
  const auto take = [&](char* data, size_t bytes) {
    Flying flying{r, 0};
    {
      const std::lock_guard lock(mutex_);
      check();
      call(wire_.receive(r, kMessages, data, static_cast<int64_t>(bytes), &flying.request), r, "receive");
    }
    wait(flying, what, Patience::kWhileAlive);
  };
  take(message.data(), kFirstBytes);
  uint64_t length = 0;
  std::memcpy(&length, message.data(), sizeof length);
  if (length > kMostMessage) {
    const std::lock_guard lock(mutex_);
    broken(r,
           rank_name(rank_) + " found a message of " + std::to_string(length) + " bytes from " + rank_name(r),
           "start the same version of Rocket on all ranks");
  }
  message.erase(0, sizeof length);
  const size_t inside = message.size();
  message.resize(length);
  if (length > inside) take(message.data() + inside, length - inside);
  return message;
}

void WireFabric::tell(std::string_view message) {
  const std::lock_guard lock(mutex_);
  poll();
  check();
  each_other([&](int32_t r) { send(r, message); });
}

std::string WireFabric::hear(const std::string& what) {
  return receive(0, what);
}

std::vector<std::string> WireFabric::gather(std::string_view mine, const std::string& what) {
  if (rank_ != 0) {
    const std::lock_guard lock(mutex_);
    poll();
    check();
    send(0, mine);
    return {};
  }
  std::vector<std::string> all{std::string(mine)};
  each_other([&](int32_t r) { all.push_back(receive(r, what)); });
  return all;
}

// --- the end --------------------------------------------------------------------------------------------------

void WireFabric::leave() {
  if (left_) return;
  left_ = true;
  try {
    stop_beating();
    Control bye;
    bye.sign = Sign::kBye;
    bool all_gone = false;
    if (!failed_) {
      const std::lock_guard lock(mutex_);
      each_other([&](int32_t r) { send_control(r, bye); });
    }
    for (const Clock::time_point start = Clock::now();
         !failed_ && !all_gone && seconds_since(start) < limit_;) {
      {
        const std::lock_guard lock(mutex_);
        poll();
        all_gone = outgoing_.empty();
        each_other([&](int32_t r) {
          Peer& peer = peers_[static_cast<size_t>(r)];
          bool done = true;
          if (peer.beat_flying) call(wire_.test(&peer.beat, &done), r, "send");
          if (done) peer.beat_flying = false;
          all_gone &= peer.gone && done;
        });
      }
      pause_for(seconds_since(start));
    }
    if (all_gone) {
      wire_.stop();
      return;
    }
  } catch (const Error&) {  // there is nobody left to tell
  }
  if (rank_ == 0 || !rank0_knows()) return;
  std::this_thread::sleep_for(std::chrono::duration<double>(limit_ + 5));
}

void WireFabric::abort(int status) {
  {
    const std::lock_guard lock(mutex_);
    wire_.abort(status);
  }
  std::_Exit(status);  // should it come back
}

}  // namespace rocket
