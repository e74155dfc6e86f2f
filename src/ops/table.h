// The table of ops that an engine calls. The CPU table is always complete; another backend overwrites
// entries.
#pragma once

#include "ops/embed.h"
#include "ops/exec.h"
#include "ops/experts.h"
#include "ops/hyper_connection.h"
#include "ops/indexer.h"
#include "ops/kda.h"
#include "ops/linear.h"
#include "ops/mla.h"
#include "ops/norm.h"
#include "ops/router.h"
#include "ops/sample.h"

namespace rocket {

// clang-format off
struct OpTable {
  void (*embed)(const EmbedParams&, Exec&) = nullptr;
  void (*hyper_pre)(const HyperPreParams&, Exec&) = nullptr;
  void (*hyper_post)(const HyperPostParams&, Exec&) = nullptr;
  void (*hyper_head)(const HyperHeadParams&, Exec&) = nullptr;
  void (*linear)(const LinearParams&, Exec&) = nullptr;
  void (*head_linear)(const HeadLinearParams&, Exec&) = nullptr;
  void (*norm)(const NormParams&, Exec&) = nullptr;
  void (*kda_conv)(const KdaConvParams&, Exec&) = nullptr;
  void (*kda_gates)(const KdaGatesParams&, Exec&) = nullptr;
  void (*kda_recurrence)(const KdaRecurrenceParams&, Exec&) = nullptr;
  void (*gated_norm)(const GatedNormParams&, Exec&) = nullptr;
  void (*kda_head)(const KdaHeadParams&, Exec&) = nullptr;
  void (*pool_update)(const PoolUpdateParams&, Exec&) = nullptr;
  void (*index_select)(const IndexSelectParams&, Exec&) = nullptr;
  void (*latent_append)(const LatentAppendParams&, Exec&) = nullptr;
  void (*sparse_mla)(const SparseMlaParams&, Exec&) = nullptr;
  void (*router)(const RouterParams&, Exec&) = nullptr;
  void (*swiglu)(const SwigluParams&, Exec&) = nullptr;
  void (*expert_ffn)(const ExpertFfnParams&, Exec&) = nullptr;
  void (*expert_sum)(const ExpertSumParams&, Exec&) = nullptr;
  void (*sample)(const SampleParams&, Exec&) = nullptr;
  void (*find_bad)(const FiniteParams&, Exec&) = nullptr;
};
// clang-format on

// Ops that do nothing: an engine runs its forward pass with them to measure the workspace.
const OpTable& no_ops();

// The CPU ops, vectorised for the best instruction set that this CPU has, or for the one named: "avx512",
// "avx2", "portable" (also read from ROCKET_CPU_ISA). Throws InputError for one that this CPU or build lacks.
const OpTable& cpu_ops(const char* isa = nullptr);
const char* cpu_ops_isa();  // which one cpu_ops() gives

// The CUDA ops, of a build with CUDA. Every entry is filled.
const OpTable& cuda_ops();

}  // namespace rocket
