// How long the ops around the matrix products take in one step: every layer with weights and states of its
// own, caches flushed before each step. Prints the median and the best of all steps for each op, per step, in
// microseconds.
//
//   bench_step_ops [threads] [rows of the step] [tokens of context] [steps] [0 = leave the caches warm]
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>

#include "ops_check.h"

namespace {

using namespace rocket;
using Floats = std::vector<float>;

struct Shape {
  const char* name;
  int32_t layers, hidden, kda_heads, kda_dim, heads, latent, index_heads, index_dim, experts, topk, vocab;
};

constexpr int32_t kStreams = 4, kPool = 4, kTopkPools = 512, kTaps = 4, kPageRows = 256;

struct Layer {
  std::vector<uint16_t> fn[2];  // BF16, as released
  Floats state, conv_tail, pool_tail;
  std::unique_ptr<check::Pages> latent, pooled;
};

class Times {
 public:
  template <typename F>
  void run(const char* name, F f) {
    const auto start = std::chrono::steady_clock::now();
    f();
    now_[name] += std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
  }
  void end_step() {
    double total = 0;
    for (const auto& [name, us] : now_) {
      all_[name].push_back(us);
      total += us;
    }
    all_["all of these"].push_back(total);
    now_.clear();
  }
  void print() {
    for (auto& [name, us] : all_) {
      std::sort(us.begin(), us.end());
      std::printf("  %-16s median %9.1f   best %9.1f\n", name.c_str(), us[us.size() / 2], us[0]);
    }
  }

 private:
  std::map<std::string, double> now_;
  std::map<std::string, std::vector<double>> all_;
};

struct Step {
  Step(const Shape& s, int32_t rows, int64_t context, int threads)
      : s(s),
        rows(rows),
        context(context),
        kda(s.kda_heads * s.kda_dim),
        bench(threads, 256 << 20),
        ops(cpu_ops()),
        flush(24 << 20) {
    const int64_t flat = static_cast<int64_t>(kStreams) * s.hidden;
    for (int32_t i = 0; i < s.layers; ++i) {
      Layer l;
      for (auto& fn : l.fn) fn = check::normal_bf16(24 * flat, 0.01);
      if (i % 4 != 3) {
        l.state = check::normal(static_cast<int64_t>(kda) * s.kda_dim);
        l.conv_tail = check::normal((kTaps - 1) * 3 * kda);
      } else {
        l.pool_tail = check::normal(2 * kPool * s.index_dim);
        l.latent = std::make_unique<check::Pages>(context + rows, kPageRows, s.latent);
        l.latent->fill(check::normal((context + rows) * s.latent));
        l.pooled = std::make_unique<check::Pages>((context + rows) / kPool + 1, kPageRows, s.index_dim);
        l.pooled->fill(check::normal(((context + rows) / kPool + 1) * s.index_dim));
      }
      layer.push_back(std::move(l));
    }
    x = check::normal(rows * flat);
    wide = check::normal(std::max<int64_t>(3 * kda, static_cast<int64_t>(s.heads) * s.latent) * rows);
    gates = check::normal(static_cast<int64_t>(rows) * kda);
    some = check::normal(std::max<int64_t>({flat, 4 * 3 * kda, s.experts}) * std::max(rows, 8));
    out.resize(std::max<int64_t>({3 * kda, static_cast<int64_t>(s.heads) * s.latent, flat}) * rows);
    y.resize(static_cast<int64_t>(rows) * s.hidden);
    token.resize(rows * (kTopkPools * kPool + kPool));
    count.resize(rows);
    vocabulary = check::normal(s.vocab);
    table = check::normal(1000 * s.hidden);
    segment = {0, rows, context};
  }

