// CUDA KDA against the CPU's: convolution and its tail, gates, recurrence with state and checkpoints, gated norm; a row's
// bits whatever the number of rows.
#include <algorithm>
#include <numeric>

#include "gpu_check.h"
#include "gpu_kda.h"
#include "ops_check.h"

namespace {

using namespace rocket;
using check::blocks;
using check::Blocks;
using check::Call;
using check::chunked;
using check::DeviceArray;
using check::Floats;
using check::gather;
using check::poisoned;
using check::scatter;
using check::text;
using check::whole;
using check::with_empty;

struct Result {
  Floats out, state, checkpoint;
};

void compare_bits(const std::string& what, const Result& a, const Result& b) {
  const auto size = [](const Floats& v) { return static_cast<int64_t>(v.size()); };
  check::same_bits(what + ": out", a.out.data(), b.out.data(), size(b.out));
  check::same_bits(what + ": state", a.state.data(), b.state.data(), size(b.state));
  check::same_bits(what + ": checkpoints", a.checkpoint.data(), b.checkpoint.data(), size(b.checkpoint));
}

// --- convolution ---

struct ConvCase {
  std::vector<int32_t> lengths;
  int32_t channels, taps, extra;
  int64_t rows() const { return std::accumulate(lengths.begin(), lengths.end(), int64_t{0}); }
  int64_t tail() const { return static_cast<int64_t>(taps - 1) * channels; }
};

struct ConvInputs {
  Floats x, w, tail;
};

// A checkpoint after every row but each third.
bool conv_keeps(int32_t row) {
  return row % 3 != 2;
}

Result conv_gpu(check::Gpu& gpu, const ConvCase& c, const ConvInputs& in, const std::vector<Call>& calls,
                bool checkpoints, const std::string& what) {
  const int64_t width = c.channels, ld = width + c.extra;
  const DeviceArray<float> w(gpu, in.w), tail(gpu, in.tail), saved(gpu, c.rows() * c.tail());
  Result result{poisoned(c.rows() * width), {}, {}};
  for (const Call& call : calls) {
    const int empty = call.source.size() % 2 ? 3 : 0;
    const auto rows = static_cast<int32_t>(call.source.size());
    const Blocks b = blocks(call, tail.data(), c.tail(), saved.data(), empty, conv_keeps);
    const DeviceArray<float> x(gpu, gather(in.x, call, width, ld)), y(gpu, rows * ld);
    const DeviceArray<Segment> segment(gpu, with_empty(call, empty));
    const DeviceArray<float*> tails(gpu, b.state), kept(gpu, b.checkpoint);
    KdaConvParams p;
    p.x = x.data();
    p.ldx = p.ldy = ld;
    p.weight = w.data();
    p.channels = c.channels;
    p.taps = c.taps;
    p.rows = rows;
    p.segment = segment.data();
    p.segments = static_cast<int32_t>(segment.count());
    p.tail = {tails.data(), 0};
    if (checkpoints) p.checkpoint = {kept.data(), 0};
    p.y = y.data();
    gpu.ops.kda_conv(p, gpu.exec);
    scatter(y.get(), call, width, ld, result.out, what);
    y.check(what);
  }
  result.state = tail.get();
  result.checkpoint = saved.get();
  tail.check(what + " tail");
  saved.check(what + " checkpoints");
  return result;
}

Result conv_cpu(check::Gpu& gpu, const ConvCase& c, const ConvInputs& in) {
  const Call call = whole(c.lengths);
  Result result{poisoned(c.rows() * c.channels), in.tail, poisoned(c.rows() * c.tail())};
  const Blocks b = blocks(call, result.state.data(), c.tail(), result.checkpoint.data(), 0, conv_keeps);
  KdaConvParams p;
  p.x = in.x.data();
  p.ldx = p.ldy = c.channels;
  p.weight = in.w.data();
  p.channels = c.channels;
  p.taps = c.taps;
  p.rows = static_cast<int32_t>(c.rows());
  p.segment = call.segment.data();
  p.segments = static_cast<int32_t>(call.segment.size());
  p.tail = {b.state.data(), 0};
  p.checkpoint = {b.checkpoint.data(), 0};
  p.y = result.out.data();
  cpu_ops().kda_conv(p, gpu.cpu.exec);
  return result;
}

void check_conv(check::Gpu& gpu, const ConvCase& c) {
  if (!gpu.takes_case()) return;
  const std::string what =
      "conv C " + std::to_string(c.channels) + " taps " + std::to_string(c.taps) + " " + text(c.lengths);
  const auto streams = static_cast<int64_t>(c.lengths.size());
  const ConvInputs in{check::normal(c.rows() * c.channels),
                      check::normal(static_cast<int64_t>(c.taps) * c.channels),
                      check::normal(streams * c.tail())};
  const Result found = conv_gpu(gpu, c, in, {whole(c.lengths)}, true, what);
  const Result expected = conv_cpu(gpu, c, in);
  // One rounding a tap, then exp (two units, scaled by its argument of up to about 6), addition, division, product; on
  // each side.
  check::close(what, found.out.data(), expected.out.data(), c.rows() * c.channels,
               2 * check::rounding(c.taps + 9));
  check::same_bits(what + ": tail", found.state.data(), expected.state.data(), streams * c.tail());
  check::same_bits(what + ": checkpoints", found.checkpoint.data(), expected.checkpoint.data(),
                   c.rows() * c.tail());
  for (const int32_t chunk : {1, 2, 3, 16}) {
    compare_bits(what + " in chunks of " + std::to_string(chunk), found,
                 conv_gpu(gpu, c, in, chunked(c.lengths, chunk), true, what));
  }
  const Result without = conv_gpu(gpu, c, in, {whole(c.lengths)}, false, what);
  check::same_bits(what + " without checkpoints", without.state.data(), found.state.data(),
                   streams * c.tail());
  check::expect(std::all_of(without.checkpoint.begin(), without.checkpoint.end(),
                            [](float x) { return std::isnan(x); }),
                what + ": no checkpoint that nobody asked for");
}

// --- gates ---

void check_gates(check::Gpu& gpu, int32_t rows, int32_t heads, int32_t dim, bool bounded) {
  if (!gpu.takes_case()) return;
  const std::string what = std::string("gates ") + (bounded ? "bounded" : "softplus") + " rows " +
                           std::to_string(rows) + " heads " + std::to_string(heads) + " D " +
                           std::to_string(dim);
  const int64_t width = static_cast<int64_t>(heads) * dim;
  Floats f = check::normal(rows * width, 4.0);
  const Floats bias = check::normal(width), b = check::normal(rows * heads, 2.0),
               a_log = check::normal(heads);
  f[0] = 60.0f;  // softplus takes its argument as it is
  f[static_cast<size_t>(width) - 1] = -110.0f;
  const DeviceArray<float> df(gpu, f), db(gpu, b), dbias(gpu, bias), da(gpu, a_log);
  const DeviceArray<float> g(gpu, rows * width), beta(gpu, rows * heads);
  KdaGatesParams p;
  p.f = df.data();
  p.b = db.data();
  p.dt_bias = dbias.data();
  p.a_log = da.data();
  p.bounded = bounded;
  p.lower_bound = -5.0f;
  p.rows = rows;
  p.heads = heads;
  p.head_dim = dim;
  p.g = g.data();
  p.beta = beta.data();
  gpu.ops.kda_gates(p, gpu.exec);
  const Floats found = g.get(), strength = beta.get();
  g.check(what);
  beta.check(what + " beta");
  for (int32_t r = 0; r < rows; ++r) {  // row by row, in place
    KdaGatesParams one = p;
    one.rows = 1;
    one.f = one.g = df.data() + r * width;
    one.b = one.beta = db.data() + r * heads;
    gpu.ops.kda_gates(one, gpu.exec);
  }
  check::same_bits(what + ", row by row in place", df.get().data(), found.data(), rows * width);
  check::same_bits(what + ": beta, row by row in place", db.get().data(), strength.data(), rows * heads);

  Floats expected = poisoned(rows * width), expected_beta = poisoned(rows * heads);
  p.f = f.data();
  p.b = b.data();
  p.dt_bias = bias.data();
  p.a_log = a_log.data();
  p.g = expected.data();
  p.beta = expected_beta.data();
  cpu_ops().kda_gates(p, gpu.cpu.exec);
  // As in the CPU's test, on each side: the slope of sigmoid damps what its argument is off; softplus has the relative
  // errors of exp, log1p and a product.
  check::close(what, found.data(), expected.data(), rows * width, 2 * check::rounding(bounded ? 6 : 4));
  check::close(what + ": beta", strength.data(), expected_beta.data(), rows * heads, 2 * check::rounding(4));
}

// --- recurrence ---

struct RecurrenceCase {
  std::vector<int32_t> lengths;
  int32_t heads, dim, extra;
  int64_t rows() const { return std::accumulate(lengths.begin(), lengths.end(), int64_t{0}); }
  int64_t width() const { return static_cast<int64_t>(heads) * dim; }
  int64_t state() const { return width() * dim; }
};

struct RecurrenceInputs {
  explicit RecurrenceInputs(const RecurrenceCase& c)
      : q(check::normal(c.rows() * c.width())),
        k(check::normal(c.rows() * c.width())),
        v(check::normal(c.rows() * c.width())),
        g(check::normal(c.rows() * c.width())),
        beta(check::normal(c.rows() * c.heads)),
        state(check::normal(static_cast<int64_t>(c.lengths.size()) * c.state(), 0.3)) {
    // Log-decays between -5 and 0, most of them near 0 as in a model that remembers.
    for (float& x : g) x = static_cast<float>(-5 * check::sigmoid(2.0 * x - 4.0));
    for (float& x : beta) x = static_cast<float>(check::sigmoid(x));
  }
  Floats q, k, v, g, beta, state;
};

// Checkpoints of some rows: whole states are large.
bool recurrence_keeps(int32_t row) {
  return row % 5 == 1;
}

Result recurrence_gpu(check::Gpu& gpu, const RecurrenceCase& c, const RecurrenceInputs& in,
                      const std::vector<Call>& calls, bool checkpoints, const std::string& what) {
  const int64_t width = c.width(), ld = width + c.extra;
  const DeviceArray<float> state(gpu, in.state), saved(gpu, c.rows() * c.state());
  Result result{poisoned(c.rows() * width), {}, {}};
  for (const Call& call : calls) {
    const int empty = call.source.size() % 2 ? 2 : 0;
    const auto rows = static_cast<int32_t>(call.source.size());
    const Blocks b = blocks(call, state.data(), c.state(), saved.data(), empty, recurrence_keeps);
    const DeviceArray<float> q(gpu, gather(in.q, call, width, ld)), k(gpu, gather(in.k, call, width, ld)),
        v(gpu, gather(in.v, call, width, ld)), g(gpu, gather(in.g, call, width, width)),
        beta(gpu, gather(in.beta, call, c.heads, c.heads)), o(gpu, rows * width);
    const DeviceArray<Segment> segment(gpu, with_empty(call, empty));
    const DeviceArray<float*> states(gpu, b.state), kept(gpu, b.checkpoint);
    KdaRecurrenceParams p;
    p.q = q.data();
    p.k = k.data();
    p.v = v.data();
    p.ldqkv = ld;
    p.g = g.data();
    p.beta = beta.data();
    p.rows = rows;
    p.heads = c.heads;
    p.head_dim = c.dim;
    p.segment = segment.data();
    p.segments = static_cast<int32_t>(segment.count());
    p.state = {states.data(), 0};
    if (checkpoints) p.checkpoint = {kept.data(), 0};
    p.o = o.data();
    gpu.ops.kda_recurrence(p, gpu.exec);
    check::expect(gpu.scratch.used() == 0, what + ": gives its scratch back");
    scatter(o.get(), call, width, width, result.out, what);
    o.check(what);
  }
  result.state = state.get();
  result.checkpoint = saved.get();
  state.check(what + " state");
  saved.check(what + " checkpoints");
  return result;
}

Result recurrence_cpu(check::Gpu& gpu, const RecurrenceCase& c, const RecurrenceInputs& in) {
  const Call call = whole(c.lengths);
  Result result{poisoned(c.rows() * c.width()), in.state, poisoned(c.rows() * c.state())};
  const Blocks b =
      blocks(call, result.state.data(), c.state(), result.checkpoint.data(), 0, recurrence_keeps);
  KdaRecurrenceParams p;
  p.q = in.q.data();
  p.k = in.k.data();
  p.v = in.v.data();
  p.ldqkv = c.width();
  p.g = in.g.data();
  p.beta = in.beta.data();
  p.rows = static_cast<int32_t>(c.rows());
  p.heads = c.heads;
  p.head_dim = c.dim;
  p.segment = call.segment.data();
  p.segments = static_cast<int32_t>(call.segment.size());
  p.state = {b.state.data(), 0};
  p.checkpoint = {b.checkpoint.data(), 0};
  p.o = result.out.data();
  cpu_ops().kda_recurrence(p, gpu.cpu.exec);
  return result;
}

void check_recurrence(check::Gpu& gpu, const RecurrenceCase& c) {
  if (!gpu.takes_case()) return;
  const std::string what =
      "recurrence heads " + std::to_string(c.heads) + " D " + std::to_string(c.dim) + " " + text(c.lengths);
  const RecurrenceInputs in(c);
  const Result found = recurrence_gpu(gpu, c, in, {whole(c.lengths)}, true, what);
  const Result expected = recurrence_cpu(gpu, c, in);
  const auto size = [](const Floats& v) { return static_cast<int64_t>(v.size()); };
  // A state element takes three roundings a row, most of them forgotten again by the decay and the delta rule; what a row
  // reads and writes back is a sum over Dk, one rounding a term. On each side.
  const double longest = *std::max_element(c.lengths.begin(), c.lengths.end());
  const double limit = 2 * check::rounding(c.dim + 3 * std::min(longest, 64.0));
  check::close(what + ": out", found.out.data(), expected.out.data(), size(found.out), limit);
  check::close(what + ": state", found.state.data(), expected.state.data(), size(found.state), limit);
  check::close(what + ": checkpoints", found.checkpoint.data(), expected.checkpoint.data(),
               size(found.checkpoint), limit);
  for (const int32_t chunk : {1, 3, 40}) {
    compare_bits(what + " in chunks of " + std::to_string(chunk), found,
                 recurrence_gpu(gpu, c, in, chunked(c.lengths, chunk), true, what));
  }
  const Result without = recurrence_gpu(gpu, c, in, {whole(c.lengths)}, false, what);
  check::same_bits(what + " without checkpoints", without.state.data(), found.state.data(),
                   size(found.state));
  check::expect(std::all_of(without.checkpoint.begin(), without.checkpoint.end(),
                            [](float x) { return std::isnan(x); }),
                what + ": no checkpoint that nobody asked for");
}

void nan_stays_in_its_stream(check::Gpu& gpu) {
  const RecurrenceCase c{{6, 6, 6}, 2, 16, 0};
  RecurrenceInputs in(c);
  in.v[(6 + 2) * 32 + 5] = NAN;  // stream 1, row 2, head 0, column 5
  const Result found = recurrence_gpu(gpu, c, in, {whole(c.lengths)}, true, "NaN");
  for (int64_t i = 0; i < static_cast<int64_t>(found.out.size()); ++i) {
    const bool hit = i / 32 >= 8 && i / 32 < 12 && i % 32 == 5;
    check::expect(std::isnan(found.out[static_cast<size_t>(i)]) == hit,
                  "a NaN value spoils its column of its stream from its row on");
  }
}

// --- gated norm ---

void check_gated_norm(check::Gpu& gpu, int32_t rows, int32_t heads, int32_t dim) {
  if (!gpu.takes_case()) return;
  const std::string what = "gated norm rows " + std::to_string(rows) + " heads " + std::to_string(heads) +
                           " D " + std::to_string(dim);
  const int64_t n = static_cast<int64_t>(rows) * heads * dim, width = static_cast<int64_t>(heads) * dim;
  const Floats o = check::normal(n), gate = check::normal(n, 3.0), w = check::normal(dim);
  const DeviceArray<float> d_o(gpu, o), dgate(gpu, gate), dw(gpu, w), y(gpu, n);
  GatedNormParams p;
  p.o = d_o.data();
  p.gate = dgate.data();
  p.weight = dw.data();
  p.rows = rows;
  p.heads = heads;
  p.head_dim = dim;
  p.y = y.data();
  gpu.ops.gated_norm(p, gpu.exec);
  const Floats found = y.get();
  y.check(what);
  for (int32_t r = 0; r < rows; ++r) {
    GatedNormParams one = p;
    one.rows = 1;
    one.y = d_o.data() + r * width;
    one.o = one.y;
    one.gate = dgate.data() + r * width;
    gpu.ops.gated_norm(one, gpu.exec);
  }
  check::same_bits(what + ", row by row in place", d_o.get().data(), found.data(), n);
  Floats expected = poisoned(n);
  p.o = o.data();
  p.gate = gate.data();
  p.weight = w.data();
  p.y = expected.data();
  cpu_ops().gated_norm(p, gpu.cpu.exec);
  check::close(what, found.data(), expected.data(), n, 2 * check::rounding(check::lane_steps(dim) / 4 + 12));
}

void all(check::Gpu& gpu) {
  const std::vector<int32_t> eight(8, 1), sixteen(16, 1), many(70, 1);
  for (const ConvCase& c :
       {ConvCase{{1}, 384, 4, 4}, ConvCase{eight, 24576, 4, 0}, ConvCase{{20, 3, 2, 1}, 3072, 4, 8},
        ConvCase{{64, 1, 70}, 77, 4, 3}, ConvCase{{5, 5, 1}, 300, 2, 1}, ConvCase{{11, 6}, 40, 8, 2},
        ConvCase{{2}, 16, 3, 0}, ConvCase{many, 96, 4, 0}, ConvCase{{100, 2, 1, 9}, 256, 4, 0},
        ConvCase{{3, 2, 5}, 10, 4, 2}, ConvCase{{7, 1}, 1, 5, 0}}) {
    check_conv(gpu, c);
  }
  for (const bool bounded : {true, false}) {
    check_gates(gpu, 1, 64, 128, bounded);
    check_gates(gpu, 37, 3, 24, bounded);
    check_gates(gpu, 64, 2, 40, bounded);
    check_gates(gpu, 5, 3, 7, bounded);
  }
  for (const RecurrenceCase& c :
       {RecurrenceCase{{1}, 64, 128, 0}, RecurrenceCase{eight, 8, 128, 4},
        RecurrenceCase{{3, 1, 4}, 3, 128, 5}, RecurrenceCase{{64, 33}, 2, 128, 0},
        RecurrenceCase{{40, 1, 20, 2, 5}, 3, 64, 5}, RecurrenceCase{{9, 9}, 5, 8, 1},
        RecurrenceCase{{33, 10}, 2, 40, 0}, RecurrenceCase{{4, 4, 4, 4}, 3, 24, 5},
        RecurrenceCase{{20, 15}, 1, 256, 0}, RecurrenceCase{{12, 3}, 2, 200, 3},
        RecurrenceCase{sixteen, 2, 32, 0}, RecurrenceCase{many, 2, 16, 1}, RecurrenceCase{{50}, 1, 8, 0}}) {
    check_recurrence(gpu, c);
  }
  nan_stays_in_its_stream(gpu);
  check_gated_norm(gpu, 1, 64, 128);
  check_gated_norm(gpu, 64, 8, 128);
  check_gated_norm(gpu, 64, 3, 40);
  check_gated_norm(gpu, 5, 2, 8);
  check_gated_norm(gpu, 3, 1, 300);
}

}  // namespace

int main() {
  return check::run_on_gpu("gpu_kda", all);
}
