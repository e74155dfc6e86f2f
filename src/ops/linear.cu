// Products with stored weights: few rows through gemv.cuh and, BF16, gemv_mma.cuh; more rows on tensor cores, with x in
// two BF16 terms, where rounding is allowed.
#include "ops/cublas_lt.h"
#include "ops/cuda_ops.h"
#include "ops/gemv_launch.cuh"
#include "ops/tensor_linear.cuh"

namespace rocket::cuda {
namespace {

void check_linear(const LinearParams& p) {
  if (p.part_count < 1 || p.part_count > LinearParams::kMaxParts)
    fail_op("linear", "parts, at most", LinearParams::kMaxParts, p.part_count);
  const int64_t in = p.part[0].w.in;
  for (int i = 0; i < p.part_count; ++i) {
    const Weight& w = p.part[i].w;
    if (w.out <= 0 || w.out > INT32_MAX) fail_op("linear", "outputs of a weight, at least", 1, w.out);
    if (w.in <= 0 || w.in > INT32_MAX) fail_op("linear", "inputs of a weight, at least", 1, w.in);
    if (w.in != in) fail_op("linear", "inputs of a part", in, w.in);
    if (w.format == WeightFormat::kNVFP4 && in % 16)
      fail_op("linear", "remainder of an NVFP4 weight's inputs by 16", 0, in % 16);
    if (w.format == WeightFormat::kMXFP8 && in % 32)
      fail_op("linear", "remainder of an MXFP8 weight's inputs by 32", 0, in % 32);
    if (p.rows > 1 && p.part[i].ldy < w.out) fail_op("linear", "ldy, at least", w.out, p.part[i].ldy);
  }
  if (p.rows > 1 && p.ldx < in) fail_op("linear", "ldx, at least", in, p.ldx);
}

GemvPart gemv_part_of(const LinearPart& part) {
  return {static_cast<const char*>(part.w.data),
          static_cast<const uint8_t*>(part.w.block_scale),
          part.y,
          part.bias,
          part.ldy,
          static_cast<int32_t>(part.w.out),
          0,
          part.w.format == WeightFormat::kNVFP4 ? part.w.global_scale : 1.0f};
}

void run_gemv_parts(WeightFormat format, GemvParams& p, bool vector, Exec& exec) {
  switch (format) {
    case WeightFormat::kF32:
      return run_gemv<WeightFormat::kF32>(p, vector, exec);
    case WeightFormat::kBF16:
      return run_gemv<WeightFormat::kBF16>(p, vector, exec);
    case WeightFormat::kNVFP4:
      return run_gemv<WeightFormat::kNVFP4>(p, vector, exec);
    case WeightFormat::kFP8Block:
      return run_gemv<WeightFormat::kFP8Block>(p, vector, exec);
    case WeightFormat::kMXFP8:
      return run_gemv<WeightFormat::kMXFP8>(p, vector, exec);
  }
}

void run_tensor_parts(WeightFormat format, TensorParams& p, bool vector, Exec& exec) {
  switch (format) {
    case WeightFormat::kF32:
      return run_tensor<WeightFormat::kF32>(p, vector, exec);
    case WeightFormat::kBF16:
      return run_tensor<WeightFormat::kBF16>(p, vector, exec);
    case WeightFormat::kNVFP4:
      return run_tensor<WeightFormat::kNVFP4>(p, vector, exec);
    case WeightFormat::kFP8Block:
      return run_tensor<WeightFormat::kFP8Block>(p, vector, exec);
    case WeightFormat::kMXFP8:
      return run_tensor<WeightFormat::kMXFP8>(p, vector, exec);
  }
}

// cuBLASLt wants it at a multiple of 256 bytes; arenas have multiples of 64.
void* library_workspace(Exec& exec) {
  constexpr uintptr_t kAlignment = 256;
  const auto at =
      reinterpret_cast<uintptr_t>(exec.scratch->take_bytes(kCublasWorkspaceBytes + kAlignment - 64));
  return reinterpret_cast<void*>((at + kAlignment - 1) / kAlignment * kAlignment);
}

// BF16 parts one by one through cuBLASLt, if it is there. Leaves those that it does not take.
void take_library(TensorParams& p, void* workspace, Exec& exec) {
  const int64_t width = term_width(p.in);
  int left = 0;
  for (int i = 0; i < p.part_count; ++i) {
    const GemvPart part = p.part[i];
    LibraryProduct product = {reinterpret_cast<const uint16_t*>(p.x),
                              2 * width,
                              reinterpret_cast<const uint16_t*>(part.data),
                              part.out,
                              p.in,
                              p.rows,
                              part.y,
                              part.ldy};
    bool done = !part.bias && cublas_lt_product(product, workspace, exec);
    product.x += width;
    product.add = true;
    done = done && cublas_lt_product(product, workspace, exec);
    if (!done) p.part[left++] = part;
  }
  p.part_count = left;
}

// Calls run(format, parts, vector) for each kind of parts: those of one format and alignment go in one launch.
template <typename Params, typename Run>
void each_kind(const LinearParams& p, Params& params, Run run) {
  bool done[LinearParams::kMaxParts] = {};
  for (int i = 0; i < p.part_count; ++i) {
    if (done[i]) continue;
    const WeightFormat format = p.part[i].w.format;
    const bool vector = vector_rows(p.part[i].w);
    params.part_count = 0;
    for (int j = i; j < p.part_count; ++j) {
      if (done[j] || p.part[j].w.format != format || vector_rows(p.part[j].w) != vector) continue;
      done[j] = true;
      params.part[params.part_count++] = gemv_part_of(p.part[j]);
    }
    run(format, params, vector);
  }
}

}  // namespace

void linear(const LinearParams& p, Exec& exec) {
  check_linear(p);
  if (p.rows <= 0) return;
  const int64_t in = p.part[0].w.in;
  ArenaScope scope(*exec.scratch);
  const bool tensor = exec.tensor_cores && p.rows > kExactRows;
  __nv_bfloat16* terms = tensor ? exec.scratch->take<__nv_bfloat16>(p.rows * 2 * term_width(in)) : nullptr;
  void* workspace = tensor && exec.cuda->cublas ? library_workspace(exec) : nullptr;
  if (exec.measure) return;
  const bool aligned =
      in % 4 == 0 && (p.rows == 1 || p.ldx % 4 == 0) && reinterpret_cast<uintptr_t>(p.x) % 16 == 0;
  if (tensor) {
    cut_rows({p.x, p.ldx, 0, p.rows, 1, static_cast<int32_t>(in), terms}, exec);
    TensorParams t{};
    t.x = terms;
    t.rows = p.rows;
    t.in = static_cast<int32_t>(in);
    each_kind(p, t, [&](WeightFormat format, TensorParams& params, bool vector) {
      if (workspace && vector && format == WeightFormat::kBF16) take_library(params, workspace, exec);
      if (params.part_count > 0) run_tensor_parts(format, params, vector, exec);
    });
    return;
  }
  GemvParams g{};
  g.x = p.x;
  g.ldx = p.ldx;
  g.rows = p.rows;
  g.in = static_cast<int32_t>(in);
  g.vector_x = aligned;
  each_kind(p, g, [&](WeightFormat format, GemvParams& params, bool vector) {
    run_gemv_parts(format, params, vector, exec);
  });
}

}  // namespace rocket::cuda