  void hyper(Times& t, const std::vector<uint16_t>& fn, bool post) {
    if (!post) {
      HyperPreParams p;
      p.x = x.data();
      p.rows = rows;
      p.hidden = s.hidden;
      p.fn = Weight{WeightFormat::kBF16, 24, static_cast<int64_t>(kStreams) * s.hidden, fn.data()};
      p.base = some.data();
      p.scale = some.data();
      p.norm_weight = some.data();
      p.y = y.data();
      std::vector<float> post_rows(rows * kStreams), comb_rows(rows * kStreams * kStreams);
      p.post = post_rows.data();
      p.comb = comb_rows.data();
      t.run("hyper_pre", [&] { ops.hyper_pre(p, bench.exec); });
      posts = post_rows;
      combs = comb_rows;
      return;
    }
    HyperPostParams p;
    p.x = p.y = x.data();
    p.block = y.data();
    p.post = posts.data();
    p.comb = combs.data();
    p.rows = rows;
    p.hidden = s.hidden;
    t.run("hyper_post", [&] { ops.hyper_post(p, bench.exec); });
  }

  void kda_layer(Times& t, Layer& l) {
    float* tail = l.conv_tail.data();
    float* state = l.state.data();
    KdaConvParams c;
    c.x = wide.data();
    c.ldx = c.ldy = 3 * kda;
    c.weight = some.data();
    c.channels = 3 * kda;
    c.rows = rows;
    c.segment = &segment;
    c.segments = 1;
    c.tail = {&tail, 0};
    c.y = out.data();
    t.run("kda_conv", [&] { ops.kda_conv(c, bench.exec); });
    Floats f = gates, beta(rows * s.kda_heads, 0.5f);
    KdaGatesParams g;
    g.f = g.g = f.data();
    g.b = g.beta = beta.data();
    g.dt_bias = some.data();
    g.a_log = some.data();
    g.rows = rows;
    g.heads = s.kda_heads;
    g.head_dim = s.kda_dim;
    t.run("kda_gates", [&] { ops.kda_gates(g, bench.exec); });
    Floats o(static_cast<int64_t>(rows) * kda);
    KdaRecurrenceParams r;
    r.q = out.data();
    r.k = out.data() + kda;
    r.v = out.data() + 2 * kda;
    r.ldqkv = 3 * kda;
    r.g = f.data();
    r.beta = beta.data();
    r.rows = rows;
    r.heads = s.kda_heads;
    r.head_dim = s.kda_dim;
    r.segment = &segment;
    r.segments = 1;
    r.state = {&state, 0};
    r.o = o.data();
    t.run("kda_recurrence", [&] { ops.kda_recurrence(r, bench.exec); });
    GatedNormParams n;
    n.o = o.data();
    n.gate = gates.data();
    n.weight = some.data();
    n.rows = rows;
    n.heads = s.kda_heads;
    n.head_dim = s.kda_dim;
    n.y = o.data();
    t.run("gated_norm", [&] { ops.gated_norm(n, bench.exec); });
  }

  void mla_layer(Times& t, Layer& l) {
    float* tail = l.pool_tail.data();
    check::Tables pooled, latent;
    pooled.push_back(l.pooled->view());
    latent.push_back(l.latent->view());
    NormParams norms;
    norms.rows = rows;
    norms.part_count = 3;
    for (NormPart& n : norms.part) {
      n.x = some.data();
      n.dim = s.index_dim;
      n.ldx = n.ldy = s.index_dim;
      n.weight = vocabulary.data();
      n.y = out.data();
    }
    norms.part[2].bias = vocabulary.data();
    t.run("norm", [&] { ops.norm(norms, bench.exec); });
    PoolUpdateParams u;
    u.k = u.gate = gates.data();
    u.ldk = u.ldgate = std::min<int64_t>(s.index_dim, kda);
    u.ape = some.data();
    u.dim = s.index_dim;
    u.segment = &segment;
    u.segments = 1;
    u.tail = {&tail, 0};
    u.pooled = pooled.view();
    u.rows = rows;
    t.run("pool_update", [&] { ops.pool_update(u, bench.exec); });
    IndexSelectParams i;
    i.q = some.data();
    i.ldq = 0;
    i.head_weight = some.data();
    i.scale = 0.1f;
    i.rows = rows;
    i.heads = s.index_heads;
    i.dim = s.index_dim;
    i.topk = kTopkPools;
    i.segment = &segment;
    i.segments = 1;
    i.pooled = pooled.view();
    i.token = token.data();
    i.ldtoken = kTopkPools * kPool + kPool - 1;
    i.count = count.data();
    t.run("index_select", [&] { ops.index_select(i, bench.exec); });
    LatentAppendParams a;
    a.latent = some.data();
    a.ld = s.latent;
    a.segment = &segment;
    a.segments = 1;
    a.cache = latent.view();
    a.rows = rows;
    t.run("latent_append", [&] { ops.latent_append(a, bench.exec); });
    SparseMlaParams m;
    m.q = wide.data();
    m.ldq = m.ldo = static_cast<int64_t>(s.heads) * s.latent;
    m.rows = rows;
    m.heads = s.heads;
    m.width = m.value_dim = s.latent;
    m.scale = 0.1f;
    m.token = token.data();
    m.ldtoken = i.ldtoken;
    m.count = count.data();
    m.segment = &segment;
    m.segments = 1;
    m.cache = latent.view();
    m.o = out.data();
    t.run("sparse_mla", [&] { ops.sparse_mla(m, bench.exec); });
  }

