#include "ops/cuda_ops.h"

namespace rocket {

const OpTable& cuda_ops() {
  static const OpTable table = {
      cuda::embed,       cuda::hyper_pre, cuda::hyper_post,  cuda::hyper_head,   cuda::linear,
      cuda::head_linear, cuda::norm,      cuda::kda_conv,    cuda::kda_gates,    cuda::kda_recurrence,
      cuda::gated_norm,  cuda::kda_head,  cuda::pool_update, cuda::index_select, cuda::latent_append,
      cuda::sparse_mla,  cuda::router,    cuda::swiglu,      cuda::expert_ffn,   cuda::expert_sum,
      cuda::sample,      cuda::find_bad,
  };
  return table;
}

}  // namespace rocket
