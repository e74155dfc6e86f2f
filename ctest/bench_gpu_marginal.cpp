// What each op costs within a decode step that runs as one graph: the step's time less its time without that op. Ops
// that overlap others cost less here than alone, and gaps between kernels count. The results of such steps are rubbish,
// so it is a program of its own.
//
//   bench_gpu_marginal FUEL [context = 512] [steps = 48] [streams = 1]
#include <chrono>
#include <cstdlib>
#include <utility>

#include "glm5-moe-nvfp4-2b/forward.h"
#include "gpu_bench.h"
#include "runtime/session.h"

namespace {

using namespace rocket;
using Clock = std::chrono::steady_clock;

const OpTable* real = nullptr;
std::string skipped;  // name of the op that is left out
int variant = 0;

template <auto Member, typename Params>
void call(const Params& p, Exec& exec, const char* name) {
  // Rubbish may not be finite, and the session would refuse to go on.
  if (skipped != name && std::strcmp(name, "find_bad") != 0) (real->*Member)(p, exec);
}

#define OP(name, Params)                                                            \
  table.name = [](const Params& p, Exec& e) { call<&OpTable::name>(p, e, #name); }; \
  names.push_back(#name)

OpTable wrapped(std::vector<std::string>& names) {
  OpTable table;
  OP(embed, EmbedParams);
  OP(hyper_pre, HyperPreParams);
  OP(hyper_post, HyperPostParams);
  OP(hyper_head, HyperHeadParams);
  OP(linear, LinearParams);
  OP(head_linear, HeadLinearParams);
  OP(norm, NormParams);
  OP(kda_conv, KdaConvParams);
  OP(kda_gates, KdaGatesParams);
  OP(kda_recurrence, KdaRecurrenceParams);
  OP(gated_norm, GatedNormParams);
  OP(kda_head, KdaHeadParams);
  OP(pool_update, PoolUpdateParams);
  OP(index_select, IndexSelectParams);
  OP(latent_append, LatentAppendParams);
  OP(sparse_mla, SparseMlaParams);
  OP(router, RouterParams);
  OP(swiglu, SwigluParams);
  OP(expert_ffn, ExpertFfnParams);
  OP(expert_sum, ExpertSumParams);
  OP(sample, SampleParams);
  OP(find_bad, FiniteParams);
  return table;
}

// The CUDA backend with ops, lanes and graphs that the variants choose.
class Variants : public Backend {
 public:
  explicit Variants(std::unique_ptr<Backend> cuda) : cuda_(std::move(cuda)) {
    real = &cuda_->ops();
    table_ = wrapped(names);
  }
  const char* name() const override { return cuda_->name(); }
  std::string device() const override { return cuda_->device(); }
  MemorySpace& memory() override { return cuda_->memory(); }
  MemoryAvailable available() override { return cuda_->available(); }
  bool rounds() const override { return true; }
  const OpTable& ops() const override { return table_; }
  const OpTable& measuring_ops() const override { return cuda_->measuring_ops(); }
  StageClock& clock() override { return cuda_->clock(); }
  Exec exec() override { return cuda_->exec(); }
  StepView stage(const StepPlan& plan) override { return cuda_->stage(plan); }
  void run(const Key& key, const std::function<void()>& forward) override {
    Key mine = key;
    mine.first_logit += 1000 * variant;
    cuda_->run(mine, forward);
  }
  void set_replay(bool on) override { cuda_->set_replay(on); }
  void wait() override { cuda_->wait(); }

  std::vector<std::string> names;

 private:
  std::unique_ptr<Backend> cuda_;
  OpTable table_;
};

double step_us(Session& session, int32_t streams, int steps) {
  std::vector<double> us;
  const std::vector<SamplingParams> greedy(static_cast<size_t>(streams));
  for (int i = 0; i < steps; ++i) {
    Step step;
    for (int32_t s = 0; s < streams; ++s) {
      Row row;
      row.token = static_cast<int32_t>(check::uniform_int(0, session.info().vocab - 1));
      row.stream = s;
      row.wants_logits = true;
      step.rows.push_back(row);
    }
    const auto start = Clock::now();
    session.step_and_sample(step, greedy);
    us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  std::sort(us.begin(), us.end());
  return us[us.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: bench_gpu_marginal FUEL [context] [steps] [streams]\n");
    return 2;
  }
  const auto number = [&](int i, int otherwise) { return argc > i ? std::atoi(argv[i]) : otherwise; };
  const int context = number(2, 512), steps = number(3, 48), streams = number(4, 1);
  try {
    const std::string fuel = argv[1];
    const glm5::Config config = glm5::read_config(fuel);
    glm5::Loader loader(config, fuel);
    auto backend = std::make_unique<Variants>(make_cuda_backend(0, {512, config.hidden_size}));
    const std::vector<std::string> names = backend->names;
    auto weights = loader.load(backend->memory(), {});
    auto model = std::make_unique<glm5::Glm5>(config, glm5::Precision{true, true}, std::move(weights),
                                              std::move(backend), 512, context + 30 * steps);
    Session session(std::move(model), {context + 30 * steps, 512, streams, int64_t{16} << 30});
    for (int32_t s = 0; s < streams; ++s) {
      session.open();
      for (int fed = 0; fed < context;) {
        Step step;
        for (int i = 0; i < 512 && fed < context; ++i, ++fed) {
          Row row;
          row.token = static_cast<int32_t>(check::uniform_int(0, config.vocab_size - 1));
          row.stream = s;
          row.kind = RowKind::kPrefill;
          step.rows.push_back(row);
        }
        session.step(step);
      }
    }
    const double whole = step_us(session, streams, steps);
    std::printf("a step of %d streams: %.1f us\n", streams, whole);
    for (const std::string& name : names) {
      skipped = name;
      ++variant;
      std::printf("  %-16s %8.1f us\n", name.c_str(), whole - step_us(session, streams, steps));
      std::fflush(stdout);
    }
    skipped.clear();
    ++variant;
    std::printf("once more: %.1f us\n", step_us(session, streams, steps));
  } catch (const Error& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
  return 0;
}
