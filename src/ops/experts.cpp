#include "ops/cpu_ops.h"
#include "ops/gemm.h"

namespace rocket::ROCKET_ISA {
namespace {

// A comparison with NaN is false and then takes the second operand: NaN comes through the clamps.
ROCKET_INLINE F16v clamped_swiglu(F16v gate, F16v up, float limit) {
  return silu(min(splat(limit), gate)) * min(splat(limit), max(splat(-limit), up));
}

// The pairs of one expert with the rows that chose it.
struct Group {
  int32_t expert;
  int32_t rows;
  const int32_t* row;   // [rows]
  const int32_t* pair;  // [rows], row * topk + place
  int64_t cost;         // of a block of sixteen outputs, in rows
  int64_t cost_before;  // of the groups before, a block each
};

struct Plan {
  Group* group = nullptr;  // experts that have rows, ascending
  int64_t active = 0;
  int64_t cost = 0;        // of one block of each group
  float* fixed = nullptr;  // [rows, ld_fixed], x for NVFP4, where some gate or up is
  float* act = nullptr;    // [pairs, ld_act], as the expert's down wants it
  int64_t ld_fixed = 0, ld_act = 0;
};

ROCKET_INLINE void check_size(const char* what, int64_t expected, int64_t found) {
  if (found != expected) fail_op("expert_ffn", what, expected, found);
}

ROCKET_INLINE void check_expert(const ExpertFfnParams& p, const ExpertWeights& e) {
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

// Decoding a block of weights costs about as much as this many rows of products.
constexpr int64_t kDecodeCost = 1;

// Sorts the pairs by expert and checks what they need.
Plan make_plan(const ExpertFfnParams& p, Arena& scratch) {
  const int64_t pairs = static_cast<int64_t>(p.rows) * p.topk;
  int32_t* at = scratch.take<int32_t>(
      p.experts + 1);  // first the number of pairs of each expert, then where its next goes
  int32_t* row = scratch.take<int32_t>(pairs);
  int32_t* pair = scratch.take<int32_t>(pairs);
  Plan plan;
  plan.group = scratch.take<Group>(min_i64(p.experts, pairs));
  for (int32_t e = 0; e < p.experts; ++e) at[e] = 0;
  for (int64_t i = 0; i < pairs; ++i) {
    if (p.id[i] < -1 || p.id[i] >= p.experts) fail_op("expert_ffn", "expert id, below", p.experts, p.id[i]);
    if (p.id[i] >= 0) ++at[p.id[i]];
  }
  bool any_four = false;
  int32_t first = 0;
  for (int32_t e = 0; e < p.experts; ++e) {
    const int32_t rows = at[e];
    at[e] = first;
    if (rows == 0) continue;
    const ExpertWeights& weights = p.expert[e];
    check_expert(p, weights);
    any_four =
        any_four || weights.gate.format == WeightFormat::kNVFP4 || weights.up.format == WeightFormat::kNVFP4;
    const int64_t cost = rows + kDecodeCost;
    plan.group[plan.active++] = {e, rows, row + first, pair + first, cost, plan.cost};
    plan.cost += cost;
    first += rows;
  }
  for (int64_t i = 0; i < pairs; ++i) {
    if (p.id[i] < 0) continue;
    const int32_t place = at[p.id[i]]++;
    row[place] = static_cast<int32_t>(i / p.topk);
    pair[place] = static_cast<int32_t>(i);
  }
  plan.ld_fixed = fixed_floats(p.hidden);
  plan.ld_act = round_up(p.inner, 256);
  if (any_four) plan.fixed = scratch.take<float>(p.rows * plan.ld_fixed);
  plan.act = scratch.take<float>(pairs * plan.ld_act);
  return plan;
}

// Of rows [begin, end): x for NVFP4, zeros behind the activations, zeros for absent experts unless they are kept.
void prepare_rows(const ExpertFfnParams& p, const Plan& plan, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    if (plan.fixed) fixed_row(p.x + r * p.ldx, p.hidden, plan.fixed + r * plan.ld_fixed);
    for (int64_t i = r * p.topk; i < (r + 1) * p.topk; ++i) {
      fixed_clear_tail(p.inner, plan.act + i * plan.ld_act);
      if (p.id[i] < 0 && !p.keep_absent) std::memset(p.out + i * p.hidden, 0, p.hidden * sizeof(float));
    }
  }
}

struct Span {
  int64_t begin, end;
};

// The blocks of a group whose start lies in [begin, end) of a loop over the costs of all groups' blocks.
ROCKET_INLINE Span blocks_of(const Group& g, int64_t blocks, int64_t begin, int64_t end) {
  const int64_t start = g.cost_before * blocks;
  const int64_t from = begin <= start ? 0 : (begin - start + g.cost - 1) / g.cost;
  const int64_t to = end <= start ? 0 : (end - start + g.cost - 1) / g.cost;
  return {min_i64(from, blocks), min_i64(to, blocks)};
}

// Gate and up wait for each other in a buffer of this many floats each: many channels of few rows, or few of
// many, so that a stretch of weights is read at a time.
constexpr int64_t kHeld = 4096;
constexpr int64_t kHeldRows = kHeld / kLanes;

// Blocks of sixteen inner channels of one expert: gate and up, then SwiGLU.
[[gnu::noinline]] void gate_up(const ExpertFfnParams& p, const Plan& plan, const Group& g, Span blocks) {
  alignas(64) float gate[kHeld], up[kHeld];
  const ExpertWeights& e = p.expert[g.expert];
  const bool four = e.down.format == WeightFormat::kNVFP4;
  for (int64_t row0 = 0; row0 < g.rows; row0 += kHeldRows) {
    const int64_t rows = min_i64(kHeldRows, g.rows - row0), held = kHeldRows / rows;
    const RowsIn plain = {p.x, p.ldx, g.row + row0}, fixed = {plan.fixed, plan.ld_fixed, g.row + row0};
    for (int64_t b0 = blocks.begin; b0 < blocks.end; b0 += held) {
      const int64_t b1 = min_i64(blocks.end, b0 + held), width = (b1 - b0) * kLanes;
      const int64_t o0 = b0 * kLanes, o1 = min_i64(b1 * kLanes, p.inner);
      matmul(e.gate, o0, o1, rows, e.gate.format == WeightFormat::kNVFP4 ? fixed : plain, {gate, width});
      matmul(e.up, o0, o1, rows, e.up.format == WeightFormat::kNVFP4 ? fixed : plain, {up, width});
      for (int64_t r = 0; r < rows; ++r) {
        float* act = plan.act + g.pair[row0 + r] * plan.ld_act;
        for (int64_t b = b0; b < b1; ++b) {
          float *gb = gate + r * width + (b - b0) * kLanes, *ub = up + r * width + (b - b0) * kLanes;
          const int n = static_cast<int>(min_i64(kLanes, p.inner - b * kLanes));
          for (int i = n; i < kLanes; ++i) gb[i] = ub[i] = 0;
          const F16v v = clamped_swiglu(load(gb), load(ub), p.limit);
          if (four) {
            store(gb, v);
            fixed_block(gb, b, act);
          } else if (n == kLanes) {
            store(act + b * kLanes, v);
          } else {
            store_part(act + b * kLanes, v, n);
          }
        }
      }
    }
  }
}

// Blocks of sixteen outputs of one expert, times the pair's weight.
[[gnu::noinline]] void down(const ExpertFfnParams& p, const Plan& plan, const Group& g, Span blocks) {
  matmul(p.expert[g.expert].down, blocks.begin * kLanes, min_i64(blocks.end * kLanes, p.hidden), g.rows,
         {plan.act, plan.ld_act, g.pair}, {p.out + blocks.begin * kLanes, p.hidden, g.pair, p.weight});
}

// Of a loop over costs, for blocks of sixteen rows of `weights` weights of `in` columns.
ROCKET_INLINE int64_t cost_grain(int weights, int64_t in) {
  return grain_of(static_cast<double>(weights * kLanes * in) * 0.02);
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
      for (; i + kLanes <= p.dim; i += kLanes)
        store(y + i, clamped_swiglu(load(gate + i), load(up + i), p.limit));
      const int rest = p.dim - i;
      if (rest)
        store_part(y + i, clamped_swiglu(load_part(gate + i, rest), load_part(up + i, rest), p.limit), rest);
    }
  });
}

