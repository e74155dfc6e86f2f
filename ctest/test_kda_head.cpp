// kda_head against the ops that it is made of, bit for bit.
#include "kda_head.h"

namespace {

using namespace rocket;
using check::HeadCase;
using check::HeadInputs;
using Floats = std::vector<float>;

struct Result {
  Floats o, state, tail, kept_state, kept_tail;
};

Result run(const OpTable& ops, const HeadCase& c, const HeadInputs& in, bool whole, const std::string& what) {
  const int64_t rows = c.rows(), C = c.width();
  Result r{{},
           in.state,
           in.tail,
           Floats(static_cast<size_t>(rows * c.state())),
           Floats(static_cast<size_t>(rows * c.tail()))};
  const auto room = static_cast<size_t>(rows * C);
  Floats qkv(3 * room, NAN), f(room, NAN), gate(room, NAN), o(room, NAN), b = in.b;
  std::vector<Segment> segment;
  std::vector<float*> state, tail, kept_state, kept_tail;
  for (int64_t s = 0, first = 0; s < c.streams(); first += c.lengths[static_cast<size_t>(s++)]) {
    segment.push_back({static_cast<int32_t>(first), c.lengths[static_cast<size_t>(s)], 5});
    state.push_back(r.state.data() + s * c.state());
    tail.push_back(r.tail.data() + s * c.tail());
  }
  for (int64_t t = 0; t < rows; ++t) {
    kept_state.push_back(t % 3 ? nullptr : r.kept_state.data() + t * c.state());
    kept_tail.push_back(t % 3 ? nullptr : r.kept_tail.data() + t * c.tail());
  }
  const check::HeadPlace at{
      in.raw.data(),     in.f_low.data(), in.g_low.data(),  in.conv.data(),
      in.dt_bias.data(), in.a_log.data(), in.o_norm.data(), in.f_b.w,
      in.g_b.w,          qkv.data(),      f.data(),         gate.data(),
      b.data(),          o.data(),        segment.data(),   static_cast<int32_t>(segment.size()),
      tail.data(),       state.data(),    kept_tail.data(), kept_state.data()};
  check::Bench bench(whole ? 3 : 1);
  const KdaHeadParams p = check::head_params(c, at, static_cast<int32_t>(rows));
  if (whole) {
    ops.kda_head(p, bench.exec);
  } else {
    check::head_step_by_step(ops, p, bench.exec);
  }
  check::expect(bench.scratch.used() == 0, what + ": gives its scratch back");
  r.o = o;
  return r;
}

void check_head(const OpTable& ops, const std::string& isa, const HeadCase& c) {
  const std::string what = isa + c.name();
  const HeadInputs in(c);
  const Result found = run(ops, c, in, true, what), expected = run(ops, c, in, false, what);
  const auto same = [&](const char* name, const Floats& a, const Floats& b) {
    check::same_bits(what + ": " + name, a.data(), b.data(), static_cast<int64_t>(b.size()));
  };
  same("out", found.o, expected.o);
  same("state", found.state, expected.state);
  same("tail", found.tail, expected.tail);
  same("checkpoints of the state", found.kept_state, expected.kept_state);
  same("checkpoints of the tail", found.kept_tail, expected.kept_tail);
  check::expect(std::memcmp(found.state.data(), in.state.data(), in.state.size() * sizeof(float)) != 0,
                what + ": the state moves on");
}

}  // namespace

int main() {
  check::on_each_isa([](const OpTable& ops, const std::string& isa) {
    check_head(ops, isa, {{1}, 2, 128, 4, WeightFormat::kBF16, true});
    check_head(ops, isa, {{3, 1, 7}, 3, 24, 3, WeightFormat::kF32, false});
    check_head(ops, isa, {{20, 2}, 2, 32, 4, WeightFormat::kNVFP4, true});
  });
  return check::finish("kda_head");
}
