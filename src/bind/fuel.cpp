#include "bind/fuel.h"

#include <pybind11/stl.h>

#include "fuel/checkpoint.h"
#include "glm5-moe-nvfp4-2b/config.h"

namespace py = pybind11;

namespace rocket::bind {
namespace {

py::list read_headers(const std::string& dir) {
  const Checkpoint checkpoint(dir, false);
  py::list files;
  for (const auto& file : checkpoint.files()) {
    py::list tensors;
    for (const TensorInfo& tensor : file->tensors()) {
      tensors.append(py::make_tuple(tensor.name, dtype_name(tensor.dtype), py::cast(tensor.shape),
                                    tensor.offset, tensor.bytes));
    }
    py::dict entry;
    entry["file"] = file->path();
    entry["bytes"] = file->file_bytes();
    entry["sparse"] = file->sparse();
    entry["tensors"] = tensors;
    files.append(entry);
  }
  return files;
}

py::dict read_config(const std::string& dir) {
  const glm5::Config c = glm5::read_config(dir);
  py::dict d;
#define FIELD(name) d[#name] = c.name
  FIELD(model_type);
  FIELD(vocab_size);
  FIELD(hidden_size);
  FIELD(intermediate_size);
  FIELD(moe_intermediate_size);
  FIELD(num_hidden_layers);
  FIELD(num_nextn_predict_layers);
  FIELD(max_position_embeddings);
  FIELD(rms_norm_eps);
  FIELD(tie_word_embeddings);
  FIELD(num_attention_heads);
  FIELD(q_lora_rank);
  FIELD(kv_lora_rank);
  FIELD(qk_nope_head_dim);
  FIELD(qk_rope_head_dim);
  FIELD(v_head_dim);
  FIELD(attention_bias);
  FIELD(index_topk);
  FIELD(index_head_dim);
  FIELD(index_n_heads);
  FIELD(index_kpool);
  FIELD(index_kpool_always_select_tail);
  FIELD(linear_num_heads);
  FIELD(linear_head_dim);
  FIELD(linear_conv_kernel_dim);
  FIELD(linear_bounded);
  FIELD(linear_lower_bound);
  FIELD(n_routed_experts);
  FIELD(n_shared_experts);
  FIELD(num_experts_per_tok);
  FIELD(n_group);
  FIELD(topk_group);
  FIELD(norm_topk_prob);
  FIELD(routed_scaling_factor);
  FIELD(swiglu_limit);
  FIELD(hc_mult);
  FIELD(hc_sinkhorn_iters);
  FIELD(hc_eps);
  FIELD(is_kda);
  FIELD(is_moe);
  FIELD(indexer_full);
  FIELD(eos_token_id);
  FIELD(bos_token_id);
#undef FIELD
  return d;
}

}  // namespace

void add_fuel(py::module_& m) {
  m.def("read_headers", &read_headers, py::arg("dir"));
  m.def("read_config", &read_config, py::arg("dir"));
}

}  // namespace rocket::bind
