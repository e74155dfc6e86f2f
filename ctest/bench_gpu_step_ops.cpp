// Times of the CUDA ops around the matrix products at the shapes of GLM-5.3-Flash, cold: launches go through buffers
// that together are larger than the L2 cache. Where a launch reads too little for that, its line says so.
//
//   bench_gpu_step_ops
#include "gpu_bench.h"
#include "kda_head.h"
#include "ops/rows.h"

namespace {

using namespace rocket;
using Floats = std::vector<float>;
using check::DeviceArray;
using check::Turns;

constexpr int64_t kHidden = 4096, kStreams = 4, kHeads = 64, kDim = 128, kTaps = 4, kVocab = 154880;
constexpr int64_t kFlat = kStreams * kHidden, kWidth = kHeads * kDim, kChannels = 3 * kWidth;

// Random floats for each set.
class Rotating : public check::Blocks {
 public:
  Rotating(check::Gpu& gpu, const Turns& turns, int64_t floats, double scale = 1)
      : Blocks(gpu, floats * 4, turns.sets, noise(scale)) {}

 private:
  static Floats noise(double scale) {
    static const Floats drawn = check::normal(1 << 20);
    Floats v = drawn;
    for (float& x : v) x *= static_cast<float>(scale);
    return v;
  }
};

struct Bench {
  check::Gpu& gpu;
  double rate;
  // `bytes`: what a launch reads and writes.
  template <typename F>
  void time(const std::string& op, const Turns& turns, double bytes, F issue) {
    const double us = check::time_us(gpu, turns.launches, issue);
    check::report(op.c_str(), us, bytes, rate, &turns);
  }
};

std::string name(const char* op, int32_t rows) {
  return std::string(op) + ", rows " + std::to_string(rows);
}

// Rows of the whole table, none of them twice before the launches begin again.
void embed(Bench& b, int32_t rows) {
  const double read = 2.0 * rows * kHidden;
  const Turns turns(read, read, 24);
  std::vector<int32_t> tokens(static_cast<size_t>(turns.sets * rows));
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * 7919 % kVocab);
  const DeviceArray<int32_t> token(b.gpu, tokens);
  const check::Blocks table(b.gpu, 2 * kVocab * kHidden, 1, check::normal_bf16(1 << 20));
  const DeviceArray<float> x(b.gpu, rows * kFlat);
  EmbedParams p;
  p.table = {WeightFormat::kBF16, kVocab, kHidden, table[0]};
  p.rows = rows;
  p.streams = kStreams;
  p.x = x.data();
  b.time(name("embed", rows), turns, read + 4.0 * rows * kFlat, [&](int i) {
    p.token = token.data() + i % turns.sets * rows;
    b.gpu.ops.embed(p, b.gpu.exec);
  });
}

// Those of an MLA layer: of the latents of queries and keys, and the indexer's LayerNorm of its keys.
void norm(Bench& b, int32_t rows) {
  constexpr int32_t kDims[] = {1536, 512, 128};
  constexpr int64_t kAll = 1536 + 512 + 128;
  const Turns turns(4.0 * rows * kAll + 4.0 * (kAll + 128));
  const Rotating x(b.gpu, turns, rows * kAll), weight(b.gpu, turns, kAll + 128);
  const DeviceArray<float> y(b.gpu, rows * kAll);
  NormParams p;
  p.rows = rows;
  p.part_count = 3;
  b.time(name("norm", rows), turns, turns.read + 4.0 * rows * kAll, [&](int i) {
    int64_t at = 0;
    for (int part = 0; part < 3; ++part) {
      NormPart& n = p.part[part];
      n.dim = kDims[part];
      n.ldx = n.ldy = n.dim;
      n.x = x[i] + rows * at;
      n.y = y.data() + rows * at;
      n.weight = weight[i] + at;
      n.bias = part == 2 ? weight[i] + kAll : nullptr;
      at += n.dim;
    }
    b.gpu.ops.norm(p, b.gpu.exec);
  });
}

