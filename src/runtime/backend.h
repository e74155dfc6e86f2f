// What a model runs on: memory, ops, and how the work of a step is issued.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/memory.h"
#include "base/memory_space.h"
#include "ops/table.h"
#include "runtime/stage_timer.h"
#include "runtime/step_plan.h"

namespace rocket {

class Backend {
 public:
  virtual ~Backend() = default;

  virtual const char* name() const = 0;            // "cpu" | "cuda"
  virtual std::string device() const = 0;          // for people: "AMD EPYC, 2 threads, avx512"
  virtual std::string note() const { return {}; }  // on what it chose, for people; may be empty
  virtual MemorySpace& memory() = 0;
  virtual MemoryAvailable available() = 0;       // of that memory
  virtual bool rounds() const { return false; }  // whether it has bfloat16 prefill and latents
  virtual const OpTable& ops() const = 0;
  virtual StageClock& clock() = 0;

  // What ops get with every call; `scratch` is set by the model, and lies in memory().
  virtual Exec exec() = 0;
  // Ops to find out with how much workspace a forward pass takes: with an exec that measures they compute nothing.
  virtual const OpTable& measuring_ops() const = 0;

  // Brings a step's arrays to where ops read them. The view is valid until the next call.
  virtual StepView stage(const StepPlan& plan) = 0;

  // Issues the work of a step. `forward` calls ops and touches no memory of the backend itself. With the same key it
  // would make the same calls with the same pointers, so that a backend may replay what it has recorded.
  struct Key {
    int32_t rows = 0, logits_rows = 0, first_logit = 0;
    bool embeddings = false, tensor_cores = false, draws = false;
    auto operator<=>(const Key&) const = default;
  };
  virtual void run(const Key& key, const std::function<void()>& forward) = 0;
  // How many kinds of steps were recorded so far, and how many steps came from a record.
  struct ReplayCounts {
    int64_t recorded = 0, replayed = 0;
  };
  virtual ReplayCounts replays() const { return {}; }
  virtual void set_replay(bool on) = 0;  // off: every step calls `forward`, for profiles and records

  // Waits until everything that was issued is done. Throws DeviceError that names the op which failed.
  virtual void wait() = 0;
};

std::unique_ptr<Backend> make_cpu_backend(int threads);

// On a CUDA device. Throws DeviceError where there is none.
struct CudaLimits {  // of what stage() is given
  int32_t max_rows = 0;
  int32_t hidden = 0;
  int32_t device = 0;
};
std::unique_ptr<Backend> make_cuda_backend(int threads, const CudaLimits& limits);

}  // namespace rocket
