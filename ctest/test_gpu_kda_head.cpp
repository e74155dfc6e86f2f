// CUDA kda_head against the CPU's, and bit for bit against the CUDA ops that it stands for; a row's bits whatever the
// number of rows, on both sides of the number up to which there is a kernel of its own.
#include <algorithm>

#include "gpu_check.h"
#include "gpu_kda.h"
#include "kda_head.h"

namespace {

using namespace rocket;
using check::Call;
using check::DeviceArray;
using check::Floats;
using check::HeadCase;
using check::HeadInputs;
using check::poisoned;

bool keeps_tail(int32_t row) {
  return row % 3 != 2;
}
bool keeps_state(int32_t row) {
  return row % 5 == 1;
}

struct Result {
  Floats out, state, tail, kept_state, kept_tail;
};

void compare_bits(const std::string& what, const Result& a, const Result& b) {
  const auto same = [&](const char* name, const Floats& x, const Floats& y) {
    check::same_bits(what + ": " + name, x.data(), y.data(), static_cast<int64_t>(y.size()));
  };
  same("out", a.out, b.out);
  same("state", a.state, b.state);
  same("tail", a.tail, b.tail);
  same("checkpoints of the state", a.kept_state, b.kept_state);
  same("checkpoints of the tail", a.kept_tail, b.kept_tail);
}

// A stored weight on the device, `shift` bytes behind an aligned address.
class DeviceWeight {
 public:
  DeviceWeight(check::Gpu& gpu, const check::StoredWeight& from, int64_t shift)
      : data_(gpu, moved(from.data, shift)), scale_(gpu, moved(from.scale, 0)), w_(from.w) {
    w_.data = data_.data() + shift;
    if (from.w.block_scale) w_.block_scale = scale_.data();
  }
  const Weight& get() const { return w_; }

