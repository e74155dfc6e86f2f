#include "glm5-moe-nvfp4-2b/config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <optional>

#include "base/error.h"
#include "fuel/checkpoint.h"

namespace rocket::glm5 {

namespace {

constexpr char kNested[] = "glm5_next";
constexpr char kFlat[] = "glm5_next_text";

std::string shown(const Json& json) {
  if (json.is_string()) return json_quote(json.string());
  if (json.is_bool()) return json.boolean() ? "true" : "false";
  if (const auto whole = json.integer()) return std::to_string(*whole);
  if (json.is_number()) return std::to_string(json.number());
  return json.kind_name();
}

// Fields of one object of config.json. A field that is absent keeps its default. null is a value like any
// other: it is refused where a number is due, as transformers does, and means "absent" for fields that may be
// null.
class Fields {
 public:
  Fields(const Json& json, std::string where) : json_(json), where_(std::move(where)) {}

  [[noreturn]] void fail(const std::string& field, const std::string& expected,
                         const std::string& found) const {
    throw FuelError(where_ + field + ": expected " + expected + ", found " + found);
  }

  const Json* find(const char* field) const { return json_.find(field); }

  // Absent or null: nothing.
  const Json* find_value(const char* field) const {
    const Json* const value = json_.find(field);
    return value == nullptr || value->is_null() ? nullptr : value;
  }

  template <typename T>
  void whole(const char* field, T& out, int64_t low, int64_t high) const {
    const Json* const value = find(field);
    if (value != nullptr) out = static_cast<T>(whole_of(field, *value, low, high));
  }

  int64_t whole_of(const std::string& field, const Json& value, int64_t low, int64_t high) const {
    const auto number = value.integer();
    if (!number || *number < low || *number > high) {
      fail(field, "a whole number from " + std::to_string(low) + " to " + std::to_string(high), shown(value));
    }
    return *number;
  }

  void positive(const char* field, float& out) const {
    const Json* const value = find(field);
    if (value == nullptr) return;
    out = static_cast<float>(value->number());
    if (!value->is_number() || !(out > 0) || !std::isfinite(out))
      fail(field, "a number above 0", shown(*value));
  }

  void flag(const char* field, bool& out) const {
    const Json* const value = find(field);
    if (value == nullptr) return;
    if (!value->is_bool()) fail(field, "true or false", shown(*value));
    out = value->boolean();
  }

  // One entry a layer, each one of `names`; gives indices into `names`. Nothing if absent or null.
  std::optional<std::vector<size_t>> choices(const char* field, int32_t layers,
                                             const std::vector<std::string>& names) const {
    const Json* const value = find_value(field);
    if (value == nullptr) return std::nullopt;
    if (!value->is_array()) fail(field, "a list", shown(*value));
    require_length(field, layers, value->array().size());
    std::vector<size_t> out;
    for (size_t i = 0; i < value->array().size(); ++i) {
      const Json& item = value->array()[i];
      const auto at = std::find(names.begin(), names.end(), item.string());
      if (!item.is_string() || at == names.end()) {
        std::string all = names.front();
        for (size_t n = 1; n < names.size(); ++n) all += (n + 1 == names.size() ? " or " : ", ") + names[n];
        fail(field + ("[" + std::to_string(i) + "]"), all, shown(item));
      }
      out.push_back(static_cast<size_t>(at - names.begin()));
    }
    return out;
  }

  void require_length(const char* field, int32_t layers, size_t found) const {
    if (found == static_cast<size_t>(layers)) return;
    fail(field, std::to_string(layers) + " entries (num_hidden_layers)", std::to_string(found));
  }

