// Chooses shapes of blocks for gemv.cuh and launches it; one .cu file for each group of formats has the kernels.
#pragma once

#include "ops/gemv.cuh"

namespace rocket::cuda {

// Fills in everything in p but x, rows and the parts' pointers, and launches. The parts share format and alignment.
// Instances: gemv_bf16.cu, gemv_f32.cu, gemv_nvfp4.cu, gemv_fp8.cu.
template <WeightFormat F>
void run_gemv(GemvParams& p, bool vector, Exec& exec);
template <>
void run_gemv<WeightFormat::kF32>(GemvParams& p, bool vector, Exec& exec);
template <>
void run_gemv<WeightFormat::kBF16>(GemvParams& p, bool vector, Exec& exec);
template <>
void run_gemv<WeightFormat::kNVFP4>(GemvParams& p, bool vector, Exec& exec);
template <>
void run_gemv<WeightFormat::kFP8Block>(GemvParams& p, bool vector, Exec& exec);
template <>
void run_gemv<WeightFormat::kMXFP8>(GemvParams& p, bool vector, Exec& exec);

constexpr int kGemvRows = 16;  // of a tile, at most

inline void gemv_groups(GemvParams& p, int size) {
  p.groups = 0;
  for (int i = 0; i < p.part_count; ++i) {
    p.part[i].first_group = p.groups;
    p.groups += (p.part[i].out + size - 1) / size;
  }
}

template <typename K>
void launch_gemv(GemvParams& p, Exec& exec) {
  // Room for x, and for the table beside it. A slice of x always fits.
  constexpr int64_t kRoom = static_cast<int64_t>(kSharedLimit);
  constexpr int64_t kLeastTable = 16 << 10;
  static_assert(static_cast<int64_t>(K::x_bytes(kMostSlice) + K::table_bytes(1, 1)) <= kRoom);
  gemv_slices(p.in, p.slices, p.slice);
  const int64_t slice_bytes = static_cast<int64_t>(K::x_bytes(p.slice));
  int64_t at_once = (kRoom - kLeastTable) / slice_bytes;
  at_once = at_once < 1 ? 1 : at_once > p.slices ? p.slices : at_once;
  p.phases = static_cast<int32_t>((p.slices + at_once - 1) / at_once);
  p.phase_slices = (p.slices + p.phases - 1) / p.phases;

  gemv_groups(p, K::G);
  // One wave of blocks, or as many as the table's room asks for.
  const int64_t group_bytes = static_cast<int64_t>(K::table_bytes(p.phase_slices, 1));
  int64_t room = (kRoom - p.phase_slices * slice_bytes) / group_bytes;
  if (room < 1)
    fail_op("linear", "bytes of shared memory, at most", kRoom, p.phase_slices * slice_bytes + group_bytes);
  const int64_t sms = exec.cuda->sm_count, each = (p.groups + sms - 1) / sms;
  const int64_t waves = (each + room - 1) / room;
  const int64_t blocks = sms * waves < p.groups ? sms * waves : p.groups;
  p.block_groups = static_cast<int32_t>((p.groups + blocks - 1) / blocks);
  const size_t shared =
      K::x_bytes(int64_t{p.phase_slices} * p.slice) + K::table_bytes(p.phase_slices, p.block_groups);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>((p.rows + K::R - 1) / K::R));
  launch_fence("linear", gemv_kernel<K>, grid, K::kThreads, shared, exec, p);
}

// The number of rows that a kernel is made for makes no difference to the bits.
template <WeightFormat F, bool kVector>
void run_gemv_direct(GemvParams& p, Exec& exec) {
  if (p.rows <= 1) return launch_gemv<GemvKind<F, kVector, 1>>(p, exec);
  if (p.rows <= 4) return launch_gemv<GemvKind<F, kVector, 4>>(p, exec);
  if constexpr (kVector) {
    if (p.rows <= 8) return launch_gemv<GemvKind<F, kVector, 8>>(p, exec);
  }
  launch_gemv<GemvKind<F, kVector, kGemvRows>>(p, exec);
}

}  // namespace rocket::cuda
