// expert_ffn for many rows, which may be rounded: rows in float16 (eleven significant bits) with a power of two each,
// pairs sorted by expert, tiles of up to kRoundedRows of them against weights that stream through registers.
#include "ops/experts.cuh"

namespace rocket::cuda {
namespace {

constexpr int kChunkUnits = kGroup * 16 * kRoundedRows;  // of kGroup steps, at most
constexpr size_t kChunkBytes = 2 * kChunkUnits * sizeof(uint4);
constexpr int kRing = kGroup;  // steps of weights on their way
using Stream = WeightStream<kRing>;

// Rows in float16, units as in fp4_mma.cuh, and the factor that takes each row back.
struct Halves {
  uint4* unit = nullptr;  // [rows, units]
  float* back = nullptr;  // [rows]
  int units = 0;
};

struct RoundedArgs {
  FfnArgs ffn;
  Halves x;    // [rows, hidden]
  Halves act;  // [pairs, inner]
};

struct RoundedShared {
  int pair[kRoundedRows];
  int row[kRoundedRows];  // of x or act
  float back[kRoundedRows];
};
static_assert(kChunkBytes + Stream::kBytes + sizeof(RoundedShared) + 64 <= kSharedLimit);

Halves take_halves(int64_t rows, int dim, Exec& exec) {
  Halves h;
  h.units = (dim + kStep - 1) / kStep * 16;
  h.unit = exec.scratch->take<uint4>(rows * h.units);
  h.back = exec.scratch->take<float>(rows);
  return h;
}

// One block a row. `id` tells for rows of act whether their expert is here; null for x.
__global__ void __launch_bounds__(kFfnThreads)
    round_rows(const float* x, int64_t ldx, int dim, const int32_t* id, Halves to) {
  __shared__ uint32_t partial[kFfnWarps];
  wait_for_previous();
  start_next();
  const int64_t row = blockIdx.x;
  if (id && id[row] < 0) return;
  RowReader from;
  from.open(x + row * ldx, dim);
  uint32_t largest = from.largest();
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = largest;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kFfnWarps; ++w) largest = max(largest, partial[w]);
  const int exponent = row_exponent(largest);
  const float factor = power_of_two(exponent);
  if (threadIdx.x == 0) to.back[row] = back_factor(exponent);
  from.each([&](int unit, const float (&v)[8]) {
    float scaled[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) scaled[i] = v[i] * factor;
    to.unit[row * to.units + unit] = unit_of(scaled);
  });
}

__device__ __forceinline__ void copy_async(uint4* to, const uint4* from) {
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}

// The part of a tile's rows that a thread copies: one place t of the quad of one column, every kEvery words.
template <int kColumns>
struct Copier {
  static constexpr int kEvery = kFfnThreads / 4 / kColumns;
  const uint4* from;  // null: a column without a row
  int word, left;     // words of the row from the next chunk's first on

