#include "runtime/step_plan.h"

namespace rocket {

float* const* StepPlan::state(int64_t offset) const {
  state_.resize(stream.size());
  for (size_t i = 0; i < stream.size(); ++i)
    state_[i] = stream[i] ? stream[i]->recurrent() + offset : nullptr;
  return state_.data();
}

float* const* StepPlan::checkpoints(int64_t offset) const {
  if (!any_checkpoint) return nullptr;
  checkpoints_.resize(checkpoint.size());
  for (size_t i = 0; i < checkpoint.size(); ++i)
    checkpoints_[i] = checkpoint[i] ? checkpoint[i] + offset : nullptr;
  return checkpoints_.data();
}

const PagedRows* StepPlan::paged(int part) const {
  paged_.resize(stream.size());
  for (size_t i = 0; i < stream.size(); ++i) paged_[i] = stream[i] ? stream[i]->rows(part) : PagedRows{};
  return paged_.data();
}

}  // namespace rocket
