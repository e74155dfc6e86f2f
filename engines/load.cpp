// Chooses the engine for a fuel, plans its memory and loads it.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/memory.h"
#include "boosters.h"
#include "experts/behind.h"
#include "experts/device_stream.h"
#include "experts/slab_store.h"
#include "experts/slot_server.h"
#include "experts/slot_state.h"
#include "fabric/lead.h"
#include "glm5-moe-nvfp4-2b/forward.h"
#include "glm5-moe-nvfp4-2b/loader.h"
#include "runtime/backend.h"
#include "runtime/device.h"
#include "runtime/engine.h"
#include "runtime/session.h"

namespace rocket {
namespace {

constexpr int64_t kReserveBytes = 256 << 20;  // for the program itself and what it asks of the system
constexpr int64_t kDefaultContext = 8192;
constexpr int32_t kDefaultStreams = 8;
constexpr int32_t kDefaultRows = 256, kDefaultCudaRows = 512;  // a chunk of a prompt

struct Plan {
  int32_t max_rows = 0, max_streams = 0;
  int64_t max_context = 0;
  int64_t dense = 0, experts = 0, workspace = 0,
          state = 0;  // bytes; experts resident or in the cache's slots
  std::optional<CacheBudget> cache;
  int64_t cache_state = 0;           // bytes of a device's cache besides its slots; part of the workspace
  std::optional<BehindPlan> behind;  // a device's cache that does not hold all experts
  bool in_place = false;             // no cache: all experts in one memory, the host's and the device's
  std::vector<std::string> choices;