  __device__ __forceinline__ void open(const Halves& x, const int (&row)[kRoundedRows], int rows) {
    const int column = static_cast<int>(threadIdx.x) / 4 % kColumns;
    word = static_cast<int>(threadIdx.x) / 4 / kColumns;
    left = x.units / 4;
    from = column < rows ? x.unit + int64_t{row[column]} * x.units + threadIdx.x % 4 + word * 4 : nullptr;
  }
  // The next kGroup steps.
  __device__ __forceinline__ void copy(uint4* staged) {
    if (!from) return;
#pragma unroll
    for (int i = 0; i < 4 * kGroup / kEvery; ++i) {
      if (word + i * kEvery < left)
        copy_async(staged + threadIdx.x + i * kFfnThreads, from + i * (kEvery * 4));
    }
    from += 4 * kGroup * 4;
    left -= 4 * kGroup;
  }
};
static_assert(4 * kGroup % Copier<8>::kEvery == 0);

// Sums of sixteen weight rows of a warp with all rows of the tile. Every thread of the block takes part.
//
// Copies of weights and of x are waited for in the order in which they were asked for: the ring's first steps; x of the
// first chunk; then in each chunk x of the next one and, after each step, the weights of the step kRing on. So kRing
// groups are younger than a step's weights (in the first chunk one more, where waiting for kRing is too much, but right),
// and the weights of a chunk's first step are younger than its x, except in the first chunk.
template <int kColumns>
__device__ __forceinline__ void multiply_rounded(Stream& stream, Copier<kColumns>& copier, uint4* staged,
                                                 int steps, float (&acc)[kColumns / 8][4]) {
  constexpr int kChunk = kGroup * 16 * kColumns;
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;
  copier.copy(staged);
  commit_copies();
  int buffer = 0;
  for (int first = 0; first < steps; first += kGroup) {
    copier.copy(staged + (buffer ^ 1) * kChunk);
    commit_copies();
    if (first == 0) {
      wait_copies<1>();
    } else {
      wait_copies<kRing>();
    }
    __syncthreads();
    const uint4* here = staged + buffer * kChunk + threadIdx.x % kWarp;
    uint32_t s[kGroup][2];
    stream.take_scales(s);
#pragma unroll
    for (int d = 0; d < kGroup; ++d) {
      if (first + d < steps) {
        uint4 q[2];
        stream.take<kRing>(d, q);
        multiply_step<kColumns, false>(q, s[d], here + d * (kColumns * 16), acc);
        stream.copy(d);
      }
    }
    stream.advance();
    __syncthreads();
    buffer ^= 1;
  }
}

// The tile's pairs, the rows of x (or act) that they read and these rows' factors, by the whole block.
__device__ __forceinline__ void load_rows(const RoundedArgs& a, const ExpertTile& tile, bool down,
                                          RoundedShared& shared) {
  if (threadIdx.x < tile.rows) {
    const int pair = find_pair(a.ffn, tile, threadIdx.x);
    const int from = down ? pair : pair / a.ffn.p.topk;
    shared.pair[threadIdx.x] = pair;
    shared.row[threadIdx.x] = from;
    shared.back[threadIdx.x] = (down ? a.act : a.x).back[from];
  }
  __syncthreads();
}

// What a warp of gate_up_rounded or down_rounded does once its first weights are on their way. `channel` and `output`
// are the lane's.
template <int kColumns>
__device__ __forceinline__ void finish_gate_up(const RoundedArgs& a, const ExpertTile& tile,
                                               const Weight& gate, const Weight& up, int channel,
                                               Stream& stream, uint4* staged, const RoundedShared& shared) {
  const ExpertFfnParams& p = a.ffn.p;
  Copier<kColumns> copier;
  copier.open(a.x, shared.row, tile.rows);
  float acc[kColumns / 8][4];
  multiply_rounded<kColumns>(stream, copier, staged, a.x.units / 16, acc);
  if (channel >= p.inner) return;
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int r = n * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + c;
      if (r >= tile.rows) continue;
      const float back = shared.back[r];
      a.ffn.act[int64_t{shared.pair[r]} * p.inner + channel] = clamped_swiglu(
          acc[n][c] * gate.global_scale * back, acc[n][2 + c] * up.global_scale * back, p.limit);
    }
  }
}

template <int kColumns>
__device__ __forceinline__ void finish_down(const RoundedArgs& a, const ExpertTile& tile, const Weight& down,
                                            int output, Stream& stream, uint4* staged,
                                            const RoundedShared& shared) {
  const ExpertFfnParams& p = a.ffn.p;
  Copier<kColumns> copier;
  copier.open(a.act, shared.row, tile.rows);
  float acc[kColumns / 8][4];
  multiply_rounded<kColumns>(stream, copier, staged, a.act.units / 16, acc);
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int r = n * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + c;
      if (r >= tile.rows) continue;
      const int64_t pair = shared.pair[r];
      const float back = shared.back[r], weight = p.weight[pair];
      float* out = p.out + pair * p.hidden + output;
      if (output < p.hidden) out[0] = acc[n][c] * down.global_scale * back * weight;
      if (output + 8 < p.hidden) out[8] = acc[n][2 + c] * down.global_scale * back * weight;
    }
  }
}

