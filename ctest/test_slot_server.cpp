// The thread that brings experts to a device that cannot call, with a device made of threads: a kernel that posts and
// waits with a limit, and a copy engine that takes its time. Bytes, faults, limits, and an end in the middle of a request.
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "base/error.h"
#include "check.h"
#include "experts/slot_server.h"

using namespace rocket;
using check::expect;
using namespace std::chrono_literals;

namespace {

std::mt19937_64 rng(20261130);
int32_t draw(int32_t low, int32_t high) {
  return std::uniform_int_distribution<int32_t>(low, high)(rng);
}

constexpr int32_t kLayers = 3, kExperts = 40, kSlots = 24;
const std::vector<int32_t> kNumbers = {2, 5, 9};

std::vector<ExpertWeights> make_table() {
  std::vector<ExpertWeights> table;
  for (int32_t e = 0; e < kExperts; ++e) {
    const WeightFormat format = e % 3 == 0 ? WeightFormat::kBF16 : WeightFormat::kNVFP4;
    const auto weight = [&](int64_t out, int64_t in) {
      return Weight{format, out, in, nullptr, nullptr, 0.5f};
    };
    table.push_back({weight(16, 32), weight(16, 32), weight(32, 16)});
  }
  return table;
}

char byte_of(int32_t layer, int32_t expert, int64_t i) {
  return static_cast<char>(layer * 101 + expert * 7 + i * 13 + i / 256);
}

// What tests do with a store. Outlives it and the thread.
struct StoreWishes {
  std::atomic<int32_t> fails = -1;  // the expert that cannot be read
  std::atomic<int32_t> hangs = -1;  // the expert that waits for the gate
  std::atomic<bool> open = false;
  std::atomic<bool> waiting = false, hung = false;
};

class PatternStore : public ExpertStore {
 public:
  explicit PatternStore(std::shared_ptr<StoreWishes> wishes) : wishes_(std::move(wishes)) {}
  const char* name() const override { return "pattern"; }
  int32_t pieces() const override { return 1; }
  void fetch(int32_t layer, int32_t expert, int32_t, const SlotLayout& layout, void* slot) const override {
    if (expert == wishes_->fails)
      throw FuelError(expert_name(expert, kNumbers[static_cast<size_t>(layer)]) + ": pattern: unreadable",
                      "a hint");
    if (expert == wishes_->hangs) {
      wishes_->waiting = true;
      while (!wishes_->open) std::this_thread::sleep_for(1ms);
    }
    for (int64_t i = 0; i < layout.bytes; ++i) static_cast<char*>(slot)[i] = byte_of(layer, expert, i);
  }
  bool hung() const override { return wishes_->hung; }

 private:
  std::shared_ptr<StoreWishes> wishes_;
};

// Slots and a copy engine, which does one thing after the other, each after a while.
class Device {
 public:
  Device() : slots(kSlots), engine_([this] { work(); }) {}
  ~Device() {
    add([this] { over_ = true; });
    engine_.join();
  }
  void add(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    ++queued_;
    changed_.notify_all();
  }
  uint64_t queued() {
    const std::lock_guard lock(mutex_);
    return queued_;
  }
  void wait_until(uint64_t done) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= done; });
  }

  SlotMail mail{};
  std::vector<std::vector<char>> slots;
  std::atomic<uint64_t> arrived = 0;
  std::atomic<bool> copies_fail = false, staging_kept = false, carrier_gone = false;
  uint64_t wanted = 0;

 private:
  void work() {
    std::mt19937 own(7);
    while (!over_) {
      std::function<void()> next;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !queue_.empty(); });
        next = std::move(queue_.front());
        queue_.pop_front();
      }
      std::this_thread::sleep_for(std::chrono::microseconds(own() % 100));
      next();
      const std::lock_guard lock(mutex_);
      ++done_;
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t queued_ = 0, done_ = 0;
  bool over_ = false;
  std::thread engine_;
};

class FakeCarrier : public SlotCarrier {
 public:
  FakeCarrier(std::shared_ptr<Device> device, const SlotServer::Staging& staging)
      : device_(std::move(device)) {
    for (auto& part : staging_) part = std::make_unique<char[]>(static_cast<size_t>(staging.part_bytes()));
  }
  ~FakeCarrier() override {
    for (const uint64_t last : last_) device_->wait_until(last);
    device_->carrier_gone = true;
  }
  void attach() override {}
  SlotMail& mail() override { return device_->mail; }
  char* staging(int part) override { return staging_[part].get(); }
  void copy(int part, int32_t slot, const char* from, int64_t bytes) override {
    if (device_->copies_fail) throw DeviceError("copy: failed");
    device_->add([device = device_.get(), slot, from, bytes] {
      device->slots[static_cast<size_t>(slot)].assign(from, from + bytes);
    });
    last_[part] = device_->queued();
  }
  void wait(int part) override { device_->wait_until(last_[part]); }
  void announce(uint64_t arrived) override {
    device_->add([device = device_.get(), arrived] { device->arrived = arrived; });
  }
  void keep_staging() override { device_->staging_kept = true; }