void hyper_head(Bench& b, int32_t rows) {
  const Turns turns(4.0 * rows * kFlat + 4.0 * kHidden);
  const Rotating x(b.gpu, turns, rows * kFlat), weight(b.gpu, turns, kHidden);
  std::vector<int32_t> rows_of_x(static_cast<size_t>(rows));
  std::iota(rows_of_x.begin(), rows_of_x.end(), 0);
  const DeviceArray<int32_t> index(b.gpu, rows_of_x);
  const DeviceArray<float> y(b.gpu, rows * kHidden);
  HyperHeadParams p;
  p.row_index = index.data();
  p.rows = rows;
  p.streams = kStreams;
  p.hidden = kHidden;
  p.y = y.data();
  b.time(name("hyper_head", rows), turns, turns.read + 4.0 * rows * kHidden, [&](int i) {
    p.x = x[i];
    p.norm_weight = weight[i];
    b.gpu.ops.hyper_head(p, b.gpu.exec);
  });
}

// With `both` the hyper_post of the block before as well.
void hyper_pre(Bench& b, int32_t rows, bool both) {
  constexpr int64_t kOutputs = kStreams * (kStreams + 2);
  const Turns turns(2.0 * kOutputs * kFlat + 4.0 * rows * (kFlat + (both ? kHidden : 0)));
  const Rotating x(b.gpu, turns, rows * kFlat), fn(b.gpu, turns, kOutputs * kFlat / 2),
      block(b.gpu, turns, both ? rows * kHidden : 1);
  const DeviceArray<float> small(b.gpu, check::normal(kHidden)), y(b.gpu, rows * kHidden),
      post(b.gpu, check::normal(rows * kStreams, 0.1)),
      comb(b.gpu, check::normal(rows * kStreams * kStreams, 0.1)), next(b.gpu, rows * kFlat);
  b.gpu.exec.tensor_cores = rows > 16;
  HyperPreParams p;
  p.rows = rows;
  p.streams = kStreams;
  p.hidden = kHidden;
  p.base = p.scale = p.norm_weight = small.data();
  p.y = y.data();
  p.post = post.data();
  p.comb = comb.data();
  if (both) p.next = next.data();
  const double written = 4.0 * rows * (kHidden + (both ? kFlat : 0));
  b.time(name(both ? "hyper_post and hyper_pre" : "hyper_pre", rows), turns, turns.read + written,
         [&](int i) {
           p.x = x[i];
           p.block = both ? block[i] : nullptr;
           p.fn = Weight{WeightFormat::kBF16, kOutputs, kFlat, fn[i]};
           b.gpu.ops.hyper_pre(p, b.gpu.exec);
         });
  b.gpu.exec.tensor_cores = false;
}

