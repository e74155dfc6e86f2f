// The forward pass of one chemistry over one fuel: what an engine folder implements. Session does the rest.
#pragma once

#include <cstdint>
#include <vector>

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

  // Runs a step and writes the logits of plan.logits_row. The result is valid until the next call.
  virtual const float* forward(const StepPlan& plan) = 0;
  virtual int32_t sample(const float* logits, const SamplingParams& sampling, uint64_t counter) = 0;

  virtual EngineStats& stats() = 0;
  virtual StageTimer& timer() = 0;
  virtual void set_diagnostics(bool on) = 0;
  virtual std::vector<LayerDiagnostics> diagnostics() const = 0;
  virtual void set_record(bool on) = 0;
  virtual const StepRecord& record() const = 0;
};

}  // namespace rocket