 private:
  std::shared_ptr<Device> device_;
  std::unique_ptr<char[]> staging_[kParts];
  uint64_t last_[kParts] = {};
};

// What the kernel does. False: nothing came for the limit.
bool post_and_wait(Device& device, int32_t layer, const std::vector<SlotMiss>& misses,
                   std::chrono::nanoseconds limit) {
  SlotMail& mail = device.mail;
  std::copy(misses.begin(), misses.end(), mail.miss);
  mail.layer = layer;
  mail.count = static_cast<int32_t>(misses.size());
  device.wanted += misses.size();
  const std::atomic_ref<uint64_t> posted(mail.posted);
  posted.store(posted.load() + 1, std::memory_order_release);
  uint64_t arrived = device.arrived;
  auto since = std::chrono::steady_clock::now();
  while (arrived < device.wanted) {
    std::this_thread::sleep_for(50us);
    const uint64_t found = device.arrived;
    const auto now = std::chrono::steady_clock::now();
    if (found != arrived) {
      arrived = found;
      since = now;
    } else if (now - since > limit) {
      std::atomic_ref(mail.late).store(posted.load(), std::memory_order_release);
      return false;
    }
  }
  return true;
}

struct Bench {
  explicit Bench(std::chrono::nanoseconds limit = 10s, int64_t places = 3)
      : table(make_table()), device(std::make_shared<Device>()), wishes(std::make_shared<StoreWishes>()) {
    SlotServer::Staging staging = SlotServer::staging_for(slot_layout(table[0]).bytes, kExperts);
    staging.places = places;
    server = std::make_unique<SlotServer>(std::make_unique<PatternStore>(wishes),
                                          std::make_unique<FakeCarrier>(device, staging),
                                          SlotServer::Tables(kLayers, table), kNumbers, staging, limit);
  }
  bool is_there(int32_t layer, const SlotMiss& miss) const {
    const std::vector<char>& slot = device->slots[static_cast<size_t>(miss.slot)];
    if (static_cast<int64_t>(slot.size()) != slot_layout(table[static_cast<size_t>(miss.expert)]).bytes)
      return false;
    for (size_t i = 0; i < slot.size(); ++i) {
      if (slot[i] != byte_of(layer, miss.expert, static_cast<int64_t>(i))) return false;
    }
    return true;
  }

  std::vector<ExpertWeights> table;
  std::shared_ptr<Device> device;
  std::shared_ptr<StoreWishes> wishes;
  std::unique_ptr<SlotServer> server;
};

std::vector<SlotMiss> some_misses(int32_t count) {
  std::vector<int32_t> experts(kExperts), slots(kSlots);
  for (int32_t i = 0; i < kExperts; ++i) experts[static_cast<size_t>(i)] = i;
  for (int32_t i = 0; i < kSlots; ++i) slots[static_cast<size_t>(i)] = i;
  std::shuffle(experts.begin(), experts.end(), rng);
  std::shuffle(slots.begin(), slots.end(), rng);
  std::vector<SlotMiss> misses;
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) misses.push_back({experts[i], slots[i]});
  return misses;
}

// The error of a call, as "kind: message"; empty: none.
template <typename Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const FuelError& error) {
    return "fuel: " + std::string(error.what()) + " | " + error.hint();
  } catch (const DeviceError& error) {
    return "device: " + std::string(error.what()) + " | " + error.hint();
  }
  return "";
}

void brings_what_is_asked_for() {
  for (const int64_t places : {1, 3, 40}) {
    Bench bench(10s, places);
    for (int pass = 0; pass < 40; ++pass) {
      bench.server->begin_pass();
      for (int i = draw(0, 5); i > 0; --i) {
        const int32_t layer = draw(0, kLayers - 1);
        const std::vector<SlotMiss> misses = some_misses(draw(1, kSlots));
        const bool posted = draw(0, 3) > 0;
        if (posted) {
          expect(post_and_wait(*bench.device, layer, misses, 10s), "a request is answered");
        } else {
          bench.server->bring(layer, misses);
        }
        for (const SlotMiss& miss : misses)
          expect(bench.is_there(layer, miss), posted ? "bytes in the slot" : "bytes that the caller brought");
      }
      bench.server->end_pass();
    }
    expect(bench.device->arrived == bench.device->wanted, "as many as were asked for");
    expect(bench.server->seconds() > 0, "the caller's time is counted");
  }
}

void looks_in_a_pass_only() {
  Bench bench;
  const std::vector<SlotMiss> misses = some_misses(4);
  bool answered = false;
  std::thread kernel([&] { answered = post_and_wait(*bench.device, 1, misses, 10s); });
  std::this_thread::sleep_for(50ms);
  expect(bench.device->arrived == 0, "nobody looks between passes");
  bench.server->begin_pass();
  kernel.join();
  expect(answered, "and the next pass finds it");
  bench.server->end_pass();
}

