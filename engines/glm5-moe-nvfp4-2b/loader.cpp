#include "glm5-moe-nvfp4-2b/loader.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "fabric/handshake.h"
#include "fuel/names.h"
#include "fuel/nvfp4.h"

namespace rocket::glm5 {
namespace {

constexpr int kEmbedHandle = 0;  // the first weight that is bound

bool plain(WeightFormat format) {
  return format == WeightFormat::kF32 || format == WeightFormat::kBF16;
}

// FNV-1a over config.json and every tensor's name and shape, in name order.
uint64_t fingerprint_of(const Checkpoint& checkpoint) {
  uint64_t hash = 0xcbf29ce484222325u;
  const auto add = [&](const std::string& text) {
    for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  };
  add(read_text_file(checkpoint.dir() + "/config.json"));
  std::vector<std::string> lines;
  for (const auto& file : checkpoint.files()) {
    for (const TensorInfo& tensor : file->tensors())
      lines.push_back(tensor.name + " " + tensor.describe() + "\n");
  }
  std::sort(lines.begin(), lines.end());
  for (const std::string& line : lines) add(line);
  return hash;
}

}  // namespace

Loader::Loader(const Config& config, const std::string& dir, bool streamed, const ExpertSplit& split,
               int32_t rank)
    : config_(config),
      streamed_(streamed),
      split_(split),
      rank_(rank),
      loaded_(std::make_unique<LoadedWeights>()) {
  loaded_->checkpoint = std::make_shared<Checkpoint>(dir);
  for (const auto& file : loaded_->checkpoint->files()) {
    if (!file->sparse()) continue;
    throw FuelError(file->path() + ": this fuel is hollow: its files have names and shapes but no data",
                    "it serves for accounting and planning; decode from the real checkpoint");
  }
  loader_ = std::make_unique<WeightLoader>(*loaded_->checkpoint);
  const Naming naming = detect_naming(*loaded_->checkpoint);
  const std::string& prefix = naming.trunk;
  const int64_t H = config.hidden_size, V = config.vocab_size;
  Weights& w = loaded_->weights;
  w.ranks = split.ranks;
  w.layer.resize(static_cast<size_t>(config.num_hidden_layers));
  bind_plain(prefix + "embed_tokens", V, H, &w.embed);
  const std::string head = naming.head + "lm_head";
  tied_ = config.tie_word_embeddings && !has_weight(*loaded_->checkpoint, head);
  bind_head(tied_ ? prefix + "embed_tokens" : head, tied_);
  small(prefix + "norm.weight", {H}, &w.norm);
  for (size_t i = 0; i < w.layer.size(); ++i) {
    const std::string layer = prefix + "layers." + std::to_string(i) + ".";
    hyper(layer, "attn", "input_layernorm", w.layer[i].attn_hc);
    if (config.is_kda[i]) {
      kda(layer + "self_attn.", w.layer[i].kda);
    } else {
      mla(layer + "self_attn.", config.indexer_full[i], w.layer[i].mla);
    }
    hyper(layer, "ffn", "post_attention_layernorm", w.layer[i].ffn_hc);
    if (config.is_moe[i]) {
      if (streamed) sources_.push_back({static_cast<int32_t>(i), {}});
      moe(layer + "mlp.", w.layer[i].moe);
    } else {
      mlp(layer + "mlp.", int64_t{config.intermediate_size} * config.dense_ranks, w.layer[i].mlp);
    }
  }
  if (config.dense_ranks > 1) check_cuts(possible_ranks(config));
  w.fingerprint = fingerprint_of(*loaded_->checkpoint);
  count_weights();
  const TensorCensus census = take_census(*loaded_->checkpoint, naming, config.num_hidden_layers);
  w.draft_tensors = census.draft.tensors;
  w.draft_bytes = census.draft.bytes;
  w.vision_tensors = census.vision.tensors;
  w.vision_bytes = census.vision.bytes;
}

int Loader::add(const std::string& name, int64_t out, int64_t in, Axis axis) {
  if (axis == Axis::kWhole || config_.dense_ranks == 1) return loader_->add(name, out, in);
  const WeightCut cut{rank_, config_.dense_ranks, axis == Axis::kColumns};
  cuts_.push_back({describe_weight(*loaded_->checkpoint, name, out, in), cut.columns});
  if (!can_cut(cuts_.back().whole, cut.parts, cut.columns))
    return loader_->add(name, out, in);  // check_cuts() throws once all are known
  return loader_->add(name, out, in, cut);
}

void Loader::bind(const std::string& name, int64_t out, int64_t in, Weight* to, Axis axis) {
  const int handle = add(name, out, in, axis);
  const WeightSource& source = loader_->source(handle);
  *to = Weight{source.format, source.out, source.in, nullptr, nullptr, 1.0f};
  bound_.emplace_back(handle, to);
}

void Loader::bind_plain(const std::string& name, int64_t out, int64_t in, Weight* to, Axis axis) {
  const int handle = add(name, out, in, axis);
  const WeightSource& source = loader_->source(handle);
  *to = Weight{source.format, source.out, source.in, nullptr, nullptr, 1.0f};
  if (plain(to->format)) {
    bound_.emplace_back(handle, to);
  } else {
    to->format = WeightFormat::kF32;
    expanded_.push_back({handle, to});
    expanded_bytes_ += static_cast<int64_t>(Arena::padded(static_cast<size_t>(to->out * to->in) * 4));
  }
}

// The head that is the embedding is there whole; a rank reads its rows of it.
void Loader::bind_head(const std::string& name, bool tied) {
  const int64_t V = config_.vocab_size, H = config_.hidden_size;
  Weight& head = loaded_->weights.lm_head;
  bind(name, V, H, &head, tied ? Axis::kWhole : Axis::kRows);
  if (!tied || config_.dense_ranks == 1) return;
  cuts_.push_back({describe_weight(*loaded_->checkpoint, name, V, H), false});
  head.out = config_.head_rows();
}

void Loader::check_cuts(const std::vector<int32_t>& possible) const {
  const auto fits = [this](int32_t ranks) {
    return std::all_of(cuts_.begin(), cuts_.end(),
                       [ranks](const Cut& cut) { return can_cut(cut.whole, ranks, cut.columns); });
  };
  std::vector<int32_t> good;
  std::copy_if(possible.begin(), possible.end(), std::back_inserter(good), fits);
  for (const Cut& cut : cuts_) {
    if (can_cut(cut.whole, config_.dense_ranks, cut.columns)) continue;
    try {
      cut_weight(cut.whole, {rank_, config_.dense_ranks, cut.columns});
    } catch (const FuelError& error) {
      throw FuelError(std::string("--split-dense: ") + error.what(),
                      "with these weights it works with this many boosters: " + listed(good));
    }
  }
}

void Loader::keep(std::vector<float> values, const float** to) {
  small_bytes_ += static_cast<int64_t>(values.size()) * 4;
  *to = loaded_->small.emplace_back(std::move(values)).data();
  small_to_.push_back(to);
}

std::vector<float> Loader::read_small(const std::string& name, const std::vector<int64_t>& shape) {
  std::vector<float> values = loaded_->checkpoint->read_f32(loaded_->checkpoint->get(name, shape));
  small_digests_ += digest(values.data(), values.size() * sizeof(float));
  return values;
}

void Loader::small(const std::string& name, const std::vector<int64_t>& shape, const float** to, Axis axis) {
  std::vector<float> values = read_small(name, shape);
  if (axis == Axis::kRows && config_.dense_ranks > 1) {
    const auto part = static_cast<std::ptrdiff_t>(values.size()) / config_.dense_ranks;
    const auto first = values.begin() + rank_ * part;
    values = std::vector<float>(first, first + part);
  }
  keep(std::move(values), to);
}

void Loader::hyper(const std::string& layer, const char* block, const char* norm, HyperWeights& w) {
  const int64_t N = config_.hc_mult, H = config_.hidden_size, mix = 2 * N + N * N;
  const std::string name = layer + "hc_" + block + "_";
  bind_plain(name + "fn", mix, N * H, &w.fn);
  small(name + "base", {mix}, &w.base);
  small(name + "scale", {3}, &w.scale);
  small(layer + norm + ".weight", {H}, &w.norm);
}

// [taps, 3C] from q, k and v's [C, 1, taps] (or one conv1d of all three), of this rank's channels.
void Loader::conv_taps(const std::string& layer, const float** to) {
  const int64_t C = config_.kda_channels(), taps = config_.linear_conv_kernel_dim;
  const int64_t ranks = config_.dense_ranks, first = ranks > 1 ? rank_ * C : 0;
  std::vector<float> all(static_cast<size_t>(taps * 3 * C));
  int64_t column = 0;
  for (const char* which : {"q", "k", "v"}) {
    const std::vector<float> values = read_small(layer + which + "_conv1d.weight", {ranks * C, 1, taps});
    for (int64_t c = 0; c < C; ++c, ++column) {
      for (int64_t t = 0; t < taps; ++t)
        all[static_cast<size_t>(t * 3 * C + column)] = values[static_cast<size_t>((first + c) * taps + t)];
    }
  }
  keep(std::move(all), to);
}

void Loader::kda(const std::string& layer, KdaWeights& w) {
  const int64_t H = config_.hidden_size, D = config_.linear_head_dim,
                heads = int64_t{config_.linear_num_heads} * config_.dense_ranks, C = heads * D;
  bind(layer + "q_proj", C, H, &w.q, Axis::kRows);
  bind(layer + "k_proj", C, H, &w.k, Axis::kRows);
  bind(layer + "v_proj", C, H, &w.v, Axis::kRows);
  bind(layer + "f_a_proj", D, H, &w.f_a);
  bind(layer + "f_b_proj", C, D, &w.f_b, Axis::kRows);
  bind(layer + "g_a_proj", D, H, &w.g_a);
  bind(layer + "g_b_proj", C, D, &w.g_b, Axis::kRows);
  bind(layer + "b_proj", heads, H, &w.b, Axis::kRows);
  bind(layer + "o_proj", H, C, &w.o, Axis::kColumns);
  conv_taps(layer, &w.conv);
  small(layer + "dt_bias", {C}, &w.dt_bias, Axis::kRows);
  small(layer + "A_log", {heads}, &w.a_log, Axis::kRows);
  small(layer + "o_norm.weight", {D}, &w.o_norm);
}

void Loader::mla(const std::string& layer, bool full_indexer, MlaWeights& w) {
  const int64_t H = config_.hidden_size, q_rank = config_.q_lora_rank, rank = config_.kv_lora_rank;
  const int64_t heads = int64_t{config_.num_attention_heads} * config_.dense_ranks;
  const int64_t qk = config_.qk_head_dim(), v = config_.v_head_dim;
  bind(layer + "q_a_proj", q_rank, H, &w.q_a);
  bind(layer + "q_b_proj", heads * qk, q_rank, &w.q_b, Axis::kRows);
  bind(layer + "kv_a_proj_with_mqa", rank + config_.qk_rope_head_dim, H, &w.kv_a);
  bind_plain(layer + "kv_b_proj", heads * (config_.qk_nope_head_dim + v), rank, &w.kv_b, Axis::kRows);
  bind(layer + "o_proj", H, heads * v, &w.o, Axis::kColumns);
  small(layer + "q_a_layernorm.weight", {q_rank}, &w.q_a_norm);
  small(layer + "kv_a_layernorm.weight", {rank}, &w.kv_a_norm);
  if (config_.attention_bias) {
    small(layer + "q_a_proj.bias", {q_rank}, &w.q_a_bias);
    small(layer + "kv_a_proj_with_mqa.bias", {rank}, &w.kv_a_bias);
    if (config_.dense_ranks > 1 && rank_ > 0) {
      read_small(layer + "o_proj.bias", {H});  // rank 0 adds it, once
    } else {
      small(layer + "o_proj.bias", {H}, &w.o_bias);
    }
  }
  if (!full_indexer) return;
  const int64_t D = config_.index_head_dim, index_heads = config_.index_n_heads;
  const std::string indexer = layer + "indexer.";
  bind(indexer + "wq_b", index_heads * D, q_rank, &w.indexer.wq_b);
  bind(indexer + "wk", D, H, &w.indexer.wk);
  bind(indexer + "index_kpool_compress_gate", D, H, &w.indexer.gate);
  bind(indexer + "weights_proj", index_heads, H, &w.indexer.weights_proj);
  small(indexer + "k_norm.weight", {D}, &w.indexer.k_norm);
  small(indexer + "k_norm.bias", {D}, &w.indexer.k_norm_bias);
  small(indexer + "index_kpool_compress_ape", {config_.index_kpool, D}, &w.indexer.ape);
}

void Loader::mlp(const std::string& mlp, int64_t inner, MlpWeights& w) {
  bind(mlp + "gate_proj", inner, config_.hidden_size, &w.gate, Axis::kRows);
  bind(mlp + "up_proj", inner, config_.hidden_size, &w.up, Axis::kRows);
  bind(mlp + "down_proj", config_.hidden_size, inner, &w.down, Axis::kColumns);
}

void Loader::moe(const std::string& mlp, MoeWeights& w) {
  const int64_t H = config_.hidden_size, I = config_.moe_intermediate_size, E = config_.n_routed_experts;
  bind(mlp + "gate", E, H, &w.router);
  small(mlp + "gate.e_score_correction_bias", {E}, &w.bias);
  this->mlp(mlp + "shared_experts.", I * config_.n_shared_experts, w.shared);
  w.experts.resize(static_cast<size_t>(E));
  Weights& all = loaded_->weights;
  const int64_t before = all.owned_bytes;
  const int32_t layer = moe_layers_++;
  for (int64_t e = 0; e < E; ++e) {
    ExpertWeights& to = w.experts[static_cast<size_t>(e)];
    const std::string name = mlp + "experts." + std::to_string(e) + ".";
    ExpertSource source;
    const bool owned = split_.owner_of(layer, static_cast<int32_t>(e)) == rank_;
    expert(name + "gate_proj", I, H, owned, &to.gate, source[0]);
    expert(name + "up_proj", I, H, owned, &to.up, source[1]);
    expert(name + "down_proj", H, I, owned, &to.down, source[2]);
    const int64_t bytes = source[0].memory_bytes + source[1].memory_bytes + source[2].memory_bytes;
    if (streamed_) sources_.back().experts.push_back(std::move(source));
    all.slot_bytes = std::max(all.slot_bytes, bytes);
    all.expert_bytes += bytes;
    all.owned_bytes += owned ? bytes : 0;
    all.experts_owned += owned;
  }
  routed_token_bytes_ += (all.owned_bytes - before) * config_.num_experts_per_tok / E;
}

// Experts stay in the mapped file, except in a format that the ops do not take as it lies, or in a slot.
// Of another rank's only the shape is known.
void Loader::expert(const std::string& name, int64_t out, int64_t in, bool owned, Weight* to,
                    WeightSource& source) {
  source = describe_weight(*loaded_->checkpoint, name, out, in);
  if (streamed_) {
    *to = unplaced_weight(*loaded_->checkpoint, source);  // another rank's too: a slab is of all
  } else if (!owned) {
    *to = Weight{source.format, out, in, nullptr, nullptr, 1.0f};
  } else if (source.in_place) {
    *to = map_weight(*loaded_->checkpoint, source);
  } else {
    *to = Weight{source.format, out, in, nullptr, nullptr, 1.0f};  // its shape, for the plan
    bound_experts_.emplace_back(loader_->add(name, out, in), to);
  }
}

std::string Loader::small_digest() const {
  return digest(small_digests_.data(), small_digests_.size());
}

std::string Loader::sample_digest() const {
  constexpr uint64_t kPiece = 4096, kPieces = 4096;
  struct Tensor {
    const TensorInfo* info;
    const SafetensorsFile* file;
  };
  std::vector<Tensor> all;
  for (const auto& file : loaded_->checkpoint->files()) {
    for (const TensorInfo& tensor : file->tensors()) all.push_back({&tensor, file.get()});
  }
  std::sort(all.begin(), all.end(),
            [](const Tensor& a, const Tensor& b) { return a.info->name < b.info->name; });
  std::string sums;
  std::vector<uint8_t> piece(kPiece);
  const size_t each = all.size() / kPieces | 1;  // odd: not the same part of every expert
  for (size_t i = 0; i < all.size(); i += each) {
    const TensorInfo& tensor = *all[i].info;
    const uint64_t bytes = std::min(kPiece, tensor.bytes);
    all[i].file->read(tensor.offset + (tensor.bytes - bytes) / 2, bytes, piece.data());
    sums += digest(piece.data(), bytes);
  }
  return digest(sums.data(), sums.size());
}

int64_t Loader::dense_bytes() const {
  return loader_->arena_bytes() + expanded_bytes_ + small_bytes_;
}

// What a token reads: of an expanded weight the float32 copy, of the embedding one row, of the experts those
// that are chosen, in whatever format each layer has them.
void Loader::count_weights() {
  Weights& w = loaded_->weights;
  int64_t dense = small_bytes_;
  std::vector<bool> counted(loader_->size());
  for (const auto& [handle, to] : bound_) {
    const WeightSource& source = loader_->source(handle);
    if (counted[static_cast<size_t>(handle)]) continue;
    counted[static_cast<size_t>(handle)] = true;
    if (handle == kEmbedHandle) {
      dense += source.memory_bytes / (tied_ ? config_.dense_ranks : source.out);
    } else {
      dense += source.memory_bytes;
    }
  }
  for (const Expansion& expansion : expanded_) {
    const WeightSource& source = loader_->source(expansion.handle);
    dense += 4 * source.in * (expansion.handle == kEmbedHandle ? 1 : source.out);
  }
  w.dense_bytes = dense_bytes();
  w.token_bytes = dense + routed_token_bytes_;
}

void Loader::load_host(const WeightLoader::Progress& progress) {
  loaded_->arena = Arena(static_cast<size_t>(loader_->arena_bytes() + expanded_bytes_), "dense weights");
  loader_->load(loaded_->arena, progress);
  for (const auto* list : {&bound_, &bound_experts_}) {
    for (const auto& [handle, to] : *list) *to = loader_->weight(handle);
  }
  for (const Expansion& expansion : expanded_) {
    const Weight& packed = loader_->weight(expansion.handle);
    float* values = loaded_->arena.take<float>(packed.out * packed.in);
    dequantise_rows(packed, 0, packed.out, values);
    *expansion.to = Weight{WeightFormat::kF32, packed.out, packed.in, values, nullptr, 1.0f};
  }
  for (LayerWeights& layer : loaded_->weights.layer) layer.moe.resident = layer.moe.experts.data();
  Weight& head = loaded_->weights.lm_head;
  if (tied_ && config_.dense_ranks > 1)
    head = rows_of(head, int64_t{rank_} * config_.head_rows(), config_.head_rows());
}

std::unique_ptr<LoadedWeights> Loader::load(MemorySpace& memory, const WeightLoader::Progress& progress) {
  load_host(progress);
  if (!memory.host()) {
    move_experts(memory);
    loaded_->checkpoint->check_unchanged();  // experts were read where they lie
    move_dense(memory);
    move_tables(memory);
  }
  return std::move(loaded_);
}

std::unique_ptr<LoadedWeights> Loader::load_streamed(const CacheConfig& cache,
                                                     std::unique_ptr<ExpertStore> store,
                                                     const WeightLoader::Progress& progress) {
  load_host(progress);
  std::vector<std::span<ExpertWeights>> tables;
  for (LayerWeights& layer : loaded_->weights.layer) {
    if (!layer.moe.experts.empty()) tables.emplace_back(layer.moe.experts);
  }
  loaded_->stream = std::make_unique<HostStream>(cache, std::move(store), std::move(tables));
  loaded_->weights.experts_in_place = false;
  return std::move(loaded_);
}

}  // namespace rocket::glm5