void expert_ffn(const ExpertFfnParams& p, Exec& exec) {
  if (p.rows <= 0 || p.topk <= 0) return;
  ArenaScope scope(*exec.scratch);
  const Plan plan = make_plan(p, *exec.scratch);
  exec.pool->loop(p.rows, grain_of(static_cast<double>(p.hidden) / 16 * kFixedBlockNs),
                  [&](int64_t begin, int64_t end, int) { prepare_rows(p, plan, begin, end); });
  const int64_t inner_blocks = (p.inner + kLanes - 1) / kLanes,
                hidden_blocks = (p.hidden + kLanes - 1) / kLanes;
  exec.pool->loop(plan.cost * inner_blocks, cost_grain(2, p.hidden), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = 0; i < plan.active; ++i) {
      const Span blocks = blocks_of(plan.group[i], inner_blocks, begin, end);
      if (blocks.begin < blocks.end) gate_up(p, plan, plan.group[i], blocks);
    }
  });
  exec.pool->loop(plan.cost * hidden_blocks, cost_grain(1, p.inner), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = 0; i < plan.active; ++i) {
      const Span blocks = blocks_of(plan.group[i], hidden_blocks, begin, end);
      if (blocks.begin < blocks.end) down(p, plan, plan.group[i], blocks);
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
        if (full)
          store(y + i, s);
        else
          store_part(y + i, s, n);
      }
    }
  });
}

}  // namespace rocket::ROCKET_ISA
