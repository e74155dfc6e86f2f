#include "ops/cpu_ops.h"
#include "ops/gemm.h"

namespace rocket::ROCKET_ISA {
namespace {

// A comparison with NaN is false and then takes the second operand: NaN comes through the clamps.
ROCKET_INLINE F16v clamped_swiglu(F16v gate, F16v up, float limit) {
  return silu(min(splat(limit), gate)) * min(splat(limit), max(splat(-limit), up));
}

ROCKET_INLINE void check_size(const char* what, int64_t expected, int64_t found) {
  if (found != expected) fail_op("expert_ffn", what, expected, found);
}

}  // namespace

void swiglu(const SwigluParams& p, Exec& exec) {
  if (p.rows <= 0) return;
  exec.pool->loop(p.rows, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const float* gate = p.gate + r * p.ld;
      const float* up = p.up + r * p.ld;
      float* y = p.y + r * p.ldy;
      int i = 0;
      for (; i + kLanes <= p.dim; i += kLanes) store(y + i, clamped_swiglu(load(gate + i), load(up + i), p.limit));
      const int rest = p.dim - i;
      if (rest) store_part(y + i, clamped_swiglu(load_part(gate + i, rest), load_part(up + i, rest), p.limit), rest);
    }
  });
}

void expert_ffn(const ExpertFfnParams& p, Exec& exec) {
  if (p.rows <= 0 || p.topk <= 0) return;
  const int64_t pairs = static_cast<int64_t>(p.rows) * p.topk;
  for (int64_t i = 0; i < pairs; ++i) {
    if (p.id[i] < -1 || p.id[i] >= p.experts) fail_op("expert_ffn", "expert id, below", p.experts, p.id[i]);
    if (p.id[i] < 0) continue;
    const ExpertWeights& e = p.expert[p.id[i]];
    check_weight("expert_ffn", e.gate);
    check_weight("expert_ffn", e.up);
    check_weight("expert_ffn", e.down);
    check_size("hidden size of an expert's gate", p.hidden, e.gate.in);
    check_size("hidden size of an expert's up", p.hidden, e.up.in);
    check_size("hidden size of an expert's down", p.hidden, e.down.out);
    check_size("inner size of an expert's gate", p.inner, e.gate.out);
    check_size("inner size of an expert's up", p.inner, e.up.out);
    check_size("inner size of an expert's down", p.inner, e.down.in);
  }
  ArenaScope scope(*exec.scratch);
  float* act = exec.scratch->take<float>(pairs * p.inner);
  const int64_t tile = 16;
  const int64_t inner_tiles = (p.inner + tile - 1) / tile, hidden_tiles = (p.hidden + tile - 1) / tile;
  exec.pool->loop(pairs * inner_tiles, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t pair = at / inner_tiles, first = at % inner_tiles * tile;
      if (p.id[pair] < 0) continue;
      const ExpertWeights& e = p.expert[p.id[pair]];
      const float* x = p.x + pair / p.topk * p.ldx;
      const int n = static_cast<int>(min_i64(tile, p.inner - first));
      float gate[tile] = {}, up[tile] = {};
      for (int k = 0; k < n; ++k) dot_rows(e.gate, first + k, x, 0, 1, gate + k);
      for (int k = 0; k < n; ++k) dot_rows(e.up, first + k, x, 0, 1, up + k);
      store_part(act + pair * p.inner + first, clamped_swiglu(load(gate), load(up), p.limit), n);
    }
  });
  exec.pool->loop(pairs * hidden_tiles, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t pair = at / hidden_tiles, first = at % hidden_tiles * tile;
      const int n = static_cast<int>(min_i64(tile, p.hidden - first));
      float* out = p.out + pair * p.hidden + first;
      for (int k = 0; k < n; ++k) {
        float y = 0;
        if (p.id[pair] >= 0) {
          dot_rows(p.expert[p.id[pair]].down, first + k, act + pair * p.inner, 0, 1, &y);
          y *= p.weight[pair];
        }
        out[k] = y;
      }
    }
  });
}

void expert_sum(const ExpertSumParams& p, Exec& exec) {
  if (p.rows <= 0) return;
  if (p.topk <= 0) fail_op("expert_sum", "topk, at least", 1, p.topk);
  exec.pool->loop(p.rows, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const float* out = p.out + r * p.topk * p.hidden;
      const float* shared = p.shared ? p.shared + r * p.hidden : nullptr;
      float* y = p.y + r * p.hidden;
      for (int i = 0; i < p.hidden; i += kLanes) {
        const int n = static_cast<int>(min_i64(kLanes, p.hidden - i));
        const bool full = n == kLanes;
        F16v s = full ? load(out + i) : load_part(out + i, n);
        for (int j = 1; j < p.topk; ++j) {
          const float* next = out + static_cast<int64_t>(j) * p.hidden + i;
          s += full ? load(next) : load_part(next, n);
        }
        if (shared) s += full ? load(shared + i) : load_part(shared + i, n);
        if (full) store(y + i, s);
        else store_part(y + i, s, n);
      }
    }
  });
}

}  // namespace rocket::ROCKET_ISA