  void route(Times& t) {
    std::vector<int32_t> id(rows * s.topk);
    Floats weight(rows * s.topk);
    RouterParams p;
    p.logit = some.data();
    p.ld = s.experts;
    p.bias = some.data();
    p.rows = rows;
    p.experts = s.experts;
    p.topk = s.topk;
    p.id = id.data();
    p.weight = weight.data();
    t.run("router", [&] { ops.router(p, bench.exec); });
  }

  void ends(Times& t) {
    const std::vector<int32_t> tokens(rows, 7);
    EmbedParams e;
    e.table = Weight{WeightFormat::kF32, 1000, s.hidden, table.data()};
    e.token = tokens.data();
    e.rows = rows;
    e.streams = kStreams;
    e.x = x.data();
    t.run("embed", [&] { ops.embed(e, bench.exec); });
    const int32_t last = rows - 1;
    HyperHeadParams h;
    h.x = x.data();
    h.row_index = &last;
    h.rows = 1;
    h.hidden = s.hidden;
    h.norm_weight = some.data();
    h.y = y.data();
    t.run("hyper_head", [&] { ops.hyper_head(h, bench.exec); });
    const SamplingParams greedy;
    const uint64_t counter = 0;
    int32_t drawn = 0;
    SampleParams p{vocabulary.data(), s.vocab, 1, s.vocab, &greedy, &counter, &drawn};
    t.run("sample", [&] { ops.sample(p, bench.exec); });
  }

  void run(Times& t, bool cold) {
    for (size_t i = 0; cold && i < flush.size(); i += 8) flush[i] += 1;
    ends(t);
    for (size_t i = 0; i < layer.size(); ++i) {
      Layer& l = layer[i];
      hyper(t, l.fn[0], false);
      l.latent ? mla_layer(t, l) : kda_layer(t, l);
      hyper(t, l.fn[0], true);
      hyper(t, l.fn[1], false);
      if (i >= 3) route(t);
      hyper(t, l.fn[1], true);
    }
    t.end_step();
  }

  const Shape& s;
  int32_t rows;
  int64_t context;
  int64_t kda;
  check::Bench bench;
  const OpTable& ops;
  Floats flush;
  std::vector<Layer> layer;
  Floats x, wide, gates, some, out, y, vocabulary, table, posts, combs;
  std::vector<int32_t> token, count;
  Segment segment;
};

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int i, int fallback) { return argc > i ? std::atoi(argv[i]) : fallback; };
  const int threads = number(1, 0), rows = number(2, 1), context = number(3, 256), steps = number(4, 200);
  const Shape shapes[] = {{"hidden 256", 9, 256, 4, 64, 4, 64, 4, 64, 32, 4, 4096},
                          {"hidden 1024", 12, 1024, 8, 128, 16, 128, 8, 128, 64, 8, 32000}};
  for (const Shape& shape : shapes) {
    Step step(shape, rows, context, threads);
    Times times;
    for (int i = 0; i < steps; ++i) step.run(times, number(5, 1) != 0);
    std::printf("%s: %d layers, %d rows after %d tokens, %s, %d threads; microseconds a step\n", shape.name,
                shape.layers, rows, context, cpu_ops_isa(), step.bench.pool.threads());
    times.print();
  }
}
