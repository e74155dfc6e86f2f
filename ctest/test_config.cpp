// config.json of glm5_next: every default and spelling as transformers 5.24 resolves them, and every refusal.
#include <functional>
#include <map>

#include "fuel_files.h"
#include "glm5-moe-nvfp4-2b/config.h"

using fuel_files::throws;
using rocket::FuelError;
using rocket::Json;
using rocket::glm5::Config;
using rocket::glm5::parse_config;
using rocket::glm5::read_config;

namespace {

using Fields = std::map<std::string, std::string>;  // field -> JSON text

std::string object(const Fields& fields) {
  std::string out;
  for (const auto& [name, value] : fields) out += (out.empty() ? "{\"" : ",\"") + name + "\":" + value;
  return out.empty() ? "{}" : out + "}";
}

Config parse(const std::string& text) {
  return parse_config(Json::parse(text), "config.json");
}

Config flat(Fields fields) {
  fields["model_type"] = "\"glm5_next_text\"";
  return parse(object(fields));
}

Config nested(const Fields& text, Fields top = {}) {
  top["model_type"] = "\"glm5_next\"";
  top["text_config"] = object(text);
  return parse(object(top));
}

std::string letters(const std::vector<bool>& flags, char yes, char no) {
  std::string out;
  for (const bool flag : flags) out.push_back(flag ? yes : no);
  return out;
}

void same(const std::string& what, const std::string& found, const std::string& expected) {
  check::expect(found == expected, what + ": expected " + expected + ", found " + found);
}

void defaults() {
  const Config c = flat({});
  check::expect(c.model_type == "glm5_next_text" && c.vocab_size == 154880 && c.hidden_size == 4096 &&
                    c.intermediate_size == 12288 && c.moe_intermediate_size == 2048 &&
                    c.num_hidden_layers == 45 && c.num_nextn_predict_layers == 0 &&
                    c.max_position_embeddings == 1048576,
                "sizes");
  check::expect(c.rms_norm_eps == 1e-5f && !c.tie_word_embeddings && c.hc_mult == 4 &&
                    c.hc_sinkhorn_iters == 20 && c.hc_eps == 1e-6f,
                "norms and streams");
  check::expect(c.num_attention_heads == 64 && c.q_lora_rank == 1536 && c.kv_lora_rank == 512 &&
                    c.qk_nope_head_dim == 256 && c.qk_rope_head_dim == 0 && c.v_head_dim == 256 &&
                    !c.attention_bias && c.qk_head_dim() == 256,
                "sparse MLA");
  check::expect(c.index_topk == 2048 && c.index_head_dim == 128 && c.index_n_heads == 32 &&
                    c.index_kpool == 16 && c.index_kpool_always_select_tail,
                "indexer");
  check::expect(c.linear_num_heads == 64 && c.linear_head_dim == 128 && c.linear_conv_kernel_dim == 4 &&
                    c.linear_bounded && c.linear_lower_bound == -5.0f && c.kda_channels() == 8192,
                "KDA");
  check::expect(c.n_routed_experts == 288 && c.n_shared_experts == 1 && c.num_experts_per_tok == 8 &&
                    c.n_group == 1 && c.topk_group == 1 && c.norm_topk_prob &&
                    c.routed_scaling_factor == 2.5f && c.swiglu_limit == 10.0f,
                "experts");
  check::expect(c.eos_token_id.empty() && c.bos_token_id == -1, "tokens");
  same("layers", letters(c.is_kda, 'K', 'M'), "KKKMKKKMKKKMKKKMKKKMKKKMKKKMKKKMKKKMKKKMKKKMK");
  same("MLPs", letters(c.is_moe, 'S', 'D'), "DDD" + std::string(42, 'S'));
  same("indexers", letters(c.indexer_full, 'F', 'S'), std::string(45, 'F'));
}

void every_field() {
  const Config c = nested({{"vocab_size", "1000"},
                           {"hidden_size", "64"},
                           {"intermediate_size", "96"},
                           {"moe_intermediate_size", "48"},
                           {"num_hidden_layers", "2"},
                           {"num_nextn_predict_layers", "1"},
                           {"max_position_embeddings", "4096"},
                           {"rms_norm_eps", "1e-06"},
                           {"num_attention_heads", "4"},
                           {"num_key_value_heads", "4"},
                           {"q_lora_rank", "24"},
                           {"kv_lora_rank", "16"},
                           {"qk_nope_head_dim", "12"},
                           {"qk_head_dim", "12"},
                           {"v_head_dim", "20"},
                           {"attention_bias", "true"},
                           {"index_topk", "12"},
                           {"index_head_dim", "8"},
                           {"index_n_heads", "2"},
                           {"index_kpool", "4"},
                           {"index_kpool_always_select_tail", "false"},
                           {"linear_num_heads", "3"},
                           {"linear_head_dim", "24"},
                           {"linear_conv_kernel_dim", "3"},
                           {"linear_lower_bound", "-2.5"},
                           {"n_routed_experts", "12"},
                           {"n_shared_experts", "2"},
                           {"num_experts_per_tok", "3"},
                           {"n_group", "4"},
                           {"topk_group", "2"},
                           {"norm_topk_prob", "false"},
                           {"routed_scaling_factor", "1.25"},
                           {"swiglu_limit", "7.0"},
                           {"hc_mult", "2"},
                           {"hc_sinkhorn_iters", "5"},
                           {"hc_eps", "1e-05"},
                           {"eos_token_id", "7"},
                           {"bos_token_id", "5"},
                           {"hidden_act", "\"silu\""},
                           {"head_dim", "99"},
                           {"something_new", "{}"}});
  check::expect(c.model_type == "glm5_next" && c.vocab_size == 1000 && c.hidden_size == 64 &&
                    c.intermediate_size == 96 && c.moe_intermediate_size == 48 && c.num_hidden_layers == 2 &&
                    c.num_nextn_predict_layers == 1 && c.max_position_embeddings == 4096 &&
                    c.rms_norm_eps == 1e-6f,
                "sizes given");
  check::expect(c.num_attention_heads == 4 && c.q_lora_rank == 24 && c.kv_lora_rank == 16 &&
                    c.qk_nope_head_dim == 12 && c.v_head_dim == 20 && c.attention_bias,
                "sparse MLA given");
  check::expect(c.index_topk == 12 && c.index_head_dim == 8 && c.index_n_heads == 2 && c.index_kpool == 4 &&
                    !c.index_kpool_always_select_tail,
                "indexer given");
  check::expect(c.linear_num_heads == 3 && c.linear_head_dim == 24 && c.linear_conv_kernel_dim == 3 &&
                    c.linear_bounded && c.linear_lower_bound == -2.5f,
                "KDA given");
  check::expect(c.n_routed_experts == 12 && c.n_shared_experts == 2 && c.num_experts_per_tok == 3 &&
                    c.n_group == 4 && c.topk_group == 2 && !c.norm_topk_prob &&
                    c.routed_scaling_factor == 1.25f && c.swiglu_limit == 7.0f,
                "experts given");
  check::expect(c.hc_mult == 2 && c.hc_sinkhorn_iters == 5 && c.hc_eps == 1e-5f && c.bos_token_id == 5 &&
                    c.eos_token_id == std::vector<int64_t>{7},
                "the rest given");
  check::expect(flat({{"num_local_experts", "16"}, {"n_routed_experts", "32"}}).n_routed_experts == 16,
                "num_local_experts is an alias that wins");
  check::expect(flat({{"swiglu_limit", "7"}}).swiglu_limit == 7.0f, "a whole number for a real one");
}

void where_the_text_model_is() {
  check::expect(parse(R"({"model_type":"glm5_next","hidden_size":64})").hidden_size == 64, "glm5_next, flat");
  check::expect(parse(R"({"model_type":"glm5_next","hidden_size":64,"text_config":null})").hidden_size == 64,
                "glm5_next, text_config null");
  check::expect(parse(R"({"model_type":"glm5_next","hidden_size":64,"text_config":{}})").hidden_size == 4096,
                "glm5_next, text_config empty");
  check::expect(
      parse(
          R"({"model_type":"glm5_next","hidden_size":32,"text_config":{"hidden_size":64},"vision_config":{"hidden_size":16}})")
              .hidden_size == 64,
      "glm5_next, nested");
  check::expect(parse(R"({"model_type":"glm5_next_text","hidden_size":32,"text_config":{"hidden_size":64}})")
                        .hidden_size == 32,
                "glm5_next_text is flat");

  using Ids = std::vector<int64_t>;
  check::expect(nested({{"eos_token_id", "[1,2]"}}, {{"eos_token_id", "5"}}).eos_token_id == Ids({1, 2}),
                "eos of text_config first");
  check::expect(nested({}, {{"eos_token_id", "5"}}).eos_token_id == Ids({5}), "eos at the top");
  check::expect(
      nested({{"eos_token_id", "null"}}, {{"eos_token_id", "[5,6,7]"}}).eos_token_id == Ids({5, 6, 7}),
      "eos null in text_config");
  check::expect(flat({{"eos_token_id", "null"}, {"bos_token_id", "null"}}).eos_token_id.empty(), "eos null");
  check::expect(nested({}, {{"bos_token_id", "9"}}).bos_token_id == 9, "bos at the top");
  check::expect(
      nested({{"tie_word_embeddings", "true"}}, {{"tie_word_embeddings", "false"}}).tie_word_embeddings ==
          false,
      "tying is the top's affair");
  check::expect(
      nested({{"tie_word_embeddings", "false"}}, {{"tie_word_embeddings", "true"}}).tie_word_embeddings,
      "tying at the top");
  check::expect(nested({{"tie_word_embeddings", "true"}}).tie_word_embeddings &&
                    flat({{"tie_word_embeddings", "true"}}).tie_word_embeddings,
                "tying elsewhere");
}

void layer_lists() {
  const auto kda = [](const Fields& fields) { return letters(flat(fields).is_kda, 'K', 'M'); };
  const std::string four = "4";
  same("layer_types null", kda({{"num_hidden_layers", "5"}, {"layer_types", "null"}}), "KKKMK");
  same("layer_types, every name",
       kda({{"num_hidden_layers", four},
            {"layer_types",
             R"(["indexed_attention","full_attention","linear_attention","deepseek_sparse_attention"])"}}),
       "MMKM");

  const auto moe = [](const Fields& fields) { return letters(flat(fields).is_moe, 'S', 'D'); };
  same("two layers", moe({{"num_hidden_layers", "2"}}), "DD");
  same("mlp_layer_types",
       moe({{"num_hidden_layers", "3"}, {"mlp_layer_types", R"(["sparse","dense","sparse"])"}}), "SDS");
  same("mlp_layer_types null", moe({{"num_hidden_layers", "5"}, {"mlp_layer_types", "null"}}), "DDDSS");
  same("first_k_dense_replace", moe({{"num_hidden_layers", four}, {"first_k_dense_replace", "1"}}), "DSSS");
  same("first_k_dense_replace 0", moe({{"num_hidden_layers", four}, {"first_k_dense_replace", "0"}}), "SSSS");
  same("first_k_dense_replace null", moe({{"num_hidden_layers", four}, {"first_k_dense_replace", "null"}}),
       "DDDS");
  same("first_k_dense_replace beside mlp_layer_types",
       moe({{"num_hidden_layers", "2"},
            {"first_k_dense_replace", "1"},
            {"mlp_layer_types", R"(["sparse","dense"])"}}),
       "SD");

  const auto full = [](Fields fields) {
    fields.insert({"num_hidden_layers", "8"});
    return letters(flat(fields).indexer_full, 'F', 'S');
  };
  const std::string list = R"(["shared","full","full","full","shared","full","full","shared"])";
  same("indexer_types", full({{"indexer_types", list}}), "SFFFSFFS");
  same("indexer_types first", full({{"indexer_types", list}, {"index_topk_pattern", "\"FFFFFFFF\""}}),
       "SFFFSFFS");
  same("pattern as a string", full({{"indexer_types", "null"}, {"index_topk_pattern", "\"FSFFSSFS\""}}),
       "FSFFSSFS");
  same("pattern as a list", full({{"index_topk_pattern", list}}), "SFFFSFFS");
  same("pattern before frequency", full({{"index_topk_pattern", "\"FSFFSSFS\""}, {"index_topk_freq", "3"}}),
       "FSFFSSFS");
  // max(i - offset + 1, 0) % frequency == 0, offset 2 where it is absent.
  const std::string mla_first =
      R"(["full_attention","linear_attention","linear_attention","linear_attention","linear_attention","linear_attention","linear_attention","full_attention"])";
  same("frequency 3", full({{"index_topk_freq", "3"}, {"layer_types", mla_first}}), "FFSSFSSF");
  same("frequency 0", full({{"index_topk_freq", "0"}}), "FFFFFFFF");
  same("frequency and offset",
       full({{"index_topk_freq", "4"}, {"index_skip_topk_offset", "4"}, {"layer_types", mla_first}}),
       "FFFFSSSF");
  same("offset below 0",
       full({{"index_topk_freq", "2"}, {"index_skip_topk_offset", "-1"}, {"layer_types", mla_first}}),
       "FSFSFSFS");
  same(
      "nulls",
      full({{"index_topk_pattern", "null"}, {"index_topk_freq", "null"}, {"index_skip_topk_offset", "null"}}),
      "FFFFFFFF");
}

void gate_bound() {
  struct Case {
    const char* what;
    Fields fields;
    bool bounded;
    float bound;
  };
  const std::string dict = "linear_attn_config", flat_bound = "linear_lower_bound";
  const Case cases[] = {
      {"flat", {{flat_bound, "-3.0"}}, true, -3.0f},
      {"flat null has no bound", {{flat_bound, "null"}}, false, 0},
      {"nested", {{dict, R"({"gate_lower_bound":-2.0})"}}, true, -2.0f},
      {"nested, whole number", {{dict, R"({"gate_lower_bound":-2})"}}, true, -2.0f},
      {"nested wins over flat", {{flat_bound, "-3.0"}, {dict, R"({"gate_lower_bound":-2.0})"}}, true, -2.0f},
      {"nested null is safe by default", {{dict, R"({"gate_lower_bound":null})"}}, true, -5.0f},
      {"nested null, safe_gate", {{dict, R"({"gate_lower_bound":null,"safe_gate":true})"}}, true, -5.0f},
      {"nested null, no safe_gate", {{dict, R"({"gate_lower_bound":null,"safe_gate":false})"}}, false, 0},
      {"nested null, safe_gate null", {{dict, R"({"gate_lower_bound":null,"safe_gate":null})"}}, false, 0},
      {"no safe_gate does not unbind",
       {{dict, R"({"gate_lower_bound":-2.0,"safe_gate":false})"}},
       true,
       -2.0f},
      {"no safe_gate, default bound", {{dict, R"({"safe_gate":false})"}}, true, -5.0f},
      {"flat null beside an empty nested", {{flat_bound, "null"}, {dict, "{}"}}, true, -5.0f},
      {"flat null, nested no safe_gate", {{flat_bound, "null"}, {dict, R"({"safe_gate":false})"}}, false, 0},
      {"nested itself null", {{flat_bound, "null"}, {dict, "null"}}, false, 0},
  };
  for (const Case& c : cases) {
    const Config config = flat(c.fields);
    check::expect(config.linear_bounded == c.bounded && (!c.bounded || config.linear_lower_bound == c.bound),
                  c.what);
  }
  const Config c = flat(
      {{"linear_num_heads", "9"},
       {dict,
        R"({"head_dim":32,"num_heads":2,"short_conv_kernel_size":3,"kda_layers":[1,2],"full_attn_layers":[4]})"}});
  check::expect(c.linear_head_dim == 32 && c.linear_num_heads == 2 && c.linear_conv_kernel_dim == 3,
                "nested sizes win");
}

void refusals() {
  const auto refused = [](const Fields& fields, std::initializer_list<std::string> parts) {
    throws<FuelError>(object(fields), [&] { flat(fields); }, parts);
    throws<FuelError>(object(fields), [&] { flat(fields); }, {"config.json: "});
    throws<FuelError>(object(fields) + " nested", [&] { nested(fields); }, {"config.json: text_config."});
  };
  refused({{"hidden_size", "null"}}, {"hidden_size: expected a whole number from 1 to 131072, found null"});
  refused({{"hidden_size", "64.0"}}, {"hidden_size", "found 64"});
  refused({{"hidden_size", "true"}}, {"hidden_size", "found true"});
  refused({{"hidden_size", "\"64\""}}, {"hidden_size", "found \"64\""});
  for (const char* field : {"vocab_size",          "hidden_size",
                            "intermediate_size",   "moe_intermediate_size",
                            "num_hidden_layers",   "max_position_embeddings",
                            "num_attention_heads", "q_lora_rank",
                            "kv_lora_rank",        "qk_nope_head_dim",
                            "v_head_dim",          "index_topk",
                            "index_head_dim",      "index_n_heads",
                            "index_kpool",         "linear_num_heads",
                            "linear_head_dim",     "linear_conv_kernel_dim",
                            "n_routed_experts",    "n_shared_experts",
                            "num_experts_per_tok", "n_group",
                            "topk_group",          "hc_mult",
                            "hc_sinkhorn_iters"}) {
    for (const char* value : {"0", "-1", "4611686018427387904", "18446744073709551615"}) {
      refused({{field, value}}, {std::string(field) + ": expected"});
    }
  }
  for (const char* field : {"rms_norm_eps", "hc_eps", "routed_scaling_factor", "swiglu_limit"}) {
    for (const char* value : {"0.0", "-1.0", "null", "1e300", "\"1\""})
      refused({{field, value}}, {std::string(field) + ": expected a number above 0"});
  }
  for (const char* field :
       {"norm_topk_prob", "attention_bias", "index_kpool_always_select_tail", "tie_word_embeddings"}) {
    refused({{field, "1"}}, {std::string(field) + ": expected true or false, found 1"});
  }
  refused({{"num_attention_heads", "4"}},
          {"num_key_value_heads: expected 4 as num_attention_heads, found 64 (the default)"});
  refused({{"num_key_value_heads", "4"}},
          {"num_key_value_heads: expected 64 as num_attention_heads, found 4"});
  refused({{"qk_rope_head_dim", "64"}}, {"qk_rope_head_dim", "from 0 to 0", "found 64"});
  refused({{"qk_head_dim", "320"}}, {"qk_head_dim", "256", "found 320"});
  refused({{"index_topk", "30"}, {"index_kpool", "4"}},
          {"index_topk: expected a multiple of index_kpool (4), found 30"});
  refused({{"index_topk", "2"}, {"index_kpool", "4"}}, {"index_topk: expected a multiple"});
  refused({{"hidden_act", "\"gelu\""}}, {"hidden_act: expected \"silu\", found \"gelu\""});
  refused({{"hidden_act", "null"}}, {"hidden_act", "null"});
  refused({{"hc_mult", "9"}}, {"hc_mult", "from 1 to 8", "found 9"});

  refused({{"linear_head_dim", "12"}}, {"linear_head_dim: expected a multiple of 8, found 12"});
  refused({{"linear_head_dim", "264"}}, {"linear_head_dim", "256", "found 264"});
  refused({{"linear_attn_config", "[]"}}, {"linear_attn_config: expected an object"});
  refused({{"linear_attn_config", R"({"head_dim":null})"}}, {"linear_attn_config.head_dim", "null"});
  refused({{"linear_attn_config", R"({"head_dim":12})"}},
          {"linear_attn_config.head_dim: expected a multiple of 8, found 12"});
  refused({{"linear_attn_config", R"({"short_conv_kernel_size":9})"}},
          {"linear_attn_config.short_conv_kernel_size", "from 2 to 8", "found 9"});
  refused({{"linear_attn_config", R"({"gate_lower_bound":1.0})"}},
          {"linear_attn_config.gate_lower_bound", "at most 0", "found 1"});
  refused({{"linear_lower_bound", "\"x\""}}, {"linear_lower_bound", "at most 0", "found \"x\""});

  refused({{"n_routed_experts", "4097"}}, {"n_routed_experts", "4096", "4097"});
  refused({{"n_group", "5"}}, {"n_group: expected a divisor of n_routed_experts (288), found 5"});
  refused({{"n_group", "288"}}, {"n_group", "at least 2", "288 groups"});
  refused({{"n_group", "4"}, {"topk_group", "5"}}, {"topk_group", "from 1 to 4", "found 5"});
  refused({{"num_experts_per_tok", "65"}}, {"num_experts_per_tok", "from 1 to 64", "found 65"});
  refused({{"n_routed_experts", "8"}, {"num_experts_per_tok", "9"}},
          {"num_experts_per_tok", "from 1 to 8", "found 9"});
  refused({{"n_routed_experts", "8"}, {"n_group", "4"}, {"topk_group", "2"}, {"num_experts_per_tok", "5"}},
          {"num_experts_per_tok", "from 1 to 4"});

  const std::string two = "2";
  refused({{"num_hidden_layers", two}, {"layer_types", R"(["linear_attention"])"}},
          {"layer_types: expected 2 entries (num_hidden_layers), found 1"});
  refused(
      {{"num_hidden_layers", two}, {"layer_types", R"(["linear_attention","sliding_attention"])"}},
      {"layer_types[1]", "linear_attention, full_attention, indexed_attention or deepseek_sparse_attention",
       "found \"sliding_attention\""});
  refused({{"num_hidden_layers", two}, {"layer_types", "\"linear_attention\""}},
          {"layer_types: expected a list"});
  refused({{"num_hidden_layers", two}, {"layer_types", "[1,2]"}}, {"layer_types[0]", "found 1"});
  refused({{"num_hidden_layers", two}, {"mlp_layer_types", R"(["dense","dense","dense"])"}},
          {"mlp_layer_types: expected 2 entries", "found 3"});
  refused({{"num_hidden_layers", two}, {"mlp_layer_types", R"(["dense","moe"])"}},
          {"mlp_layer_types[1]: expected sparse or dense, found \"moe\""});
  refused({{"num_hidden_layers", two}, {"first_k_dense_replace", "-1"}}, {"first_k_dense_replace"});
  refused({{"num_hidden_layers", two}, {"indexer_types", R"(["full"])"}},
          {"indexer_types: expected 2 entries", "found 1"});
  refused({{"num_hidden_layers", two}, {"indexer_types", R"(["full","F"])"}},
          {"indexer_types[1]: expected full or shared, found \"F\""});
  refused({{"num_hidden_layers", two}, {"index_topk_pattern", "\"FX\""}},
          {"index_topk_pattern: expected letters F and S"});
  refused({{"num_hidden_layers", two}, {"index_topk_pattern", "\"FSF\""}},
          {"index_topk_pattern: expected 2 entries", "found 3"});
  refused({{"num_hidden_layers", two}, {"index_topk_pattern", "7"}},
          {"index_topk_pattern: expected a list, found 7"});
  refused({{"num_hidden_layers", "8"}, {"index_topk_pattern", "\"FFFSFFFF\""}},
          {"indexer_types[3]: expected full, since no sparse layer lies before it, found shared"});
  check::expect(!flat({{"num_hidden_layers", "8"}, {"index_topk_pattern", "\"SFFFFFFS\""}}).indexer_full[7],
                "a later sparse layer may share");

  refused({{"eos_token_id", "\"x\""}}, {"eos_token_id", "found \"x\""});
  refused({{"eos_token_id", "[1,2.5]"}}, {"eos_token_id", "found 2.5"});
  refused({{"num_nextn_predict_layers", "-1"}}, {"num_nextn_predict_layers"});
}

void files_and_types() {
  const auto refused = [](const std::string& text, std::initializer_list<std::string> parts) {
    throws<FuelError>(text, [&] { parse(text); }, parts);
  };
  refused("{}", {"config.json: model_type: expected glm5_next or glm5_next_text, found none"});
  refused(R"({"model_type":"glm_moe_dsa"})",
          {"model_type: expected glm5_next or glm5_next_text, found \"glm_moe_dsa\""});
  refused(R"({"model_type":null})", {"model_type", "found null"});
  refused(R"({"model_type":"glm5_next","text_config":7})", {"text_config: expected an object, found 7"});
  refused(R"({"model_type":"glm5_next","eos_token_id":"x"})", {"config.json: eos_token_id"});
  try {
    parse(R"({"model_type":"llama"})");
  } catch (const FuelError& error) {
    check::expect(error.hint().find("glm5_next") != std::string::npos, "a hint that names what is supported");
  }

  const fuel_files::TempDir dir;
  throws<FuelError>("no file", [&] { read_config(dir.path()); }, {dir / "config.json", "missing"});
  throws<FuelError>("no directory", [&] { read_config(dir / "gone"); },
                    {dir / "gone", "expected a directory", "nothing"});
  fuel_files::write_file(dir / "config.json",
                         "{\n  \"model_type\": \"glm5_next\",\n  \"hidden_size\": 64,\n}\n");
  throws<FuelError>("broken JSON", [&] { read_config(dir.path()); },
                    {dir / "config.json", "line 4, column 1", "expected a key"});
  fuel_files::write_file(dir / "config.json", "[]");
  throws<FuelError>("no object", [&] { read_config(dir.path()); },
                    {dir / "config.json", "expected an object"});
  fuel_files::write_file(dir / "config.json", "");
  throws<FuelError>("empty", [&] { read_config(dir.path()); }, {dir / "config.json", "empty"});
  fuel_files::write_file(dir / "config.json", R"({"model_type":"glm5_next","hidden_size":0})");
  throws<FuelError>("a bad field", [&] { read_config(dir.path()); },
                    {dir / "config.json", "hidden_size", "found 0"});
  fuel_files::write_file(dir / "config.json", R"({"model_type":"glm5_next","hidden_size":64})");
  check::expect(read_config(dir.path()).hidden_size == 64, "a file");
}

}  // namespace

int main() {
  defaults();
  every_field();
  where_the_text_model_is();
  layer_lists();
  gate_bound();
  refusals();
  files_and_types();
  return check::finish("config");
}
