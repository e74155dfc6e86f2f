// Where the bytes of experts are when they are in no slot, and how they get into one.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "experts/read_threads.h"
#include "experts/slot_layout.h"
#include "fuel/checkpoint.h"
#include "fuel/quantised.h"

namespace rocket {

// An expert that is wanted in a slot of the host.
struct ExpertRead {
  int32_t expert = -1;
  const SlotLayout* layout = nullptr;
  void* slot = nullptr;
};

// Whatever fails is a FuelError or DeviceError that names the expert and where its bytes should have come from; the
// slots' bytes are then worth nothing. `layer` counts MoE layers.
class ExpertStore {
 public:
  virtual ~ExpertStore() = default;
  virtual const char* name() const = 0;
  virtual std::string note() const { return {}; }  // one line for people on how it reads, may be empty

  // An expert comes in this many pieces, which may be brought at the same time by several threads.
  virtual int32_t pieces() const = 0;
  // Brings a piece into a slot. Blocks without a limit, unless the store says otherwise.
  virtual void fetch(int32_t layer, int32_t expert, int32_t piece, const SlotLayout& layout,
                     void* slot) const = 0;

  // A piece will be fetched soon: its disk may begin.
  virtual void expect(int32_t /*layer*/, int32_t /*expert*/, int32_t /*piece*/) const {}

  // Brings whole experts. By default piece by piece; stores on disks read several at a time, and wait no longer than
  // expert_read_limit() for any.
  virtual void fetch_all(int32_t layer, std::span<const ExpertRead> reads) const;
  // A read took longer than that. It may still write into the memory that it was given: this must then stay as long as
  // the process, and nothing else is to be fetched.
  virtual bool hung() const { return false; }
};

// Where fetch() is all that there is: fetch_all() from a pool of threads.
class PiecewiseStore : public ExpertStore {
 public:
  static constexpr int kThreads = 4;

  PiecewiseStore() : limit_(expert_read_limit()) {}
  void fetch_all(int32_t layer, std::span<const ExpertRead> reads) const override;
  bool hung() const override;

 protected:
  // fetch(), with everything in it that a thread needs which outlives the store.
  virtual std::function<void()> job(int32_t layer, const ExpertRead& read, int32_t piece) const = 0;
  virtual std::string where(int32_t layer, int32_t expert, int32_t piece) const = 0;  // for errors

 private:
  std::chrono::nanoseconds limit_;
  mutable std::mutex mutex_;
  mutable std::unique_ptr<ReadThreads> threads_;
  mutable std::string hung_;  // what took too long
};

std::string expert_name(int32_t expert, int32_t layer);  // "expert 3 of layer 7", the model's number
// For a read that took longer than the limit.
[[noreturn]] void throw_hung(const std::string& what);
std::string took_too_long(const std::string& where, std::chrono::nanoseconds limit);

// The tensors of one expert: gate, up, down.
using ExpertSource = std::array<WeightSource, 3>;

// Straight from the checkpoint's files, with pread. A file that is shorter than it was, or was written to since it was
// opened, is an error: what was read may be neither the old bytes nor the new ones.
class CheckpointStore : public PiecewiseStore {
 public:
  struct Layer {
    int32_t number = 0;  // the model's
    std::vector<ExpertSource> experts;
  };
  CheckpointStore(std::shared_ptr<const Checkpoint> checkpoint, std::vector<Layer> layers);

  const char* name() const override { return "checkpoint"; }
  int32_t pieces() const override { return 3; }
  void fetch(int32_t layer, int32_t expert, int32_t piece, const SlotLayout& layout,
             void* slot) const override;
  void expect(int32_t layer, int32_t expert, int32_t piece) const override;

 private:
  std::function<void()> job(int32_t layer, const ExpertRead& read, int32_t piece) const override;
  std::string where(int32_t layer, int32_t expert, int32_t piece) const override;

  struct Tensors {
    std::shared_ptr<const Checkpoint> checkpoint;
    std::vector<Layer> layers;
    void read(int32_t layer, int32_t expert, int32_t piece, const SlotLayout& layout, void* slot) const;
  };
  std::shared_ptr<const Tensors> tensors_;
};

}  // namespace rocket
