#include "ops/cpu_ops.h"

namespace rocket::ROCKET_ISA {

void fill_table(OpTable& table) {
  table.embed = embed;
  table.hyper_pre = hyper_pre;
  table.hyper_post = hyper_post;
  table.hyper_head = hyper_head;
  table.linear = linear;
  table.head_linear = head_linear;
  table.norm = norm;
  table.kda_conv = kda_conv;
  table.kda_gates = kda_gates;
  table.kda_recurrence = kda_recurrence;
  table.gated_norm = gated_norm;
  table.kda_head = kda_head;
  table.pool_update = pool_update;
  table.index_select = index_select;
  table.latent_append = latent_append;
  table.sparse_mla = sparse_mla;
  table.router = router_cpu;
  table.swiglu = swiglu;
  table.expert_ffn = expert_ffn;
  table.expert_sum = expert_sum;
  table.sample = sample_cpu;
  table.find_bad = find_bad_cpu;
}

}  // namespace rocket::ROCKET_ISA
