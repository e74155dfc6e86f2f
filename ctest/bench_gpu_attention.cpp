// Times of the CUDA ops around attention and sampling at GLM-5.3-Flash's shapes. Streams take turns, so that what a call
// reads of caches and logits is not in the L2 cache; where it reads too little for that, its line says so.
#include <set>

#include "gpu_bench.h"
#include "gpu_pages.h"

namespace {

using namespace rocket;
using check::DeviceArray;
using check::Turns;
using Floats = std::vector<float>;

constexpr int32_t kHeads = 64, kWidth = 512, kIndexHeads = 32, kIndexDim = 128, kPool = 4, kTopk = 512;
constexpr int32_t kVocab = 154880, kPageRows = 256;

struct Bench {
  check::Gpu& gpu;
  double rate;
  // `bytes`: what a call reads and writes.
  template <typename F>
  void time(const std::string& name, const Turns& turns, double bytes, F issue) {
    check::report(name.c_str(), check::time_us(gpu, turns.launches, issue), bytes, rate, &turns);
  }
};

// Sets of `streams` streams with `length` rows in pages, which all have the same values.
struct Cache {
  Cache(check::Gpu& gpu, const Turns& turns, int32_t streams, int64_t length, int32_t width, bool bf16,
        int32_t rows, int64_t position)
      : width(width),
        bf16(bf16),
        pages_each((length + kPageRows - 1) / kPageRows),
        pages(make_pages(gpu, static_cast<int>(turns.sets * streams * pages_each), width, bf16)) {
    for (int s = 0; s < turns.sets; ++s) {
      std::vector<float* const*> tables;
      std::vector<Segment> segments;
      for (int32_t i = 0; i < streams; ++i) {
        std::vector<float*> page;
        for (int64_t p = 0; p < pages_each; ++p) {
          page.push_back((*pages)[static_cast<int>((s * streams + i) * pages_each + p)]);
        }
        table.push_back(std::make_unique<DeviceArray<float*>>(gpu, page));
        tables.push_back(table.back()->data());
        segments.push_back({i * (rows / streams), rows / streams, position});
      }
      segment.push_back(std::make_unique<check::GpuSegments>(gpu, segments, tables, rows));
    }
  }
  static std::unique_ptr<check::Blocks> make_pages(check::Gpu& gpu, int count, int32_t width, bool bf16) {
    const int64_t values = int64_t{kPageRows} * width;
    if (!bf16) return std::make_unique<check::Blocks>(gpu, 4 * values, count, check::normal(values));
    return std::make_unique<check::Blocks>(gpu, 2 * values, count, check::normal_bf16(values));
  }
  const check::GpuSegments& at(int i) const { return *segment[static_cast<size_t>(i) % segment.size()]; }
  PagedParts parts(int i) const { return at(i).pages(kPageRows, width, bf16); }

