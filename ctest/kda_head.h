// What the tests of kda_head share: random inputs of a layer, and the op's params over them.
#pragma once

#include <numeric>
#include <string>
#include <vector>

#include "ops_check.h"
#include "stored_weight.h"

namespace check {

struct HeadCase {
  std::vector<int32_t> lengths;  // rows of each stream
  int32_t heads, dim, taps;
  rocket::WeightFormat format;
  bool bounded;
  int64_t rows() const { return std::accumulate(lengths.begin(), lengths.end(), int64_t{0}); }
  int64_t streams() const { return static_cast<int64_t>(lengths.size()); }
  int64_t width() const { return static_cast<int64_t>(heads) * dim; }
  int64_t state() const { return width() * dim; }
  int64_t tail() const { return (taps - 1) * 3 * width(); }
  std::string name() const {
    std::string s = std::to_string(heads);
    s.append(" x ").append(std::to_string(dim)).append(" ").append(format_name(format));
    s += bounded ? " rows" : " softplus rows";
    for (size_t i = 0; i < lengths.size() && i < 6; ++i) s.append(" ").append(std::to_string(lengths[i]));
    return s + (lengths.size() > 6 ? " …" : "");
  }
};

struct HeadInputs {
  using Floats = std::vector<float>;
  explicit HeadInputs(const HeadCase& c)
      : raw(normal(c.rows() * 3 * c.width())),
        f_low(normal(c.rows() * c.dim)),
        g_low(normal(c.rows() * c.dim)),
        b(normal(c.rows() * c.heads)),
        f_b(random_weight(c.format, c.width(), c.dim, 1 / std::sqrt(c.dim))),
        g_b(random_weight(c.format, c.width(), c.dim, 1 / std::sqrt(c.dim))),
        conv(normal(c.taps * 3 * c.width(), 0.5)),
        dt_bias(normal(c.width())),
        a_log(normal(c.heads, 0.3)),
        o_norm(normal(c.dim)),
        state(normal(c.streams() * c.state(), 0.3)),
        tail(normal(c.streams() * c.tail())) {
    for (float& x : dt_bias) x -= 3.0f;  // most channels remember
  }
  Floats raw, f_low, g_low, b;  // of all rows, streams one after the other
  StoredWeight f_b, g_b;
  Floats conv, dt_bias, a_log, o_norm;
  Floats state, tail;
};

// Where a call finds these, and has its room.
struct HeadPlace {
  const float *raw, *f_low, *g_low, *conv, *dt_bias, *a_log, *o_norm;
  rocket::Weight f_b, g_b;
  float *qkv, *f, *gate, *b, *o;
  const rocket::Segment* segment;
  int32_t segments;
  float *const *tail, *const *state;
  float *const *kept_tail, *const *kept_state;  // may be null
};

inline rocket::KdaHeadParams head_params(const HeadCase& c, const HeadPlace& at, int32_t rows) {
  const int64_t C = c.width();
  rocket::KdaHeadParams p;
  for (rocket::LinearParams* low : {&p.f_b, &p.g_b}) {
    low->ldx = c.dim;
    low->rows = rows;
    low->part_count = 1;
    low->part[0].ldy = C;
  }
  p.f_b.x = at.f_low, p.f_b.part[0].w = at.f_b, p.f_b.part[0].y = at.f;
  p.g_b.x = at.g_low, p.g_b.part[0].w = at.g_b, p.g_b.part[0].y = at.gate;
  p.conv.x = at.raw, p.conv.y = at.qkv, p.conv.weight = at.conv;
  p.conv.ldx = p.conv.ldy = p.conv.channels = static_cast<int32_t>(3 * C);
  p.conv.taps = c.taps;
  p.conv.segment = p.recurrence.segment = at.segment;
  p.conv.segments = p.recurrence.segments = at.segments;
  p.conv.tail = {at.tail, 0}, p.conv.checkpoint = {at.kept_tail, 0};
  p.gates.f = p.gates.g = at.f, p.gates.b = p.gates.beta = at.b;
  p.gates.dt_bias = at.dt_bias, p.gates.a_log = at.a_log, p.gates.bounded = c.bounded;
  p.recurrence.q = at.qkv, p.recurrence.k = at.qkv + C, p.recurrence.v = at.qkv + 2 * C;
  p.recurrence.ldqkv = 3 * C;
  p.recurrence.g = at.f, p.recurrence.beta = at.b, p.recurrence.o = at.o;
  p.recurrence.state = {at.state, 0}, p.recurrence.checkpoint = {at.kept_state, 0};
  p.norm.o = p.norm.y = at.o, p.norm.gate = at.gate, p.norm.weight = at.o_norm;
  p.conv.rows = p.gates.rows = p.recurrence.rows = p.norm.rows = rows;
  p.gates.heads = p.recurrence.heads = p.norm.heads = c.heads;
  p.gates.head_dim = p.recurrence.head_dim = p.norm.head_dim = c.dim;
  return p;
}

inline void head_step_by_step(const rocket::OpTable& ops, const rocket::KdaHeadParams& p,
                              rocket::Exec& exec) {
  ops.linear(p.f_b, exec);
  ops.linear(p.g_b, exec);
  ops.kda_conv(p.conv, exec);
  ops.kda_gates(p.gates, exec);
  ops.kda_recurrence(p.recurrence, exec);
  ops.gated_norm(p.norm, exec);
}

}  // namespace check