__global__ void __launch_bounds__(kFfnThreads, 2)
    gate_up_rounded(const __grid_constant__ RoundedArgs a, int blocks) {
  extern __shared__ uint4 staged[];
  __shared__ RoundedShared shared;
  const int warp = threadIdx.x / kWarp, g = threadIdx.x % kWarp / 4;
  const int channel = (static_cast<int>(blockIdx.x % blocks) * kFfnWarps + warp) * kChannels;
  wait_for_previous();
  start_next();
  const ExpertTile tile = find_tile(a.ffn, blockIdx.x / blocks);
  if (tile.expert < 0) return;
  const Weight gate = a.ffn.p.expert[tile.expert].gate, up = a.ffn.p.expert[tile.expert].up;
  if (!(loads_whole(gate) & loads_whole(up))) {
    plain_gate_up(a.ffn, tile, channel);
    return;
  }
  Stream stream;
  const int row = min(channel + g, a.ffn.p.inner - 1);
  stream.open(gate, row, up, row, staged + 2 * kChunkUnits);
  stream.ask_ahead(gate.in, a.ffn.p.inner - row);
  load_rows(a, tile, false, shared);
  if (tile.rows <= 8) {
    finish_gate_up<8>(a, tile, gate, up, channel + g, stream, staged, shared);
  } else if (tile.rows <= 16) {
    finish_gate_up<16>(a, tile, gate, up, channel + g, stream, staged, shared);
  } else {
    finish_gate_up<32>(a, tile, gate, up, channel + g, stream, staged, shared);
  }
}

// As in down_exact, list and first weights come before the wait: two kernels back all blocks had waited for the list.
__global__ void __launch_bounds__(kFfnThreads, 2)
    down_rounded(const __grid_constant__ RoundedArgs a, int blocks) {
  extern __shared__ uint4 staged[];
  __shared__ RoundedShared shared;
  const int warp = threadIdx.x / kWarp, g = threadIdx.x % kWarp / 4;
  const int begin = static_cast<int>(blockIdx.x % blocks) * kFfnWarps * kOutputs,
            output = begin + warp * kOutputs;
  const int hidden = a.ffn.p.hidden;
  const ExpertTile tile = find_tile(a.ffn, blockIdx.x / blocks);
  if (tile.expert < 0) {
    wait_for_previous();
    start_next();
    clear_outputs(a.ffn, tile, begin, kFfnWarps * kOutputs);
    return;
  }
  const Weight down = a.ffn.p.expert[tile.expert].down;
  if (!loads_whole(down)) {
    wait_for_previous();
    start_next();
    plain_down(a.ffn, tile, output);
    return;
  }
  Stream stream;
  const int row = min(output + g, hidden - 1);
  stream.open(down, row, down, min(output + g + 8, hidden - 1), staged + 2 * kChunkUnits);
  stream.ask_ahead(down.in, hidden - row);
  wait_for_previous();
  start_next();
  load_rows(a, tile, true, shared);
  if (tile.rows <= 8) {
    finish_down<8>(a, tile, down, output + g, stream, staged, shared);
  } else if (tile.rows <= 16) {
    finish_down<16>(a, tile, down, output + g, stream, staged, shared);
  } else {
    finish_down<32>(a, tile, down, output + g, stream, staged, shared);
  }
}

}  // namespace

void expert_ffn_rounded(const ExpertFfnParams& p, Exec& exec) {
  const int64_t pairs = int64_t{p.rows} * p.topk;
  RoundedArgs a;
  a.ffn.p = p;
  a.ffn.pairs = sort_pairs(p, kRoundedRows, exec);
  a.ffn.act = exec.scratch->take<float>(pairs * p.inner);
  a.x = take_halves(p.rows, p.hidden, exec);
  a.act = take_halves(pairs, p.inner, exec);
  if (exec.measure) return;
  const int64_t tiles = most_tiles(p, kRoundedRows);
  const int inner_blocks = (p.inner + kFfnWarps * kChannels - 1) / (kFfnWarps * kChannels);
  const int hidden_blocks = (p.hidden + kFfnWarps * kOutputs - 1) / (kFfnWarps * kOutputs);
  launch("expert_ffn", round_rows, p.rows, kFfnThreads, 0, exec, p.x, p.ldx, p.hidden,
         static_cast<const int32_t*>(nullptr), a.x);
  launch("expert_ffn", gate_up_rounded, static_cast<unsigned>(tiles * inner_blocks), kFfnThreads,
         kChunkBytes + Stream::kBytes, exec, a, inner_blocks);
  launch("expert_ffn", round_rows, static_cast<unsigned>(pairs), kFfnThreads, 0, exec,
         static_cast<const float*>(a.ffn.act), int64_t{p.inner}, p.inner, p.id, a.act);
  launch("expert_ffn", down_rounded, static_cast<unsigned>(tiles * hidden_blocks), kFfnThreads,
         kChunkBytes + Stream::kBytes, exec, a, hidden_blocks);
}

}  // namespace rocket::cuda
