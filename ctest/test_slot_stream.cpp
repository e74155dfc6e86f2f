// The engine on experts that come in the waves of a device's cache, which split hits and misses and whose number depends
// on the rows only: the bits of experts in place. Cache and slots are the host's here, and the ops the CPU's. So with
// exclusive tiers, where misses trade places with what makes way for them.
#include <cstring>
#include <memory>

#include "check.h"
#include "experts/slot_state.h"
#include "experts/split_bank.h"
#include "glm5-moe-nvfp4-2b/forward.h"
#include "ops/slot_lookup.h"
#include "runtime/session.h"
#include "slot_team.h"

namespace {

using namespace rocket;

constexpr int32_t kMaxRows = 64;

// Misses are copied from where the experts lie in the mapped file, or from the places of those without a slot.
class SlotStream : public ExpertStream {
 public:
  SlotStream(const CacheConfig& config, std::vector<std::vector<ExpertWeights>> from, Tiers tiers)
      : state_(config, int64_t{kMaxRows} * config.topk, tiers), from_(std::move(from)) {
    std::vector<std::span<const ExpertWeights>> tables(from_.begin(), from_.end());
    int64_t slot_bytes = 0;
    for (const auto& table : tables) slot_bytes = std::max(slot_bytes, slot_bytes_of(table));
    slots_.resize(static_cast<size_t>(slot_bytes * state_.slots()), '\x7f');
    std::vector<const char*> places;
    if (tiers == Tiers::kExclusive) {
      const std::vector<int32_t> rest = state_.in_places();
      places_.resize(rest.size() * static_cast<size_t>(slot_bytes), '\x7e');
      for (size_t i = 0; i < rest.size(); ++i) {
        places.push_back(places_.data() + i * static_cast<size_t>(slot_bytes));
        copy(rest[i], config.experts, places_.data() + i * static_cast<size_t>(slot_bytes));
      }
      for (size_t i = 0; i < state_.in_slots().size(); ++i)
        copy(state_.in_slots()[i], config.experts, slots_.data() + i * static_cast<size_t>(slot_bytes));
    }
    image_ = state_.image(tables, places, slots_.data(), slot_bytes);
    cache_ = state_.cache(image_.data(), slots_.data(), slot_bytes);
    bank_ = state_.bank(image_.data());
  }
  const ExpertWeights* table(int32_t layer) const { return cache_.table + layer * cache_.experts; }

  const char* store() const override { return "mapped file"; }
  void begin_step() override {}
  int32_t find(int32_t layer, std::span<const int32_t> ids, Exec&) override {
    ids_ = ids;
    check::Team team(1);
    check::HostBlock block(team, 0);
    slot_lookup(cache_, layer, ids.data(), static_cast<int64_t>(ids.size()), scratch_, block);
    return state_.waves(layer, static_cast<int64_t>(ids.size()));
  }
  const int32_t* fetch(int32_t wave, Exec&) override {
    if (wave == 0) return cache_.hit_id;
    const SlotRange range = slot_wave(*cache_.lookup, wave);
    if (cache_.place_of) {
      swap_on_host(cache_, bank_, wave);
    } else {
      for (int32_t m = range.begin; m < range.end; ++m)
        copy(cache_.lookup->layer * cache_.experts + cache_.miss[m].expert, cache_.experts,
             slots_.data() + cache_.miss[m].slot * cache_.slot_bytes);
    }
    if (wave > 1) {
      for (size_t i = 0; i < ids_.size(); ++i) cache_.miss_id[i] = slot_wave_id(range, cache_.rank, ids_[i]);
    }
    most_waves = std::max(most_waves, range.end > range.begin ? wave + 1 : 0);
    return cache_.miss_id;
  }
  StreamStats stats() override { return state_.stats(image_.data() + state_.stats_at()); }

  int32_t most_waves = 0;  // that had something to do

 private:
  void copy(int32_t key, int32_t experts, char* to) {
    const ExpertWeights& e = from_[static_cast<size_t>(key / experts)][static_cast<size_t>(key % experts)];
    const SlotLayout layout = slot_layout(e);
    const Weight* const weights[] = {&e.gate, &e.up, &e.down};
    for (size_t i = 0; i < 3; ++i) {
      std::memcpy(to + layout.data_at[i], weights[i]->data, static_cast<size_t>(layout.data_bytes[i]));
      if (layout.scale_bytes[i] > 0)
        std::memcpy(to + layout.scale_at[i], weights[i]->block_scale,
                    static_cast<size_t>(layout.scale_bytes[i]));
    }
  }

