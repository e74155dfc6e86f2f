// The CUDA ops, one .cu file each beside the CPU's .cpp. Same params, pointers in device memory.
#pragma once

#include "ops/table.h"

namespace rocket::cuda {

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
void router(const RouterParams& p, Exec& exec);
void swiglu(const SwigluParams& p, Exec& exec);
void expert_ffn(const ExpertFfnParams& p, Exec& exec);
void expert_sum(const ExpertSumParams& p, Exec& exec);
void sample(const SampleParams& p, Exec& exec);
void find_bad(const FiniteParams& p, Exec& exec);

}  // namespace rocket::cuda
