// Sorts the pairs of a step by expert, by counting; within an expert they ascend. One block.
#include "ops/experts.cuh"

namespace rocket::cuda {
namespace {

constexpr int kMaxWarps = 32;

struct SortArgs {
  const int32_t* id;  // [pairs]
  int pairs;
  int experts;
  int tile_rows;
  int32_t* list;
  ExpertTile* tile;
  int32_t* tiles;
};

// Sums of two numbers over the threads before this one, and of all threads.
struct Prefix {
  int before[2], all[2];
};

__device__ __forceinline__ Prefix block_prefix(int a, int b, int (&shared)[2][kMaxWarps]) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  int sum[2] = {a, b};
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int below = __shfl_up_sync(0xffffffffu, sum[i], step);
      if (lane >= step) sum[i] += below;
    }
  }
  if (lane == kWarp - 1) shared[0][warp] = sum[0], shared[1][warp] = sum[1];
  __syncthreads();
  Prefix p = {{sum[0] - a, sum[1] - b}, {0, 0}};
  for (int w = 0; w < warps; ++w) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (w < warp) p.before[i] += shared[i][w];
      p.all[i] += shared[i][w];
    }
  }
  __syncthreads();
  return p;
}

// Each warp takes a run of pairs. count[warp][key] becomes where the warp's next pair of that key goes; key `experts`
// stands for experts that are not here.
__global__ void __launch_bounds__(kMaxWarps* kWarp) sort_kernel(SortArgs a) {
  extern __shared__ int count[];
  __shared__ int shared[2][kMaxWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int threads = blockDim.x, keys = a.experts + 1;
  for (int i = threadIdx.x; i < warps * keys; i += threads) count[i] = 0;
  const int run = ((a.pairs + warps - 1) / warps + kWarp - 1) / kWarp * kWarp;
  const int begin = min(a.pairs, warp * run), end = min(a.pairs, begin + run);
  int* const mine = count + warp * keys;
  const auto key_of = [&](int i) {
    const int id = a.id[i];
    return id >= 0 && id < a.experts ? id : a.experts;
  };
  __syncthreads();
  wait_for_previous();
  start_next();
  for (int i = begin + lane; i < end; i += kWarp) atomicAdd(mine + key_of(i), 1);
  __syncthreads();

  int first = 0, first_tile = 0;
  for (int base = 0; base < keys; base += threads) {
    const int key = base + static_cast<int>(threadIdx.x);
    int all = 0;
    if (key < keys) {
      for (int w = 0; w < warps; ++w) all += count[w * keys + key];
    }
    const int tiles = (all + a.tile_rows - 1) / a.tile_rows;
    const Prefix p = block_prefix(all, tiles, shared);
    int next = first + p.before[0];
    for (int t = 0; t < tiles; ++t) {
      a.tile[first_tile + p.before[1] + t] = {
          key < a.experts ? key : -1, min(a.tile_rows, all - t * a.tile_rows), next + t * a.tile_rows};
    }
    if (key < keys) {
      for (int w = 0; w < warps; ++w) {
        const int here = count[w * keys + key];
        count[w * keys + key] = next;
        next += here;
      }
    }
    first += p.all[0];
    first_tile += p.all[1];
  }
  if (threadIdx.x == 0) *a.tiles = first_tile;
  __syncthreads();

  for (int i0 = begin; i0 < end; i0 += kWarp) {
    const int i = i0 + lane;
    const int key = i < end ? key_of(i) : -1;
    const unsigned same = __match_any_sync(0xffffffffu, key);
    const int rank = __popc(same & ((1u << lane) - 1));
    if (key >= 0) a.list[mine[key] + rank] = i;
    __syncwarp();
    if (key >= 0 && rank == 0) mine[key] += __popc(same);
    __syncwarp();
  }
}

}  // namespace

PairList sort_pairs(const ExpertFfnParams& p, int tile_rows, Exec& exec) {
  const int64_t pairs = int64_t{p.rows} * p.topk;
  SortArgs a;
  a.id = p.id;
  a.pairs = static_cast<int>(pairs);
  a.experts = p.experts;
  a.tile_rows = tile_rows;
  a.list = exec.scratch->take<int32_t>(pairs);
  a.tile = exec.scratch->take<ExpertTile>(most_tiles(p, tile_rows));
  a.tiles = exec.scratch->take<int32_t>(1);
  const PairList sorted = {a.list, a.tile, a.tiles};
  if (exec.measure) return sorted;
  const int64_t row = (int64_t{p.experts} + 1) * sizeof(int);
  const int64_t fit = static_cast<int64_t>(kSharedLimit - sizeof(int) * 2 * kMaxWarps) / row;
  if (fit < 1) {
    throw InputError("expert_ffn: experts, at most " +
                         std::to_string((kSharedLimit - 2 * kMaxWarps * sizeof(int)) / sizeof(int) - 1) +
                         ", found " + std::to_string(p.experts),
                     "the CPU backend takes any number");
  }
  const int64_t wanted = pairs <= 512 ? 16 : kMaxWarps;
  const int warps = static_cast<int>(fit < wanted ? fit : wanted);
  launch("expert_ffn", sort_kernel, 1, warps * kWarp, static_cast<size_t>(warps * row), exec, a);
  return sorted;
}

}  // namespace rocket::cuda