  SlotState state_;
  std::vector<std::vector<ExpertWeights>> from_;
  std::vector<char> image_, slots_, places_;
  SlotCache cache_;
  SlotBank bank_;
  SlotScratch scratch_;
  std::span<const int32_t> ids_;
};

// slots 0: experts in place.
struct Loaded {
  explicit Loaded(const CacheConfig& slots, Tiers tiers = Tiers::kInclusive) {
    const glm5::Config config = glm5::read_config(ROCKET_SPARKLER);
    glm5::Loader loader(config, ROCKET_SPARKLER);
    auto backend = make_cpu_backend(2);
    auto weights = loader.load(backend->memory(), {});
    if (slots.slots > 0 || !slots.layer_slots.empty()) {
      std::vector<std::vector<ExpertWeights>> tables;
      for (const glm5::LayerWeights& layer : weights->weights.layer) {
        if (!layer.moe.experts.empty()) tables.push_back(layer.moe.experts);
      }
      CacheConfig cache = slots;
      cache.layers = static_cast<int32_t>(tables.size());
      cache.experts = config.n_routed_experts;
      cache.topk = config.num_experts_per_tok;
      auto made = std::make_unique<SlotStream>(cache, std::move(tables), tiers);
      stream = made.get();
      int32_t number = 0;
      for (glm5::LayerWeights& layer : weights->weights.layer) {
        if (!layer.moe.experts.empty()) layer.moe.resident = stream->table(number++);
      }
      weights->stream = std::move(made);
      weights->weights.experts_in_place = false;
    }
    auto model = std::make_unique<glm5::Glm5>(config, glm5::Precision{}, std::move(weights),
                                              std::move(backend), kMaxRows, 256);
    session = std::make_unique<Session>(std::move(model), SessionLimits{256, kMaxRows, 4, 256 << 20});
  }
  std::unique_ptr<Session> session;
  SlotStream* stream = nullptr;
};

// The logits of a prompt, then of single rows, pairs and a wide step.
std::vector<float> logits_of(Session& session) {
  std::vector<float> all;
  const auto run = [&](int32_t rows, RowKind kind, int32_t streams) {
    Step step;
    for (int32_t i = 0; i < rows; ++i) {
      Row row;
      row.token = (i * 37 + 11 * static_cast<int32_t>(all.size() % 977)) % 4096;
      row.stream = i % streams;
      row.kind = kind;
      row.wants_logits = true;
      step.rows.push_back(row);
    }
    session.step(step);
    const float* logits = session.logits();
    all.insert(all.end(), logits, logits + int64_t{rows} * session.info().vocab);
  };
  session.open();
  session.open();
  run(30, RowKind::kPrefill, 1);
  for (int i = 0; i < 12; ++i) run(i % 2 + 1, RowKind::kDecode, 2);
  run(16, RowKind::kPrefill, 1);
  return all;
}

void all() {
  Loaded plain((CacheConfig()));
  const std::vector<float> expected = logits_of(*plain.session);
  const int64_t layers = plain.session->info().moe_layers, experts = plain.session->info().experts;
  const int64_t topk = plain.session->info().topk;
  std::vector<CacheConfig> sizes;
  for (const int64_t slots : {topk, topk + 1, layers * experts / 4, layers * experts / 2, layers * experts})
    sizes.emplace_back().slots = slots;
  sizes.emplace_back().layer_slots.assign(static_cast<size_t>(layers), topk + 1);
  for (size_t i = 0; i < 2 * sizes.size(); ++i) {
    const CacheConfig& size = sizes[i / 2];
    const bool exclusive = i % 2 == 1;
    if (exclusive && size.slots == layers * experts) continue;  // nothing is left for places
    const std::string what = (size.slots > 0 ? std::to_string(size.slots) + " slots" : "budgets") +
                             std::string(exclusive ? ", exclusive" : "");
    Loaded some(size, exclusive ? Tiers::kExclusive : Tiers::kInclusive);
    const std::vector<float> found = logits_of(*some.session);
    check::same_bits(what, found.data(), expected.data(), static_cast<int64_t>(expected.size()));
    check::expect(size.slots == layers * experts || some.stream->most_waves >= (size.slots == topk ? 3 : 2),
                  what + ": several waves had something to do");
    const EngineStats stats = some.session->stats();
    check::expect(stats.expert_misses > 0 && stats.streamed_bytes > 0, what + ": misses are counted");
    check::expect(stats.expert_layers.size() == static_cast<size_t>(layers), what + ": of each layer");
  }
}

}  // namespace

int main() {
  try {
    all();
  } catch (const std::exception& e) {
    check::expect(false, std::string("unexpected exception: ") + e.what());
  }
  return check::finish("test_slot_stream");
}
