// The forward pass of one chemistry over one fuel: what an engine folder implements. Session does the rest.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/memory_space.h"
#include "runtime/engine.h"
#include "runtime/stage_timer.h"
#include "runtime/step_plan.h"
#include "state/layout.h"

namespace rocket {

class Model {
 public:
  virtual ~Model() = default;

  virtual const StateLayout& layout() const = 0;
  virtual const EngineInfo& info() const = 0;  // filled but for what Session knows (streams, context, state)
  virtual uint64_t fingerprint() const = 0;    // of config and tensor headers; a snapshot belongs to one
  virtual int32_t max_logits_rows() const = 0;
  virtual MemorySpace& memory() { return host_memory(); }  // where streams keep their state
  // Whether prompts may be rounded for tensor cores, so that decode rows want a pass of their own.
  virtual bool rounds_prefill() const { return false; }

  // Issues a step. Its logits are rows plan.first_logit … of the logits, until the next step.
  virtual void forward(const StepPlan& plan) = 0;
  // The first `rows` rows of the last step's logits, on the host, [rows, vocab]. Waits.
  virtual const float* logits(int32_t rows) = 0;
  // The first of the last step's first `rows` rows of logits that is not all finite, or -1. Waits.
  virtual int32_t first_bad_logits(int32_t rows) = 0;
  virtual void sample(const Draw* draws, int32_t count, int32_t* token) = 0;  // rows of the logits
  // The tokens that a step with plan.sampling drew from its first `rows` rows of logits. Waits.
  virtual void drawn(int32_t rows, int32_t* token) = 0;

  virtual EngineStats stats() = 0;  // of experts; the session counts steps and rows
  virtual bool hint(int32_t /*layer*/, std::span<const int32_t> /*experts*/) { return false; }  // as Engine's
  virtual StageTimer& timer() = 0;
  virtual void set_profile(bool on) { timer().set(on); }
  virtual void start_trace(const std::string& file) = 0;
  virtual int64_t stop_trace() = 0;
  virtual void set_diagnostics(bool on) = 0;
  virtual std::vector<LayerDiagnostics> diagnostics() const = 0;
  virtual void set_record(bool on) = 0;
  virtual const StepRecord& record() const = 0;
};

}  // namespace rocket
