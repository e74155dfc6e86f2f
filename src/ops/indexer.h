// The DSA indexer with pooled keys: which past tokens a row attends to.
//
// pool_update (pool compression): tokens are grouped in pools of `pool` (position / pool). A pool that is complete gets
// one key, per channel d over its tokens t:
//   p[t][d] = softmax over t(gate[t][d] + ape[t][d]);  pooled[d] = sum_t p[t][d] * k[t][d]
// and never changes again. Raw keys and gates of the unfinished pool wait in the stream's tail. pool = 1 without gate
// copies keys.
//
// index_select: row r at position s may choose among the pools whose last token is visible: P = (s + 1) / pool.
//   score[p] = sum_h head_weight[h] * relu(dot(q[h], pooled[p]) * scale)       h ascending
//   chosen   = the min(topk, P) best pools, ties to the lowest index
// and the row's token list is the tokens of the chosen pools, ascending, then (select_tail) the tokens
// pool*P … s of its own unfinished pool. A NaN score counts as the smallest.
#pragma once

#include "ops/pages.h"
#include "ops/rows.h"

namespace rocket {

struct PoolUpdateParams {
  const float* k = nullptr;  // [rows, D] keys after LayerNorm, rows ldk apart
  int64_t ldk = 0;
  const float* gate = nullptr;  // [rows, D], rows ldgate apart; null only if pool == 1
  int64_t ldgate = 0;
  const float* ape = nullptr;  // [pool, D]; null = 0
  int32_t pool = 4;
  int32_t dim = 0;                   // D
  const Segment* segment = nullptr;  // [segments]
  int32_t segments = 0;
  BlockParts tail;        // [segments] -> [2, pool, D]: raw keys, then gates, slot = position % pool; in/out
  BlockParts checkpoint;  // [rows] -> [2, pool, D] out; may be null
  PagedParts pooled;      // [segments], float32, width D, row index = pool index; out
  int32_t rows = 0;
};

struct IndexSelectParams {
  const float* q = nullptr;  // [rows, heads, D], rows ldq apart
  int64_t ldq = 0;
  const float* head_weight = nullptr;  // [rows, heads], rows ldw apart; heads^-1/2 not yet applied
  int64_t ldw = 0;
  float head_weight_scale = 1.0f;  // heads^-1/2, applied to head_weight
  float scale = 1.0f;              // D^-1/2
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t dim = 0;
  int32_t pool = 4;
  int32_t topk = 0;  // pools: index_topk / pool
  bool select_tail = true;
  int32_t max_pools = 0;  // at least the pools that any row can see, now or when a recorded call is replayed
  const Segment* segment = nullptr;
  int32_t segments = 0;
  PagedParts pooled;         // [segments], float32
  int32_t* token = nullptr;  // out [rows, ldtoken] ascending positions
  int64_t ldtoken = 0;       // at least topk*pool + pool - 1
  int32_t* count = nullptr;  // out [rows]
  float* score = nullptr;    // out [rows, ldscore] scores of the visible pools; may be null (tests)
  int64_t ldscore = 0;
};
// Scratch of index_select: score rows in flight (blocks of rows share it) and selection keys.
inline int64_t index_select_block_rows(int64_t rows) {
  return rows < 16 ? rows : 16;
}
inline int64_t index_select_scratch_bytes(int64_t rows, int64_t max_pools) {
  return index_select_block_rows(rows) * (max_pools + 64) * (4 + 8) + 4096;
}

// The k largest of score[0 … n), ties to the lowest index, NaN smallest; indices ascending into out[0 … min(k, n)).
// keys: scratch, n entries. Linear time on average for any number of ties. Returns min(k, n).
int32_t topk_lowest_index(const float* score, int32_t n, int32_t k, uint64_t* keys, int32_t* out);

}  // namespace rocket