void a_read_that_fails() {
  Bench bench;
  bench.server->begin_pass();
  std::vector<SlotMiss> misses = some_misses(9);
  bench.wishes->fails = misses[5].expert;
  expect(post_and_wait(*bench.device, 1, misses, 10s), "the device need not wait");
  expect(post_and_wait(*bench.device, 2, misses, 10s), "nor for any other request");
  const std::string expected = "fuel: " + expert_name(misses[5].expert, 5) + ": pattern: unreadable | a hint";
  for (int i = 0; i < 2; ++i)
    expect(error_of([&] { bench.server->end_pass(); }) == expected, "the store's error after the step");
  bench.wishes->fails = -1;
  expect(error_of([&] { bench.server->begin_pass(); }) == expected, "for good");
}

void a_read_of_the_caller_that_fails() {
  Bench bench;
  const std::vector<SlotMiss> misses = some_misses(5);
  bench.wishes->fails = misses[0].expert;
  bench.server->begin_pass();
  const std::string found = error_of([&] { bench.server->bring(0, misses); });
  expect(found.starts_with("fuel: " + expert_name(misses[0].expert, 2)), "the store's error: " + found);
  expect(error_of([&] { bench.server->begin_pass(); }) == found, "for good");
}

void a_copy_that_fails() {
  Bench bench;
  bench.server->begin_pass();
  bench.device->copies_fail = true;
  expect(post_and_wait(*bench.device, 0, some_misses(2), 10s), "the device need not wait");
  expect(error_of([&] { bench.server->end_pass(); }).starts_with("device: copy: failed"),
         "the carrier's error");
}

// A store that keeps no limit, or a thread that is gone: the device's limit ends the wait.
void a_read_that_hangs() {
  const auto begin = std::chrono::steady_clock::now();
  Bench bench(50ms, 2);
  const std::vector<SlotMiss> misses = some_misses(5);
  bench.wishes->hangs = misses[2].expert;
  bench.server->begin_pass();
  expect(!post_and_wait(*bench.device, 2, misses, SlotServer::device_limit(50ms)), "the wait ends");
  const std::string found = error_of([&] { bench.server->end_pass(); });
  expect(found.starts_with("device: " + expert_name(misses[2].expert, 9) +
                           ": pattern: the disk gave nothing for 0.1 s | "),
         "an error that names the expert: " + found);
  expect(error_of([&] { bench.server->begin_pass(); }) == found, "for good");
  bench.server.reset();
  expect(std::chrono::steady_clock::now() - begin < 5s, "nobody waits for the thread");
  std::vector<std::vector<char>> before = bench.device->slots;
  bench.wishes->open = true;
  for (int i = 0; i < 5000 && !bench.device->carrier_gone; ++i) std::this_thread::sleep_for(1ms);
  expect(bench.device->carrier_gone, "the thread that was left behind comes to its end");
  expect(bench.device->slots == before && bench.device->arrived != kNothingMore,
         "and writes nothing to the device any more");
}

void an_end_while_a_request_waits() {
  Bench bench;
  const std::vector<SlotMiss> misses = some_misses(6);
  bench.wishes->hangs = misses[4].expert;
  bench.server->begin_pass();
  bool answered = false;
  std::thread kernel([&] { answered = post_and_wait(*bench.device, 0, misses, 10s); });
  while (!bench.wishes->waiting) std::this_thread::sleep_for(1ms);
  std::thread gate([&] {
    std::this_thread::sleep_for(20ms);
    bench.wishes->open = true;
  });
  bench.server.reset();
  kernel.join();
  gate.join();
  expect(answered && bench.device->arrived == kNothingMore, "the device is told that nothing more comes");
}

void staging_of_a_read_that_hangs() {
  for (const bool hung : {false, true}) {
    Bench bench;
    bench.wishes->hung = hung;
    bench.server.reset();
    expect(bench.device->staging_kept == hung, "memory stays where a read may still write");
  }
}

void sizes() {
  const SlotServer::Staging large = SlotServer::staging_for(int64_t{27} << 19, 288);
  expect(large.places == 4 && large.place_bytes == int64_t{27} << 19, "some experts of 13.50 MiB");
  const SlotServer::Staging small = SlotServer::staging_for(1000, 24);
  expect(small.places == 24 && small.place_bytes == 4096, "no more than there are, on whole blocks");
  expect(SlotServer::staging_for(int64_t{1} << 30, 8).places == 1, "at least one");
}

}  // namespace

int main() {
  brings_what_is_asked_for();
  looks_in_a_pass_only();
  a_read_that_fails();
  a_read_of_the_caller_that_fails();
  a_copy_that_fails();
  a_read_that_hangs();
  an_end_while_a_request_waits();
  staging_of_a_read_that_hangs();
  sizes();
  return check::finish("test_slot_server");
}