  int64_t total() const { return dense + experts + workspace + state; }
};

// More threads than processors only wait for each other; some more are let through, for tests of the split.
int threads_for(const EngineOptions& options) {
  const int limit = std::max(8, 2 * ThreadPool::available_cpus());
  if (options.threads < 0 || options.threads > limit) {
    throw InputError("threads: expected 0 (automatic) to " + std::to_string(limit) + " here, found " +
                         std::to_string(options.threads),
                     "leave --threads out to use every CPU that may be used");
  }
  return options.threads > 0 ? options.threads : ThreadPool::available_cpus();
}

// What to change where a cache of experts is one of what does not fit.
std::string smaller_cache(const Plan& plan, int64_t available) {
  const int64_t room = available - kReserveBytes - (plan.total() - plan.experts);
  const int64_t slots = room / plan.cache->slot_bytes;
  if (slots < ExpertCache::fewest_slots(plan.cache->config))
    return "lower --max-context or --prefill-chunk, or free memory: no cache of experts fits beside the rest";
  return "lower the expert cache to " + std::to_string(slots) + " slots (--expert-slots), " +
         format_bytes(slots * plan.cache->slot_bytes) + ", or free memory";
}

[[noreturn]] void does_not_fit(const Plan& plan, const MemoryAvailable& available) {
  const std::string kind = plan.in_place ? "routed experts in place "
                           : plan.cache  ? "expert slots "
                                         : "routed experts ";
  const std::string experts = plan.experts > 0 ? kind + format_bytes(plan.experts) + ", " : std::string();
  throw PlanError(
      "memory: needs " + format_bytes(plan.total() + kReserveBytes) + " (dense weights " +
          format_bytes(plan.dense) + ", " + experts + "state of " + std::to_string(plan.max_streams) +
          " streams of " + std::to_string(plan.max_context) + " tokens " + format_bytes(plan.state) +
          ", workspace " + format_bytes(plan.workspace) + ", reserve " + format_bytes(kReserveBytes) +
          "), available " + format_bytes(available.bytes) + " (" + available.source + ")",
      plan.in_place
          ? "host and device share one memory, so that a cache would be a second copy: free memory, use a "
            "smaller fuel, or leave experts in a slab (--expert-slab, --expert-bank no)"
      : plan.cache ? smaller_cache(plan, available.bytes)
      : plan.dense + plan.experts + kReserveBytes > available.bytes
          ? "the weights alone do not fit: free memory, raise the container's limit, use --backend "
            "cpu, or a smaller fuel"
          : "lower --max-context or --prefill-chunk, or free memory");
}

void check_limits(const EngineOptions& options, const glm5::Config& config) {
  if (options.max_rows < 0 || options.max_rows > 65536) {
    throw InputError("rows a step: expected 0 (automatic) to 65536, found " +
                     std::to_string(options.max_rows));
  }
  if (options.max_streams < 0 || options.max_streams > 65536) {
    throw InputError("streams: expected 0 (automatic) to 65536, found " +
                     std::to_string(options.max_streams));
  }
  if (options.max_context < 0 || options.max_context > config.max_position_embeddings) {
    throw InputError("context: expected 0 (automatic) to the model's " +
                         std::to_string(config.max_position_embeddings) + " tokens, found " +
                         std::to_string(options.max_context),
                     "lower --max-context");
  }
}

CacheBudget cache_budget(const CacheRequest& request, const glm5::Config& config, const glm5::Loader& loader,
                         const ExpertSplit& split, int32_t rank) {
  CacheConfig shape;
  shape.experts = config.n_routed_experts;
  shape.topk = config.num_experts_per_tok;
  std::vector<int32_t> numbers;
  for (size_t i = 0; i < config.is_moe.size(); ++i) {
    if (config.is_moe[i]) numbers.push_back(static_cast<int32_t>(i));
  }
  shape.layers = static_cast<int32_t>(numbers.size());
  for (int32_t layer = 0; layer < shape.layers && split.ranks > 1; ++layer)
    shape.owned.push_back(split.owned(layer, rank));
  return plan_cache(request, shape, loader.slot_bytes(), numbers);
}

// How many experts are this rank's.
int64_t own_experts(const CacheConfig& cache) {
  if (cache.owned.empty()) return int64_t{cache.layers} * cache.experts;
  return std::accumulate(cache.owned.begin(), cache.owned.end(), int64_t{0});
}

bool holds_all(const CacheBudget& cache) {
  return cache.slots == own_experts(cache.config);
}

// Instead of a cache, where host and device have one memory.
void plan_in_place(Plan& plan, const glm5::Loader& loader) {
  const CacheConfig& cache = plan.cache->config;
  plan.in_place = true;
  plan.experts = loader.slots_bytes();
  plan.cache->slots = own_experts(cache);
  plan.cache->about = "expert cache: none is made, as host and device share one memory: all " +
                      std::to_string(plan.cache->slots) + " experts, " + format_bytes(plan.experts) +
                      ", lie there once and are read in place";
}

// Of a cache in a device's memory. One that holds all of the rank's experts is filled at the start.
void plan_device_cache(Plan& plan, const glm5::Config& config, const glm5::Loader& loader, int32_t rows) {
  const CacheConfig& cache = plan.cache->config;
  if (holds_all(*plan.cache)) {
    plan.experts = loader.slots_bytes();
    plan.cache->about += "; they are loaded at the start, and none is streamed";
    return;
  }
  plan.cache_state = SlotState(cache, int64_t{rows} * config.num_experts_per_tok).bytes();
}

// Where the experts are that have no slot. With one memory all of them do not fit into it, or shall not be there.
void choose_behind(Plan& plan, const EngineOptions& options, const glm5::Loader& loader, Backend& backend) {
  const CacheConfig& cache = plan.cache->config;
  BehindRequest r;
  const bool shared = device_shares_memory(backend.exec());
  r.bank = shared ? "no" : options.expert_bank;
  r.slab = !options.expert_slab.empty();
  r.experts = own_experts(cache);
  r.whole = cache.owned.empty();
  r.slots = plan.cache->slots;
  r.slot_bytes = plan.cache->slot_bytes;
  r.bank_bytes = loader.slots_bytes();
  r.staging_bytes = SlotServer::kParts * SlotServer::staging_for(r.slot_bytes, cache.experts).part_bytes();
  r.dense_bytes = plan.dense;
  r.shared_bytes = shared ? plan.total() : 0;
  r.reserve_bytes = kReserveBytes;
  r.host = memory_available();
  plan.behind = plan_behind(r);
  plan.cache->about += plan.behind->about;
  if (shared && options.expert_bank == "auto")
    plan.cache->about += ", as host and device share one memory, which has no room for all of them";
}

// For an error about what the CPU cannot do: who chose it, unless the user did. `choice` is what choose_backend() said.
std::string chosen_by_auto(const std::string& choice) {
  const std::string prefix = "backend: ";
  return choice.empty() ? "" : "; backend auto chose " + choice.substr(prefix.size());
}

void check_bank_word(const EngineOptions& options, bool on_host, const std::string& choice) {
  const std::string& word = options.expert_bank;
  if (word != "auto" && word != "yes" && word != "exclusive" && word != "no")
    throw InputError("expert bank: expected auto, yes, exclusive or no, found '" + word + "'");
  if (word == "auto") return;
  if (!options.expert_cache.given()) {
    throw InputError("expert bank: expected a cache of experts beside it, found none",
                     "give --expert-cache-gib, --expert-slots or --slot-map");
  }
  if (on_host && word != "no") {
    throw InputError("expert bank: expected a GPU, whose experts it holds; the cpu backend has none" +
                         chosen_by_auto(choice),
                     "leave --expert-bank out");
  }
  if (!on_host && word == "no" && options.expert_slab.empty()) {
    throw InputError("expert bank: without one experts come from a slab, and none was given",
                     "write one with rocket fuel slab, and give it with --expert-slab");
  }
}

// What a plan is made of, and for.
struct PlanSource {
  const EngineOptions& options;
  const glm5::Config& config;
  const glm5::Precision& precision;
  const glm5::Loader& loader;
  Backend& backend;
  int32_t rows;
};

// Whether it fits into what is available.
bool size_plan(const PlanSource& from, bool in_place, const MemoryAvailable& available, Plan& plan) {
  const auto& [options, config, precision, loader, backend, rows] = from;
  const StateLayout layout = glm5::Glm5::state_layout(config, precision);
  plan.dense = loader.dense_bytes();
  if (options.expert_cache.given()) {
    plan.cache = cache_budget(options.expert_cache, config, loader, options.split, options.fabric->rank());
    plan.experts = plan.cache->bytes();
    if (in_place) {
      plan_in_place(plan, loader);
    } else if (!backend.memory().host()) {
      plan_device_cache(plan, config, loader, rows);
    }
  } else if (!backend.memory().host()) {
    plan.experts = loader.slots_bytes();
  }
  plan.max_rows = rows;
  plan.max_streams = options.max_streams ? options.max_streams : kDefaultStreams;
  plan.max_context =
      options.max_context ? options.max_context : std::min(config.max_position_embeddings, kDefaultContext);
  const int64_t weights = plan.dense + plan.experts;
  const auto fits = [&](int64_t share) {
    plan.workspace = plan.cache_state + glm5::Glm5::workspace_bytes(config, loader.shapes(), backend,
                                                                    plan.max_rows, plan.max_context);
    // A stream's pages, and one block more for each stream: the state before a step with checkpoints.
    plan.state = plan.max_streams * (layout.bytes(plan.max_context) + layout.stream_bytes());
    return plan.total() + kReserveBytes <= weights + (available.bytes - weights) / share;
  };
  // What was left open gives way: streams first, while they would take more than half of what is left, then
  // context.
  while (!options.max_streams && plan.max_streams > 1 && !fits(2)) plan.max_streams /= 2;
  while (!options.max_context && plan.max_context > 256 && !fits(1)) plan.max_context /= 2;
  return fits(1);
}

// A cache on a device that does not hold all experts.
bool is_bounded(const Plan& plan, Backend& backend) {
  return plan.cache && !backend.memory().host() && !holds_all(*plan.cache);
}

// Where host and device have one memory, nothing is gained by a second place for experts that fit.
bool try_in_place(const PlanSource& from, Plan& plan) {
  const EngineOptions& options = from.options;
  if (!options.expert_cache.given() || options.expert_bank == "no" ||
      !device_shares_memory(from.backend.exec()))
    return false;
  MemoryAvailable available = from.backend.available();
  if (const MemoryAvailable host = memory_available(); host.bytes < available.bytes) available = host;
  if (size_plan(from, true, available, plan)) return true;
  if (options.expert_bank != "auto" || options.expert_slab.empty()) does_not_fit(plan, available);
  plan = {};
  return false;
}

Plan make_plan(const PlanSource& from) {
  const auto& [options, config, precision, loader, backend, rows] = from;
  Plan plan;
  if (!try_in_place(from, plan)) {
    const MemoryAvailable available = backend.available();
    if (!size_plan(from, false, available, plan)) does_not_fit(plan, available);
    if (is_bounded(plan, backend)) choose_behind(plan, options, loader, backend);
  }
  if (plan.cache) plan.choices.push_back(plan.cache->about);
  if (!options.max_context) {
    plan.choices.push_back("context: " + std::to_string(plan.max_context) +
                           " tokens (--max-context; the model's limit is " +
                           std::to_string(config.max_position_embeddings) + ")");
  }
  return plan;
}

// What is open stays within the plan; checkpoints, forks and snapshots may take half of what is left beyond
// it.
int64_t state_budget(const Plan& plan, Backend& backend) {
  const int64_t left = backend.available().bytes - kReserveBytes - plan.state;
  return plan.state + std::max<int64_t>(0, left / 2);
}

glm5::Precision precision_for(const EngineOptions& options, const Backend& backend,
                              const std::string& choice) {
  const auto choose = [&](const char* what, const std::string& word) {
    if (word != "auto" && word != "f32" && word != "bf16") {
      throw InputError(std::string(what) + ": expected auto, f32 or bf16, found '" + word + "'");
    }
    const bool rounds = backend.rounds();
    if (word == "bf16" && !rounds) {
      throw InputError(std::string(what) + ": the " + backend.name() + " backend computes in float32 only" +
                           chosen_by_auto(choice),
                       "use f32 or auto");
    }
    return rounds && word != "f32";
  };
  return {choose("prefill-precision", options.prefill_precision), choose("kv-dtype", options.kv_dtype)};
}

// Where experts come from that are in no slot. Looked at before anything large is read.
std::unique_ptr<ExpertStore> expert_store(const EngineOptions& options, const glm5::Loader& loader) {
  if (options.expert_slab.empty()) return loader.checkpoint_store();
  return std::make_unique<SlabStore>(options.expert_slab, loader.slab_header());
}

std::unique_ptr<Engine> load(EngineOptions options) {
  Fabric& fabric = *options.fabric;
  const bool several = fabric.ranks() > 1;
  const bool may_be_gpu = options.backend != "cpu";
  const int32_t device = several && may_be_gpu ? device_of_rank(cuda_devices().size()) : 0;
  std::string why;
  const std::string name = choose_backend(options.backend, device, &why);
  glm5::Config config = glm5::read_config(options.fuel_dir);
  if (several) {
    check_split(options, config);
    take_limits(options);
    if (options.split_dense) config = glm5::share_of(config, fabric.ranks());
  }
  check_limits(options, config);
  if (!options.expert_slab.empty() && !options.expert_cache.given()) {
    throw InputError("expert slab: expected a cache of experts beside it, found none",
                     "give --expert-cache-gib, --expert-slots or --slot-map");
  }
  const bool streamed = options.expert_cache.given();
  std::unique_ptr<Backend> backend;  // outlives what lies in its memory, also where loading fails
  auto loader =
      std::make_unique<glm5::Loader>(config, options.fuel_dir, streamed, options.split, fabric.rank());
  if (several) compare_papers(fabric, paper(options, *loader, name));
  const int32_t rows = options.max_rows ? options.max_rows : name == "cuda" ? kDefaultCudaRows : kDefaultRows;
  backend = name == "cuda" ? make_cuda_backend(threads_for(options), {rows, config.hidden_size, device})
                           : make_cpu_backend(threads_for(options));
  check_bank_word(options, backend->memory().host(), why);
  const glm5::Precision precision = precision_for(options, *backend, why);
  Plan plan = make_plan({options, config, precision, *loader, *backend, rows});
  if (!backend->note().empty()) plan.choices.insert(plan.choices.begin(), backend->note());
  if (!why.empty()) plan.choices.insert(plan.choices.begin(), why);
  Backend& on = *backend;
  const bool on_host = on.memory().host();
  std::unique_ptr<ExpertStore> store;
  if (plan.cache && (on_host || plan.behind || plan.in_place)) store = expert_store(options, *loader);
  if (store && !store->note().empty()) plan.choices.push_back(store->note());
  if (!store && !options.expert_slab.empty())
    plan.choices.push_back("expert slab: not read, as experts are loaded once, from the fuel's files");
  std::unique_ptr<glm5::LoadedWeights> weights;
  if (plan.in_place) {
    weights = loader->load_in_place(std::move(store), on.memory(), on.exec(), options.progress);
  } else if (plan.behind) {
    const int64_t choices = int64_t{rows} * config.num_experts_per_tok;
    weights = loader->load_streamed(plan.cache->config, std::move(store), plan.behind->behind, on.memory(),
                                    on.exec(), choices, options.progress);
  } else if (store) {
    weights = loader->load_streamed(plan.cache->config, std::move(store), options.progress);
  } else {
    // A loader that was made for a stream knows no mapped experts.
    if (plan.cache)
      loader = std::make_unique<glm5::Loader>(config, options.fuel_dir, false, options.split, fabric.rank());
    weights = loader->load(on.memory(), options.progress);
  }
  const std::string store_name = weights->stream ? weights->stream->store() : "";
  auto model = std::make_unique<glm5::Glm5>(config, precision, std::move(weights), std::move(backend),
                                            plan.max_rows, plan.max_context);
  EngineInfo& info = model->info();
  info.fuel = options.fuel_dir;
  info.choices = plan.choices;
  if (plan.cache) {
    info.expert_store = store_name;
    info.slot_bytes = plan.cache->slot_bytes;
    info.slots = plan.cache->slots;
    info.slots_requested = plan.cache->requested_slots;
    info.cache_bytes_requested = plan.cache->requested_bytes;
    if (plan.behind && plan.behind->behind != Behind::kDisk) info.bank_bytes = plan.behind->bytes;
    if (plan.in_place) info.bank_bytes = plan.experts;
  }
  const SessionLimits limits{plan.max_context, plan.max_rows, plan.max_streams, state_budget(plan, on)};
  if (!several) return std::make_unique<Session>(std::move(model), limits);
  const std::string exchange = model->join(fabric, options.split);
  fabric.clear_figures();
  auto session = std::make_unique<Session>(std::move(model), agreed(fabric, limits));
  if (fabric.rank() == 0) {
    session->info().choices.push_back(about_boosters(fabric, session->info(), exchange));
    return std::make_unique<Lead>(std::move(session), options.fabric);
  }
  if (config.dense_ranks == 1) session->set_silent();  // else each rank has rows of lm_head
  return session;
}

}  // namespace

std::unique_ptr<Engine> load_engine(const EngineOptions& given) {
  EngineOptions options = given;
  if (!options.fabric) options.fabric = make_solo_fabric();
  if (options.fabric->ranks() == 1) {
    options.split = {};
    return load(std::move(options));
  }
  try {
    return load(options);
  } catch (const Error& error) {
    options.fabric->fail(error.what(), error.hint());
    throw;
  } catch (const std::exception& error) {
    options.fabric->fail(error.what(), "");
    throw;
  }
}

void follow_engine(Engine& engine, Fabric& fabric) {
  follow(dynamic_cast<Session&>(engine), fabric);
}

}  // namespace rocket