void hyper_post(Bench& b, int32_t rows) {
  const Turns turns(4.0 * rows * (kFlat + kHidden));
  const Rotating x(b.gpu, turns, rows * kFlat), block(b.gpu, turns, rows * kHidden);
  const DeviceArray<float> post(b.gpu, check::normal(rows * kStreams, 0.1)),
      comb(b.gpu, check::normal(rows * kStreams * kStreams, 0.1));
  b.gpu.exec.tensor_cores = rows > 16;
  HyperPostParams q;
  q.rows = rows;
  q.streams = kStreams;
  q.hidden = kHidden;
  q.post = post.data();
  q.comb = comb.data();
  b.time(name("hyper_post", rows), turns, turns.read + 4.0 * rows * kFlat, [&](int i) {
    q.x = q.y = x[i];
    q.block = block[i];
    b.gpu.ops.hyper_post(q, b.gpu.exec);
  });
  b.gpu.exec.tensor_cores = false;
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

// Pointers to parts of a block, `size` floats each, as many as there are segments; an array for each set.
class Pointers {
 public:
  Pointers(check::Gpu& gpu, const Rotating& block, const Turns& turns, int32_t rows, int32_t used,
           int64_t size)
      : rows_(rows), sets_(turns.sets), at_(gpu, make(block, turns.sets, rows, used, size)) {}
  float* const* operator[](int i) const { return at_.data() + i % sets_ * rows_; }

 private:
  static std::vector<float*> make(const Rotating& block, int sets, int32_t rows, int32_t used, int64_t size) {
    std::vector<float*> at(static_cast<size_t>(sets * rows), nullptr);
    for (int i = 0; i < sets; ++i) {
      for (int32_t r = 0; r < used; ++r) at[static_cast<size_t>(i * rows + r)] = block[i] + r * size;
    }
    return at;
  }
  int32_t rows_;
  int sets_;
  DeviceArray<float*> at_;
};

void kda_conv(Bench& b, int32_t rows) {
  const bool decode = rows <= 16;
  const int32_t used = decode ? rows : 1;
  const int64_t tail = (kTaps - 1) * kChannels;
  const Segments segments(b.gpu, rows, decode);
  const Turns turns(4.0 * (rows * kChannels + used * tail + kTaps * kChannels));
  const Rotating raw(b.gpu, turns, rows * kChannels), weight(b.gpu, turns, kTaps * kChannels, 0.3),
      tails(b.gpu, turns, used * tail);
  const Pointers tail_of(b.gpu, tails, turns, rows, used, tail);
  const DeviceArray<float> out(b.gpu, rows * kChannels);
  KdaConvParams c;
  c.ldx = c.ldy = c.channels = kChannels;
  c.taps = kTaps;
  c.rows = c.segments = rows;
  c.segment = segments.segment.data();
  c.y = out.data();
  b.time(name("kda_conv", rows), turns, turns.read + 4.0 * (rows * kChannels + used * tail), [&](int i) {
    c.x = raw[i];
    c.weight = weight[i];
    c.tail = {tail_of[i], 0};
    b.gpu.ops.kda_conv(c, b.gpu.exec);
  });
}

void kda_gates(Bench& b, int32_t rows) {
  const Turns turns(4.0 * (rows * kWidth + kWidth));
  const Rotating gate(b.gpu, turns, rows * kWidth, -1), bias(b.gpu, turns, kWidth, 0.3);
  const DeviceArray<float> small(b.gpu, check::normal(rows * kHeads + kHeads)),
      out(b.gpu, rows * (kWidth + kHeads));
  KdaGatesParams g;
  g.rows = rows;
  g.heads = kHeads;
  g.head_dim = kDim;
  g.b = g.a_log = small.data();
  g.g = out.data();
  g.beta = out.data() + rows * kWidth;
  b.time(name("kda_gates", rows), turns, turns.read + 4.0 * rows * kWidth, [&](int i) {
    g.f = gate[i];
    g.dt_bias = bias[i];
    b.gpu.ops.kda_gates(g, b.gpu.exec);
  });
}

void kda_recurrence(Bench& b, int32_t rows) {
  const bool decode = rows <= 16;
  const int32_t used = decode ? rows : 1;
  const int64_t state = kWidth * kDim;
  const Segments segments(b.gpu, rows, decode);
  // Log decays and betas are the same for all launches.
  const Turns turns(4.0 * (used * state + rows * kChannels));
  const Rotating raw(b.gpu, turns, rows * kChannels), states(b.gpu, turns, used * state, 0.1);
  const Pointers state_of(b.gpu, states, turns, rows, used, state);
  const DeviceArray<float> log_decay(b.gpu, Floats(static_cast<size_t>(rows * kWidth), -0.1f)),
      beta(b.gpu, Floats(static_cast<size_t>(rows * kHeads), 0.5f)), out(b.gpu, rows * kChannels);
  KdaRecurrenceParams r;
  r.ldqkv = kChannels;
  r.g = log_decay.data();
  r.beta = beta.data();
  r.rows = r.segments = rows;
  r.heads = kHeads;
  r.head_dim = kDim;
  r.segment = segments.segment.data();
  r.o = out.data();
  b.time(name("kda_recurrence", rows), turns, 4.0 * (2.0 * used * state + 5.0 * rows * kWidth), [&](int i) {
    r.q = raw[i];
    r.k = raw[i] + kWidth;
    r.v = raw[i] + 2 * kWidth;
    r.state = {state_of[i], 0};
    b.gpu.ops.kda_recurrence(r, b.gpu.exec);
  });
}

void gated_norm(Bench& b, int32_t rows) {
  const Turns turns(8.0 * rows * kWidth);
  const Rotating raw(b.gpu, turns, rows * kWidth), gate(b.gpu, turns, rows * kWidth, -1);
  const DeviceArray<float> small(b.gpu, check::normal(kDim)), out(b.gpu, rows * kWidth);
  GatedNormParams n;
  n.rows = rows;
  n.heads = kHeads;
  n.head_dim = kDim;
  n.weight = small.data();
  n.y = out.data();
  b.time(name("gated_norm", rows), turns, turns.read + 4.0 * rows * kWidth, [&](int i) {
    n.o = raw[i];
    n.gate = gate[i];
    b.gpu.ops.gated_norm(n, b.gpu.exec);
  });
}

// All between the projections and the output product of a KDA layer in decode, in one kernel and op by op: streams of
// one row each, or one stream of all rows.
void kda_head(Bench& b, int32_t rows, bool decode) {
  check::Gpu& gpu = b.gpu;
  const int32_t used = decode ? rows : 1;
  const check::HeadCase c{{rows}, kHeads, kDim, kTaps, WeightFormat::kBF16, true};
  const int64_t width = c.width();
  const Segments segments(gpu, rows, decode);
  const double kept = 4.0 * used * (c.state() + c.tail());
  const Turns turns(kept +
                    4.0 * (rows * (kChannels + 2.0 * kDim) + width * kDim + kTaps * kChannels + width));
  const Rotating raw(gpu, turns, rows * kChannels), conv(gpu, turns, kTaps * kChannels, 0.3),
      tails(gpu, turns, used * c.tail()), states(gpu, turns, used * c.state(), 0.1),
      low(gpu, turns, 2 * rows * kDim), weight(gpu, turns, width * kDim), small(gpu, turns, width);
  const DeviceArray<float> room(gpu, rows * (kChannels + 3 * width + kHeads));
  const Pointers tail_of(gpu, tails, turns, rows, used, c.tail()),
      state_of(gpu, states, turns, rows, used, c.state());
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
                               tail_of[i],
                               state_of[i],
                               nullptr,
                               nullptr},
                              rows);
  };
  const double bytes = 4.0 * (2.0 * used * (c.state() + c.tail()) + rows * (kChannels + 2.0 * kDim + width) +
                              width * kDim + kTaps * kChannels);
  const std::string what = decode ? "" : ", one stream";
  b.time(name("kda_head", rows) + what, turns, bytes, [&](int i) { gpu.ops.kda_head(params(i), gpu.exec); });
  b.time(name("kda_head op by op", rows) + what, turns, bytes,
         [&](int i) { check::head_step_by_step(gpu.ops, params(i), gpu.exec); });
}

void all(check::Gpu& gpu) {
  Bench b{gpu, check::read_rate(gpu)};
  std::printf("streaming read %.1f GB/s\n", b.rate * 1e-9);
  for (const int32_t rows : {1, 8, 512}) {
    embed(b, rows);
    norm(b, rows);
    hyper_pre(b, rows, false);
    hyper_post(b, rows);
    hyper_pre(b, rows, true);
    hyper_head(b, rows);
    kda_conv(b, rows);
    kda_gates(b, rows);
    kda_recurrence(b, rows);
    gated_norm(b, rows);
  }
  for (const int32_t rows : {1, 2, 4, 8, 16}) {
    kda_head(b, rows, true);
    if (rows > 1) kda_head(b, rows, false);
  }
  check::expect(true, "measured");
}

}  // namespace

int main() {
  return check::run_on_gpu("bench_gpu_step_ops", all);
}