 private:
  const Json& json_;
  std::string where_;
};

void read_sizes(const Fields& fields, Config& config) {
  fields.whole("vocab_size", config.vocab_size, 1, 1 << 24);
  fields.whole("hidden_size", config.hidden_size, 1, 1 << 17);
  fields.whole("intermediate_size", config.intermediate_size, 1, 1 << 20);
  fields.whole("moe_intermediate_size", config.moe_intermediate_size, 1, 1 << 18);
  fields.whole("num_hidden_layers", config.num_hidden_layers, 1, 1024);
  if (fields.find_value("num_nextn_predict_layers") != nullptr) {
    fields.whole("num_nextn_predict_layers", config.num_nextn_predict_layers, 0, 64);
  }
  fields.whole("max_position_embeddings", config.max_position_embeddings, 1,
               std::numeric_limits<int32_t>::max());
  fields.positive("rms_norm_eps", config.rms_norm_eps);
  if (const Json* const act = fields.find("hidden_act"); act != nullptr && act->string() != "silu") {
    fields.fail("hidden_act", "\"silu\"", shown(*act));
  }
  fields.whole("hc_mult", config.hc_mult, 1, 8);
  fields.whole("hc_sinkhorn_iters", config.hc_sinkhorn_iters, 1, 1000);
  fields.positive("hc_eps", config.hc_eps);
}

void read_attention(const Fields& fields, Config& config) {
  fields.whole("num_attention_heads", config.num_attention_heads, 1, 1024);
  int32_t kv_heads = 64;
  fields.whole("num_key_value_heads", kv_heads, 1, 1024);
  if (kv_heads != config.num_attention_heads) {
    fields.fail(
        "num_key_value_heads", std::to_string(config.num_attention_heads) + " as num_attention_heads",
        std::to_string(kv_heads) + (fields.find("num_key_value_heads") == nullptr ? " (the default)" : ""));
  }
  fields.whole("q_lora_rank", config.q_lora_rank, 1, 1 << 16);
  fields.whole("kv_lora_rank", config.kv_lora_rank, 1, 1 << 16);
  fields.whole("qk_nope_head_dim", config.qk_nope_head_dim, 1, 4096);
  // This architecture has no rotary positions.
  fields.whole("qk_rope_head_dim", config.qk_rope_head_dim, 0, 0);
  int32_t qk_head_dim = config.qk_head_dim();
  fields.whole("qk_head_dim", qk_head_dim, config.qk_head_dim(), config.qk_head_dim());
  fields.whole("v_head_dim", config.v_head_dim, 1, 4096);
  fields.flag("attention_bias", config.attention_bias);

  fields.whole("index_head_dim", config.index_head_dim, 1, 512);
  fields.whole("index_n_heads", config.index_n_heads, 1, 1024);
  fields.whole("index_kpool", config.index_kpool, 1, 1024);
  fields.whole("index_topk", config.index_topk, 1, 1 << 20);
  if (config.index_topk % config.index_kpool != 0) {
    fields.fail("index_topk", "a multiple of index_kpool (" + std::to_string(config.index_kpool) + ")",
                std::to_string(config.index_topk));
  }
  fields.flag("index_kpool_always_select_tail", config.index_kpool_always_select_tail);
}

// What other models of the family may choose and this engine does not compute is refused, not ignored.
void refuse_others(const Fields& fields) {
  const auto only = [&](const char* field, const char* expected) {
    const Json* const value = fields.find_value(field);
    if (value != nullptr && value->string() != expected)
      fields.fail(field, json_quote(expected), shown(*value));
  };
  only("scoring_func", "sigmoid");
  only("topk_method", "noaux_tc");
  for (const char* field : {"mhc", "mla_use_nope", "index_kpool_compress"}) {
    bool on = true;
    if (fields.find_value(field) != nullptr) fields.flag(field, on);
    if (!on) fields.fail(field, "true", "false");
  }
}

// A bound of null means no bound, except where linear_attn_config says safe_gate (which is its default): then
// it is -5.
void read_linear_attention(const Fields& fields, const std::string& where, Config& config) {
  constexpr float kSafeBound = -5.0f;
  const Json* bound = fields.find("linear_lower_bound");
  const Json* const nested = fields.find_value("linear_attn_config");
  const auto read = [&](const Fields& from, const char* heads, const char* dim, const char* taps) {
    from.whole(heads, config.linear_num_heads, 1, 1024);
    from.whole(dim, config.linear_head_dim, 8, 256);
    if (config.linear_head_dim % 8 != 0)
      from.fail(dim, "a multiple of 8", std::to_string(config.linear_head_dim));
    from.whole(taps, config.linear_conv_kernel_dim, 2, 8);
  };
  bool safe_gate = false;
  read(fields, "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim");
  if (nested != nullptr) {
    if (!nested->is_object()) fields.fail("linear_attn_config", "an object", shown(*nested));
    const Fields inner(*nested, where + "linear_attn_config.");
    read(inner, "num_heads", "head_dim", "short_conv_kernel_size");
    if (const Json* const inner_bound = inner.find("gate_lower_bound")) bound = inner_bound;
    safe_gate = inner.find("safe_gate") == nullptr;
    if (inner.find_value("safe_gate") != nullptr) inner.flag("safe_gate", safe_gate);
  }
  if (bound == nullptr) return;
  config.linear_bounded = !bound->is_null() || safe_gate;
  if (bound->is_null()) {
    config.linear_lower_bound = kSafeBound;
    return;
  }
  const double value = bound->number();
  config.linear_lower_bound = static_cast<float>(value);
  if (!bound->is_number() || !(value <= 0) || !std::isfinite(config.linear_lower_bound)) {
    const bool inner = nested != nullptr && nested->find("gate_lower_bound") != nullptr;
    fields.fail(inner ? "linear_attn_config.gate_lower_bound" : "linear_lower_bound",
                "a number of at most 0, or null", shown(*bound));
  }
}

void read_experts(const Fields& fields, Config& config) {
  fields.whole("n_routed_experts", config.n_routed_experts, 1, 4096);
  // An alias, which wins where both are given.
  if (fields.find_value("num_local_experts") != nullptr) {
    fields.whole("num_local_experts", config.n_routed_experts, 1, 4096);
  }
  fields.whole("n_shared_experts", config.n_shared_experts, 1, 64);
  fields.whole("n_group", config.n_group, 1, 4096);
  const int32_t experts = config.n_routed_experts, groups = config.n_group;
  if (experts % groups != 0) {
    fields.fail("n_group", "a divisor of n_routed_experts (" + std::to_string(experts) + ")",
                std::to_string(groups));
  }
  // A group is ranked by the sum of its two best.
  if (experts / groups < 2) {
    fields.fail("n_group", "at least 2 of the " + std::to_string(experts) + " experts a group",
                std::to_string(groups) + " groups");
  }
  fields.whole("topk_group", config.topk_group, 1, groups);
  fields.whole("num_experts_per_tok", config.num_experts_per_tok, 1,
               std::min(64, experts / groups * config.topk_group));
  fields.flag("norm_topk_prob", config.norm_topk_prob);
  fields.positive("routed_scaling_factor", config.routed_scaling_factor);
  fields.positive("swiglu_limit", config.swiglu_limit);
}

std::vector<bool> read_indexer_types(const Fields& fields, int32_t layers) {
  const auto is_full = [](const std::vector<size_t>& chosen) {
    std::vector<bool> full;
    for (const size_t choice : chosen) full.push_back(choice == 0);
    return full;
  };
  if (const auto chosen = fields.choices("indexer_types", layers, {"full", "shared"}))
    return is_full(*chosen);
  const Json* const pattern = fields.find_value("index_topk_pattern");
  if (pattern != nullptr && pattern->is_string()) {
    const std::string& letters = pattern->string();
    const size_t other = letters.find_first_not_of("FS");
    if (other != std::string::npos) fields.fail("index_topk_pattern", "letters F and S", shown(*pattern));
    fields.require_length("index_topk_pattern", layers, letters.size());
    std::vector<bool> full;
    for (const char letter : letters) full.push_back(letter == 'F');
    return full;
  }
  if (const auto chosen = fields.choices("index_topk_pattern", layers, {"full", "shared"}))
    return is_full(*chosen);
  constexpr int64_t kMany = 1 << 20;
  int64_t every = 1, offset = 2;
  if (fields.find_value("index_topk_freq") != nullptr) fields.whole("index_topk_freq", every, -kMany, kMany);
  if (fields.find_value("index_skip_topk_offset") != nullptr) {
    fields.whole("index_skip_topk_offset", offset, -kMany, kMany);
  }
  every = std::max<int64_t>(every, 1);
  std::vector<bool> full;
  for (int64_t i = 0; i < layers; ++i) full.push_back(std::max<int64_t>(i - offset + 1, 0) % every == 0);
  return full;
}

void read_layers(const Fields& fields, Config& config) {
  const int32_t layers = config.num_hidden_layers;
  const auto kinds = fields.choices(
      "layer_types", layers,
      {"linear_attention", "full_attention", "indexed_attention", "deepseek_sparse_attention"});
  const auto mlps = fields.choices("mlp_layer_types", layers, {"sparse", "dense"});
  int32_t dense = 3;
  if (!mlps && fields.find_value("first_k_dense_replace") != nullptr) {
    fields.whole("first_k_dense_replace", dense, 0, 1 << 20);
  }
  for (int32_t i = 0; i < layers; ++i) {
    const size_t at = static_cast<size_t>(i);
    config.is_kda.push_back(kinds ? (*kinds)[at] == 0 : i % 4 != 3);
    config.is_moe.push_back(mlps ? (*mlps)[at] == 0 : i >= dense);
  }
  config.indexer_full = read_indexer_types(fields, layers);
  for (size_t i = 0; i < config.is_kda.size(); ++i) {
    if (config.is_kda[i]) continue;
    if (!config.indexer_full[i]) {
      fields.fail("indexer_types[" + std::to_string(i) + "]", "full, since no sparse layer lies before it",
                  "shared");
    }
    break;
  }
}

// A field of the text model where it has one, else of the whole model.
void read_ids(const Fields& text, const Fields& top, const char* field, std::vector<int64_t>& out) {
  constexpr int64_t kLow = -1, kHigh = std::numeric_limits<int32_t>::max();
  const Fields& owner = text.find_value(field) != nullptr ? text : top;
  const Json* const value = owner.find_value(field);
  if (value == nullptr) return;
  if (!value->is_array()) {
    out.push_back(owner.whole_of(field, *value, kLow, kHigh));
    return;
  }
  for (const Json& id : value->array()) out.push_back(owner.whole_of(field, id, kLow, kHigh));
}

void read_tokens(const Fields& text, const Fields& top, Config& config) {
  read_ids(text, top, "eos_token_id", config.eos_token_id);
  std::vector<int64_t> bos;
  read_ids(text, top, "bos_token_id", bos);
  if (!bos.empty()) config.bos_token_id = bos.front();
  // Tying is the whole model's affair: its own field comes first.
  (top.find("tie_word_embeddings") != nullptr ? top : text)
      .flag("tie_word_embeddings", config.tie_word_embeddings);
}

}  // namespace

Config parse_config(const Json& json, const std::string& file) {
  const std::string top_where = file + ": ";
  const Fields top(json, top_where);
  const std::string supported = std::string("model_type: expected ") + kNested + " or " + kFlat + ", found ";
  const Json* const type = top.find("model_type");
  if (type == nullptr || (type->string() != kNested && type->string() != kFlat)) {
    throw FuelError(top_where + supported + (type == nullptr ? "none" : shown(*type)),
                    std::string("this engine runs models of type ") + kNested + " and " + kFlat);
  }
  // Without a text_config the text model's fields are those of the file itself.
  const Json* const nested = type->string() == kNested ? top.find_value("text_config") : nullptr;
  if (nested != nullptr && !nested->is_object()) top.fail("text_config", "an object", shown(*nested));
  const std::string where = top_where + (nested != nullptr ? "text_config." : "");
  const Fields text(nested != nullptr ? *nested : json, where);

  Config config;
  config.model_type = type->string();
  refuse_others(text);
  read_sizes(text, config);
  read_attention(text, config);
  read_linear_attention(text, where, config);
  read_experts(text, config);
  read_layers(text, config);
  read_tokens(text, top, config);
  return config;
}

Config read_config(const std::string& dir) {
  std::error_code error;
  if (!std::filesystem::is_directory(dir, error)) {
    throw FuelError(dir + ": expected a directory that holds a model, found " +
                    (std::filesystem::exists(dir, error) ? "a file" : "nothing"));
  }
  const std::string file = (std::filesystem::path(dir) / "config.json").string();
  if (!std::filesystem::exists(file, error)) {
    throw FuelError(file + ": missing: expected the model's config.json, found none");
  }
  return parse_config(read_json_file(file), file);
}

}  // namespace rocket::glm5
