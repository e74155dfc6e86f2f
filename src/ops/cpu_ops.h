// Declarations of the CPU ops of one instruction set. Each .cpp of src/ops defines its ops in namespace
// rocket::ROCKET_ISA and is compiled once for each set; cpu_table.cpp collects them.
#pragma once

#include "ops/table.h"
#include "ops/vec.h"

namespace rocket::ROCKET_ISA {

void embed(const EmbedParams& p, Exec& exec);
void hyper_pre(const HyperPreParams& p, Exec& exec);
void hyper_post(const HyperPostParams& p, Exec& exec);
void hyper_head(const HyperHeadParams& p, Exec& exec);
void linear(const LinearParams& p, Exec& exec);
void head_linear(const HeadLinearParams& p, Exec& exec);
void norm(const NormParams& p, Exec& exec);
void kda_conv(const KdaConvParams& p, Exec& exec);
void kda_gates(const KdaGatesParams& p, Exec& exec);
void kda_recurrence(const KdaRecurrenceParams& p, Exec& exec);
void gated_norm(const GatedNormParams& p, Exec& exec);
void kda_head(const KdaHeadParams& p, Exec& exec);
void pool_update(const PoolUpdateParams& p, Exec& exec);
void index_select(const IndexSelectParams& p, Exec& exec);
void latent_append(const LatentAppendParams& p, Exec& exec);
void sparse_mla(const SparseMlaParams& p, Exec& exec);
void swiglu(const SwigluParams& p, Exec& exec);
void expert_ffn(const ExpertFfnParams& p, Exec& exec);
void expert_sum(const ExpertSumParams& p, Exec& exec);

void fill_table(OpTable& table);

}  // namespace rocket::ROCKET_ISA

namespace rocket {

// Ops without arithmetic worth a vector unit, compiled once.
void router_cpu(const RouterParams& p, Exec& exec);
void sample_cpu(const SampleParams& p, Exec& exec);
void find_bad_cpu(const FiniteParams& p, Exec& exec);

}  // namespace rocket