  int32_t width;
  bool bf16;
  int64_t pages_each;
  std::unique_ptr<check::Blocks> pages;
  std::vector<std::unique_ptr<DeviceArray<float*>>> table;
  std::vector<std::unique_ptr<check::GpuSegments>> segment;
};

// The tokens that rows read: groups of four, some of them shared by the rows of a stream.
constexpr int64_t kTokens = 2051;
std::vector<int32_t> chosen_tokens(int32_t rows) {
  std::vector<int32_t> token(static_cast<size_t>(rows * (kTokens + 1)), 0);
  for (int32_t r = 0; r < rows; ++r) {
    for (int64_t t = 0; t < kTokens; ++t) {
      token[static_cast<size_t>(r * (kTokens + 1) + t)] = static_cast<int32_t>(t / 4 * 15 + t % 4 + r % 8);
    }
  }
  return token;
}

// Tokens of a stream that any of its rows reads.
int64_t distinct_tokens(const std::vector<int32_t>& token, int32_t rows_of_stream) {
  std::set<int32_t> seen;
  for (int32_t r = 0; r < rows_of_stream; ++r) {
    const auto first = token.begin() + r * (kTokens + 1);
    seen.insert(first, first + kTokens);
  }
  return static_cast<int64_t>(seen.size());
}

// Rows of as many streams for decode, of one stream for prefill.
void attention(Bench& b, int32_t rows, bool bf16, bool tensor_cores) {
  constexpr int64_t kContext = 8192;
  const int32_t streams = rows <= 16 ? rows : 1;
  const std::vector<int32_t> token = chosen_tokens(rows);
  const double row_bytes = kWidth * (bf16 ? 2.0 : 4.0);
  const double read = streams * static_cast<double>(distinct_tokens(token, rows / streams)) * row_bytes;
  const Turns turns(read, streams * kContext * row_bytes, rows <= 16 ? 40 : 4);
  const Cache cache(b.gpu, turns, streams, kContext, kWidth, bf16, rows, kContext - rows / streams);
  const DeviceArray<int32_t> list(b.gpu, token),
      count(b.gpu, std::vector<int32_t>(static_cast<size_t>(rows), kTokens));
  const DeviceArray<float> q(b.gpu, check::normal(int64_t{rows} * kHeads * kWidth)),
      o(b.gpu, int64_t{rows} * kHeads * kWidth), latent(b.gpu, check::normal(int64_t{rows} * kWidth));
  SparseMlaParams p;
  p.q = q.data();
  p.ldq = p.ldo = int64_t{kHeads} * kWidth;
  p.rows = rows;
  p.heads = kHeads;
  p.width = p.value_dim = kWidth;
  p.scale = 1.0f / 16;
  p.token = list.data();
  p.ldtoken = kTokens + 1;
  p.count = count.data();
  p.o = o.data();
  b.gpu.exec.tensor_cores = tensor_cores;
  const std::string what = std::string(bf16 ? " bf16" : " f32") + " rows " + std::to_string(rows);
  const double moved = rows * (kTokens * kWidth * (bf16 ? 2.0 : 4.0) + 2.0 * kHeads * kWidth * 4);
  b.time("sparse_mla 2051 tokens" + what + (tensor_cores ? " tensor cores" : ""), turns, moved, [&](int i) {
    p.segment = cache.at(i).data();
    p.segments = cache.at(i).count();
    p.cache = cache.parts(i);
    b.gpu.ops.sparse_mla(p, b.gpu.exec);
  });
  b.gpu.exec.tensor_cores = false;
  LatentAppendParams append;
  append.latent = latent.data();
  append.ld = kWidth;
  append.rows = rows;
  // It reads the new latents only, always the same.
  const Turns few = turns.reading(0);
  b.time("latent_append" + what, few, rows * kWidth * (bf16 ? 6.0 : 8.0), [&](int i) {
    append.segment = cache.at(i).data();
    append.segments = cache.at(i).count();
    append.cache = cache.parts(i);
    b.gpu.ops.latent_append(append, b.gpu.exec);
  });
}

void indexer(Bench& b, int32_t rows, int64_t context, int64_t max_context) {
  const int32_t streams = rows <= 16 ? rows : 1;
  const int64_t pools = context / kPool;
  const double bytes = 4.0 * streams * static_cast<double>(pools) * kIndexDim;
  const double scored = pools > kTopk ? bytes : 0;  // else all pools are chosen unseen
  const Turns turns(scored, bytes, 40);
  const Cache cache(b.gpu, turns, streams, pools + 1, kIndexDim, false, rows, context - rows / streams);
  const int64_t size = 2 * kPool * kIndexDim;
  const DeviceArray<float> q(b.gpu, check::normal(int64_t{rows} * kIndexHeads * kIndexDim)),
      weight(b.gpu, check::normal(int64_t{rows} * kIndexHeads)),
      k(b.gpu, check::normal(int64_t{rows} * kIndexDim)), tail(b.gpu, check::normal(streams * size)),
      ape(b.gpu, check::normal(kPool * kIndexDim));
  const int64_t ldtoken = kTopk * kPool + kPool;
  const DeviceArray<int32_t> token(b.gpu, rows * ldtoken), count(b.gpu, rows);
  IndexSelectParams p;
  p.q = q.data();
  p.ldq = int64_t{kIndexHeads} * kIndexDim;
  p.head_weight = weight.data();
  p.ldw = kIndexHeads;
  p.head_weight_scale = 0.17677669f;
  p.scale = 0.088388348f;
  p.rows = rows;
  p.heads = kIndexHeads;
  p.dim = kIndexDim;
  p.pool = kPool;
  p.topk = kTopk;
  p.max_pools = static_cast<int32_t>(max_context / kPool);
  p.token = token.data();
  p.ldtoken = ldtoken;
  p.count = count.data();
  const std::string what = " rows " + std::to_string(rows) + " context " + std::to_string(context);
  b.time("index_select" + what, turns, scored + rows * (kIndexHeads * kIndexDim * 4.0 + kTopk * kPool * 4.0),
         [&](int i) {
           p.segment = cache.at(i).data();
           p.segments = cache.at(i).count();
           p.pooled = cache.parts(i);
           b.gpu.ops.index_select(p, b.gpu.exec);
         });
  std::vector<float*> tails(static_cast<size_t>(rows), nullptr);
  for (int32_t s = 0; s < streams; ++s) tails[static_cast<size_t>(s)] = tail.data() + s * size;
  const DeviceArray<float*> blocks(b.gpu, tails);
  PoolUpdateParams update;
  update.k = update.gate = k.data();
  update.ldk = update.ldgate = update.dim = kIndexDim;
  update.ape = ape.data();
  update.pool = kPool;
  update.tail = {blocks.data(), 0};
  update.rows = rows;
  // It reads new keys and tails only, always the same.
  const Turns few = turns.reading(0);
  b.time("pool_update" + what, few, rows * kIndexDim * 12.0, [&](int i) {
    update.segment = cache.at(i).data();
    update.segments = cache.at(i).count();
    update.pooled = cache.parts(i);
    b.gpu.ops.pool_update(update, b.gpu.exec);
  });
}

void sampling(Bench& b, int32_t rows) {
  const double bytes = double{4} * rows * kVocab;
  const Turns turns(bytes, bytes, 40);
  const check::Blocks logits(b.gpu, int64_t{4} * rows * kVocab, turns.sets,
                             check::normal(int64_t{rows} * kVocab, 3.0));
  const DeviceArray<uint64_t> counter(b.gpu, std::vector<uint64_t>(static_cast<size_t>(rows), 12345));
  const DeviceArray<int32_t> out(b.gpu, rows);
  const struct {
    const char* name;
    SamplingParams s;
  } settings[] = {{"greedy", {}},
                  {"temperature 1", {1.0f}},
                  {"temperature 0.6, top-p 0.95", {0.6f, 0, 0.95f}},
                  {"temperature 1, top-k 50", {1.0f, 50}},
                  {"temperature 1, min-p 0.05", {1.0f, 0, 1.0f, 0.05f}}};
  for (const auto& c : settings) {
    const DeviceArray<SamplingParams> s(b.gpu, std::vector<SamplingParams>(static_cast<size_t>(rows), c.s));
    SampleParams p;
    p.ld = p.vocab = kVocab;
    p.rows = rows;
    p.sampling = s.data();
    p.counter = counter.data();
    p.token = out.data();
    b.time(std::string("sample ") + c.name + " rows " + std::to_string(rows), turns, bytes, [&](int i) {
      p.logits = logits[i];
      b.gpu.ops.sample(p, b.gpu.exec);
    });
  }
  FiniteParams p;
  p.ld = p.dim = kVocab;
  p.rows = rows;
  p.bad = out.data();
  b.time("find_bad rows " + std::to_string(rows), turns, bytes, [&](int i) {
    p.x = logits[i];
    b.gpu.ops.find_bad(p, b.gpu.exec);
  });
}

void all(check::Gpu& gpu) {
  Bench b{gpu, check::read_rate(gpu)};
  for (const int32_t rows : {1, 8}) {
    for (const bool bf16 : {false, true}) attention(b, rows, bf16, false);
    for (const int64_t context : {1024, 32768, 262144}) indexer(b, rows, context, 262144);
    sampling(b, rows);
  }
  attention(b, 512, false, false);
  attention(b, 512, false, true);
  attention(b, 512, true, true);
  indexer(b, 512, 1024, 262144);
  indexer(b, 512, 8192, 262144);
  check::expect(true, "ran");
}

}  // namespace

int main() {
  return check::run_on_gpu("gpu_attention", all);
}
