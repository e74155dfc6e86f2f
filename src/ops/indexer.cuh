// What the parts of index_select share.
#pragma once

#include "ops/cuda.cuh"
#include "ops/indexer.h"

namespace rocket::cuda {

// Scores of a group of rows.
struct IndexScores {
  float* score = nullptr;  // [rows of the group, ld]
  int64_t ld = 0;
  int first_row = 0;
};

__device__ __forceinline__ int visible_pools(const IndexSelectParams& p, const Segment& segment, int row) {
  const int64_t pools = (segment.position + row - segment.first_row + 1) / p.pool;
  return static_cast<int>(pools < p.max_pools ? pools : p.max_pools);
}
__device__ __forceinline__ bool scores_wanted(const IndexSelectParams& p, int pools) {
  return p.score || pools > p.topk;
}
// Scores of `rows` rows (indexer_score.cu).
void index_scores(const IndexSelectParams& p, const IndexScores& scores, int rows, Exec& exec);

// Token lists of `rows` rows from their scores (indexer_select.cu). Both take scratch in measure mode too.
void index_lists(const IndexSelectParams& p, const IndexScores& scores, int rows, Exec& exec);

}  // namespace rocket::cuda
