// Times of the CUDA ops around the matrix products at the shapes of GLM-5.3-Flash, cold: launches go through buffers
// that together are larger than the L2 cache.
//
//   bench_gpu_step_ops
#include "gpu_bench.h"
#include "kda_head.h"
#include "ops/rows.h"

namespace {

using namespace rocket;
using Floats = std::vector<float>;
using check::DeviceArray;

constexpr int kLaunches = 24;
constexpr int64_t kHidden = 4096, kStreams = 4, kHeads = 64, kDim = 128, kChannels = 3 * kHeads * kDim,
                  kTaps = 4;

// Copies of a block of random floats, one for each launch in turn.
class Rotating {
 public:
  Rotating(check::Gpu& gpu, int64_t floats, double scale = 1)
      : size_((floats + 63) / 64 * 64), copies_(copies(size_)), data_(gpu, filled(size_ * copies_, scale)) {}
  float* operator[](int i) const { return data_.data() + i % copies_ * size_; }

 private:
  static int64_t copies(int64_t size) {
    const int64_t wanted = (int64_t{40} << 20) / size + 1;  // 160 MiB, some times an L2 cache
    return wanted < kLaunches ? wanted : kLaunches;
  }
  static Floats filled(int64_t n, double scale) {
    static const Floats noise = check::normal(1 << 20);
    Floats v(static_cast<size_t>(n));
    for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(scale * noise[i % noise.size()]);
    return v;
  }
  int64_t size_, copies_;
  DeviceArray<float> data_;
};

std::string name(const char* op, int32_t rows) {
  return std::string(op) + ", rows " + std::to_string(rows);
}

void hyper(check::Gpu& gpu, int32_t rows, double rate) {
  const int64_t flat = kStreams * kHidden, outputs = kStreams * (kStreams + 2);
  const Rotating x(gpu, rows * flat), fn(gpu, outputs * flat / 2), block(gpu, rows * kHidden);
  const Rotating small(gpu, 4096);
  const DeviceArray<float> y(gpu, rows * kHidden), post(gpu, check::normal(rows * kStreams, 0.1)),
      comb(gpu, check::normal(rows * kStreams * kStreams, 0.1));
  gpu.exec.tensor_cores = rows > 16;
  HyperPreParams p;
  p.rows = rows;
  p.streams = kStreams;
  p.hidden = kHidden;
  p.base = p.scale = p.norm_weight = small[0];
  p.y = y.data();
  p.post = post.data();
  p.comb = comb.data();
  const double pre = check::time_us(gpu, kLaunches, [&](int i) {
    p.x = x[i];
    p.fn = Weight{WeightFormat::kBF16, outputs, flat, fn[i]};
    gpu.ops.hyper_pre(p, gpu.exec);
  });
  check::report(name("hyper_pre", rows).c_str(), pre, 2.0 * outputs * flat + 4.0 * rows * (flat + kHidden),
                rate);
  HyperPostParams q;
  q.rows = rows;
  q.streams = kStreams;
  q.hidden = kHidden;
  q.post = post.data();
  q.comb = comb.data();
  const double after = check::time_us(gpu, kLaunches, [&](int i) {
    q.x = q.y = x[i];
    q.block = block[i];
    gpu.ops.hyper_post(q, gpu.exec);
  });
  check::report(name("hyper_post", rows).c_str(), after, 4.0 * rows * (2 * flat + kHidden), rate);
  const DeviceArray<float> next(gpu, rows * flat);
  p.next = next.data();
  const double both = check::time_us(gpu, kLaunches, [&](int i) {
    p.x = x[i];
    p.block = block[i];
    p.fn = Weight{WeightFormat::kBF16, outputs, flat, fn[i]};
    gpu.ops.hyper_pre(p, gpu.exec);
  });
  check::report(name("hyper_post and hyper_pre", rows).c_str(), both,
                2.0 * outputs * flat + 4.0 * rows * (2 * flat + 2 * kHidden), rate);
  gpu.exec.tensor_cores = false;
}

// Decode: a segment for each row; else one segment of all rows.
struct Segments {
  Segments(check::Gpu& gpu, int32_t rows, bool decode) : segment(gpu, make(rows, decode)) {}
  static std::vector<Segment> make(int32_t rows, bool decode) {
    std::vector<Segment> s;
    for (int32_t r = 0; r < rows; ++r) {
      s.push_back(decode ? Segment{r, 1, 7} : r == 0 ? Segment{0, rows, 7} : Segment{rows, 0, 0});
    }
    return s;
  }
  DeviceArray<Segment> segment;
};

// Pointers to parts of a block, `size` floats each, as many as there are segments; a set for each launch.
struct Pointers {
  Pointers(check::Gpu& gpu, const Rotating& block, int32_t rows, int32_t used, int64_t size) {
    for (int i = 0; i < kLaunches; ++i) {
      std::vector<float*> at(static_cast<size_t>(rows), nullptr);
      for (int32_t r = 0; r < used; ++r) at[static_cast<size_t>(r)] = block[i] + r * size;
      set.push_back(std::make_unique<DeviceArray<float*>>(gpu, at));
    }
  }
  std::vector<std::unique_ptr<DeviceArray<float*>>> set;
};

void kda(check::Gpu& gpu, int32_t rows, double rate) {
  const bool decode = rows <= 16;
  const int32_t used = decode ? rows : 1;
  const int64_t width = kHeads * kDim, tail = (kTaps - 1) * kChannels, state = width * kDim;
  const Segments segments(gpu, rows, decode);
  const Rotating raw(gpu, rows * kChannels), weight(gpu, kTaps * kChannels, 0.3), tails(gpu, used * tail);
  const Rotating states(gpu, used * state, 0.1), gate(gpu, rows * width, -1),
      small(gpu, rows * kHeads + 4096);
  const DeviceArray<float> out(gpu, rows * kChannels);
  const Pointers tail_of(gpu, tails, rows, used, tail), state_of(gpu, states, rows, used, state);

  KdaConvParams c;
  c.ldx = c.ldy = c.channels = kChannels;
  c.taps = kTaps;
  c.rows = c.segments = rows;
  c.segment = segments.segment.data();
  c.y = out.data();
  const double conv = check::time_us(gpu, kLaunches, [&](int i) {
    c.x = raw[i];
    c.weight = weight[i];
    c.tail = {tail_of.set[static_cast<size_t>(i)]->data(), 0};
    gpu.ops.kda_conv(c, gpu.exec);
  });
  check::report(name("kda_conv", rows).c_str(), conv,
                4.0 * (2.0 * rows * kChannels + 2.0 * used * tail + kTaps * kChannels), rate);

  KdaGatesParams g;
  g.rows = rows;
  g.heads = kHeads;
  g.head_dim = kDim;
  g.g = out.data();
  g.beta = out.data() + rows * width;
  const double gates = check::time_us(gpu, kLaunches, [&](int i) {
    g.f = gate[i];
    g.b = g.a_log = small[i];
    g.dt_bias = weight[i];
    gpu.ops.kda_gates(g, gpu.exec);
  });
  check::report(name("kda_gates", rows).c_str(), gates, 4.0 * (2.0 * rows * width + width), rate);

  const DeviceArray<float> log_decay(gpu, Floats(static_cast<size_t>(rows * width), -0.1f)),
      beta(gpu, Floats(static_cast<size_t>(rows * kHeads), 0.5f));
  KdaRecurrenceParams r;
  r.ldqkv = kChannels;
  r.g = log_decay.data();
  r.beta = beta.data();
  r.rows = r.segments = rows;
  r.heads = kHeads;
  r.head_dim = kDim;
  r.segment = segments.segment.data();
  r.o = out.data();
  const double recurrence = check::time_us(gpu, kLaunches, [&](int i) {
    r.q = raw[i];
    r.k = raw[i] + width;
    r.v = raw[i] + 2 * width;
    r.state = {state_of.set[static_cast<size_t>(i)]->data(), 0};
    gpu.ops.kda_recurrence(r, gpu.exec);
  });
  check::report(name("kda_recurrence", rows).c_str(), recurrence,
                4.0 * (2.0 * used * state + 5.0 * rows * width), rate);

  GatedNormParams n;
  n.rows = rows;
  n.heads = kHeads;
  n.head_dim = kDim;
  n.y = out.data();
  const double norm = check::time_us(gpu, kLaunches, [&](int i) {
    n.o = raw[i];
    n.gate = gate[i];
    n.weight = small[i];
    gpu.ops.gated_norm(n, gpu.exec);
  });
  check::report(name("gated_norm", rows).c_str(), norm, 4.0 * 3.0 * rows * width, rate);
}

// All between the projections and the output product of a KDA layer in decode, in one kernel and op by op: streams of
// one row each, or one stream of all rows.
void kda_head(check::Gpu& gpu, int32_t rows, bool decode, double rate) {
  const int32_t used = decode ? rows : 1;
  const check::HeadCase c{{rows}, kHeads, kDim, kTaps, WeightFormat::kBF16, true};
  const int64_t width = c.width();
  const Segments segments(gpu, rows, decode);
  const Rotating raw(gpu, rows * kChannels), conv(gpu, kTaps * kChannels, 0.3), tails(gpu, used * c.tail()),
      states(gpu, used * c.state(), 0.1), low(gpu, 2 * rows * kDim), weight(gpu, width * kDim),
      small(gpu, width);
  const DeviceArray<float> room(gpu, rows * (kChannels + 3 * width + kHeads));
  const Pointers tail_of(gpu, tails, rows, used, c.tail()), state_of(gpu, states, rows, used, c.state());
  const auto params = [&](int i) {
    float* const f = room.data() + rows * kChannels;
    const char* const w = reinterpret_cast<const char*>(weight[i]);
    const Weight f_b{WeightFormat::kBF16, width, kDim, w},
        g_b{WeightFormat::kBF16, width, kDim, w + 2 * width * kDim};
    return check::head_params(c,
                              {raw[i],
                               low[i],
                               low[i] + rows * kDim,
                               conv[i],
                               small[i],
                               small[i],
                               small[i],
                               f_b,
                               g_b,
                               room.data(),
                               f,
                               f + rows * width,
                               f + 3 * rows * width,
                               f + 2 * rows * width,
                               segments.segment.data(),
                               rows,
                               tail_of.set[static_cast<size_t>(i)]->data(),
                               state_of.set[static_cast<size_t>(i)]->data(),
                               nullptr,
                               nullptr},
                              rows);
  };
  const double bytes = 4.0 * (2.0 * used * (c.state() + c.tail()) + rows * (kChannels + 2.0 * kDim + width) +
                              width * kDim + kTaps * kChannels);
  const std::string what = decode ? "" : ", one stream";
  const double whole = check::time_us(gpu, kLaunches, [&](int i) { gpu.ops.kda_head(params(i), gpu.exec); });
  check::report((name("kda_head", rows) + what).c_str(), whole, bytes, rate);
  const double steps =
      check::time_us(gpu, kLaunches, [&](int i) { check::head_step_by_step(gpu.ops, params(i), gpu.exec); });
  check::report((name("kda_head op by op", rows) + what).c_str(), steps, bytes, rate);
}

void all(check::Gpu& gpu) {
  const double rate = check::read_rate(gpu);
  std::printf("streaming read %.1f GB/s\n", rate * 1e-9);
  for (const int32_t rows : {1, 8, 512}) {
    hyper(gpu, rows, rate);
    kda(gpu, rows, rate);
  }
  for (const int32_t rows : {1, 2, 4, 8, 16}) {
    kda_head(gpu, rows, true, rate);
    if (rows > 1) kda_head(gpu, rows, false, rate);
  }
  check::expect(true, "measured");
}

}  // namespace

int main() {
  return check::run_on_gpu("bench_gpu_step_ops", all);
}