 private:
  static std::vector<uint8_t> moved(const std::vector<uint8_t>& from, int64_t shift) {
    std::vector<uint8_t> to(static_cast<size_t>(shift), 0);
    to.insert(to.end(), from.begin() + 1, from.end());
    return to;
  }
  DeviceArray<uint8_t> data_, scale_;
  Weight w_;
};

struct How {
  bool step_by_step = false, checkpoints = true;
  int64_t shift = 0;  // of the weights
};

Result run_gpu(check::Gpu& gpu, const HeadCase& c, const HeadInputs& in, const std::vector<Call>& calls,
               const How& how, const std::string& what) {
  const int64_t C = c.width();
  const DeviceArray<float> conv(gpu, in.conv), dt_bias(gpu, in.dt_bias), a_log(gpu, in.a_log),
      o_norm(gpu, in.o_norm), state(gpu, in.state), tail(gpu, in.tail), kept_state(gpu, c.rows() * c.state()),
      kept_tail(gpu, c.rows() * c.tail());
  const DeviceWeight f_b(gpu, in.f_b, how.shift), g_b(gpu, in.g_b, how.shift);
  Result result{poisoned(c.rows() * C), {}, {}, {}, {}};
  for (const Call& call : calls) {
    const auto rows = static_cast<int32_t>(call.source.size());
    const int empty = rows % 2 ? 2 : 0;
    const check::Blocks states =
        check::blocks(call, state.data(), c.state(), kept_state.data(), empty, keeps_state);
    const check::Blocks tails =
        check::blocks(call, tail.data(), c.tail(), kept_tail.data(), empty, keeps_tail);
    const DeviceArray<float> raw(gpu, check::gather(in.raw, call, 3 * C, 3 * C)),
        f_low(gpu, check::gather(in.f_low, call, c.dim, c.dim)),
        g_low(gpu, check::gather(in.g_low, call, c.dim, c.dim)),
        b(gpu, check::gather(in.b, call, c.heads, c.heads)), qkv(gpu, rows * 3 * C), f(gpu, rows * C),
        gate(gpu, rows * C), o(gpu, rows * C);
    const DeviceArray<Segment> segment(gpu, check::with_empty(call, empty));
    const DeviceArray<float*> state_of(gpu, states.state), tail_of(gpu, tails.state),
        state_kept(gpu, states.checkpoint), tail_kept(gpu, tails.checkpoint);
    const check::HeadPlace at{raw.data(),
                              f_low.data(),
                              g_low.data(),
                              conv.data(),
                              dt_bias.data(),
                              a_log.data(),
                              o_norm.data(),
                              f_b.get(),
                              g_b.get(),
                              qkv.data(),
                              f.data(),
                              gate.data(),
                              b.data(),
                              o.data(),
                              segment.data(),
                              static_cast<int32_t>(segment.count()),
                              tail_of.data(),
                              state_of.data(),
                              how.checkpoints ? tail_kept.data() : nullptr,
                              how.checkpoints ? state_kept.data() : nullptr};
    const KdaHeadParams p = check::head_params(c, at, rows);
    if (how.step_by_step) {
      check::head_step_by_step(gpu.ops, p, gpu.exec);
    } else {
      gpu.ops.kda_head(p, gpu.exec);
    }
    check::expect(gpu.scratch.used() == 0, what + ": gives its scratch back");
    check::scatter(o.get(), call, C, C, result.out, what);
    for (const DeviceArray<float>* array : {&raw, &f_low, &g_low, &b, &qkv, &f, &gate, &o})
      array->check(what);
  }
  result.state = state.get();
  result.tail = tail.get();
  result.kept_state = kept_state.get();
  result.kept_tail = kept_tail.get();
  for (const DeviceArray<float>* array : {&state, &tail, &kept_state, &kept_tail}) array->check(what);
  return result;
}

Result run_cpu(check::Gpu& gpu, const HeadCase& c, const HeadInputs& in) {
  const Call call = check::whole(c.lengths);
  const int64_t rows = c.rows(), C = c.width();
  Result r{poisoned(rows * C), in.state, in.tail, poisoned(rows * c.state()), poisoned(rows * c.tail())};
  const check::Blocks states =
      check::blocks(call, r.state.data(), c.state(), r.kept_state.data(), 0, keeps_state);
  const check::Blocks tails = check::blocks(call, r.tail.data(), c.tail(), r.kept_tail.data(), 0, keeps_tail);
  Floats qkv = poisoned(rows * 3 * C), f = poisoned(rows * C), gate = f, b = in.b;
  const check::HeadPlace at{in.raw.data(),
                            in.f_low.data(),
                            in.g_low.data(),
                            in.conv.data(),
                            in.dt_bias.data(),
                            in.a_log.data(),
                            in.o_norm.data(),
                            in.f_b.w,
                            in.g_b.w,
                            qkv.data(),
                            f.data(),
                            gate.data(),
                            b.data(),
                            r.out.data(),
                            call.segment.data(),
                            static_cast<int32_t>(call.segment.size()),
                            tails.state.data(),
                            states.state.data(),
                            tails.checkpoint.data(),
                            states.checkpoint.data()};
  cpu_ops().kda_head(check::head_params(c, at, static_cast<int32_t>(rows)), gpu.cpu.exec);
  return r;
}

void check_head(check::Gpu& gpu, const HeadCase& c, int64_t shift = 0) {
  if (!gpu.takes_case()) return;
  const std::string what = c.name() + (shift ? " unaligned" : "");
  const HeadInputs in(c);
  const std::vector<Call> together{check::whole(c.lengths)};
  const Result found = run_gpu(gpu, c, in, together, {false, true, shift}, what);
  compare_bits(what + " against op by op", found, run_gpu(gpu, c, in, together, {true, true, shift}, what));

  const Result expected = run_cpu(gpu, c, in);
  const auto size = [](const Floats& v) { return static_cast<int64_t>(v.size()); };
  // Roundings as in the tests of the single ops: those of the recurrence, of the convolution before it and of the norm
  // behind it. Those of the low-rank products reach the log-decays with the gate's slope, at most 5/4 or 1 times a,
  // on products of up to four or so; a is up to two or three. On each side.
  const double longest = *std::max_element(c.lengths.begin(), c.lengths.end());
  const double slope = 1.25 * 2.5 * 4;
  const double steps = c.dim + 3 * std::min(longest, 64.0) + c.taps + 9 + check::lane_steps(c.dim) / 4 + 12 +
                       slope * slope * check::lane_steps(c.dim);
  const double limit = 2 * check::rounding(steps);
  check::close(what + ": out", found.out.data(), expected.out.data(), size(found.out), limit);
  check::close(what + ": state", found.state.data(), expected.state.data(), size(found.state), limit);
  check::close(what + ": checkpoints", found.kept_state.data(), expected.kept_state.data(),
               size(found.kept_state), limit);
  check::same_bits(what + ": tail", found.tail.data(), expected.tail.data(), size(found.tail));
  check::same_bits(what + ": checkpoints of the tail", found.kept_tail.data(), expected.kept_tail.data(),
                   size(found.kept_tail));

  for (const int32_t chunk : {1, 2, 3, 7, 16}) {
    compare_bits(what + " in chunks of " + std::to_string(chunk), found,
                 run_gpu(gpu, c, in, check::chunked(c.lengths, chunk), {false, true, shift}, what));
  }
  const Result without = run_gpu(gpu, c, in, together, {false, false, shift}, what);
  check::same_bits(what + " without checkpoints", without.out.data(), found.out.data(), size(found.out));
  check::same_bits(what + " without checkpoints: state", without.state.data(), found.state.data(),
                   size(found.state));
  for (const Floats* kept : {&without.kept_state, &without.kept_tail}) {
    check::expect(std::all_of(kept->begin(), kept->end(), [](float x) { return std::isnan(x); }),
                  what + ": no checkpoint that nobody asked for");
  }
}

// A value that is not a number spoils its head of its stream from its row on, and nothing else.
void nan_stays_in_its_head(check::Gpu& gpu) {
  const HeadCase c{{4, 4, 4}, 2, 128, 4, WeightFormat::kBF16, true};
  HeadInputs in(c);
  in.raw[static_cast<size_t>((4 + 1) * 3 * c.width() + 2 * c.width() + 130)] = NAN;  // v of row 5, head 1
  const Result found = run_gpu(gpu, c, in, {check::whole(c.lengths)}, {}, "NaN");
  for (int64_t i = 0; i < static_cast<int64_t>(found.out.size()); ++i) {
    const int64_t row = i / c.width(), head = i % c.width() / c.dim;
    check::expect(std::isnan(found.out[static_cast<size_t>(i)]) == (row >= 5 && row < 8 && head == 1),
                  "a NaN value spoils its head of its stream from its row on");
  }
}

void all(check::Gpu& gpu) {
  constexpr auto bf16 = WeightFormat::kBF16, f32 = WeightFormat::kF32;
  const std::vector<int32_t> eight(8, 1), sixteen(16, 1);
  check_head(gpu, {{1}, 64, 128, 4, bf16, true});
  check_head(gpu, {eight, 5, 128, 4, bf16, true});
  check_head(gpu, {sixteen, 2, 128, 4, f32, true});
  check_head(gpu, {{16}, 2, 128, 4, bf16, false});
  check_head(gpu, {{3, 1, 4}, 3, 128, 4, f32, false});
  check_head(gpu, {{5, 11}, 1, 128, 4, bf16, true});
  check_head(gpu, {{20, 3}, 2, 128, 4, bf16, true});  // more rows than the kernel takes, then fewer
  // What the kernel does not take.
  check_head(gpu, {{3, 2}, 2, 128, 4, bf16, true}, 2);
  check_head(gpu, {{3, 2}, 2, 128, 4, WeightFormat::kNVFP4, true});
  check_head(gpu, {{3, 2}, 2, 128, 3, bf16, true});
  check_head(gpu, {{2, 5}, 3, 32, 4, bf16, true});
  nan_stays_in_its_head(gpu);
}

}  // namespace

int main() {
  return check::run_on_gpu("gpu_kda_head", all);
}
