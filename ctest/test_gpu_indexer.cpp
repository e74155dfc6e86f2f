// The CUDA indexer against the CPU's: pool compression with tails and checkpoints, scores, selection, token lists.
#include <algorithm>
#include <numeric>

#include "gpu_pages.h"

namespace {

using namespace rocket;
using check::DeviceArray;
using check::expect;
using Floats = std::vector<float>;

// --- pool compression ---

struct PoolCase {
  int32_t streams, rows, pool, dim;
  bool ape = true, gate = true;
  int64_t start = 0;   // position of the first row, to begin inside a pool
  int64_t offset = 0;  // of the parts in pages, tails and checkpoints
};

struct PoolInputs {
  Floats k, gate, ape, tail;  // [streams, rows, D] twice, [pool, D], [streams, 2, pool, D]
};

struct PoolResult {
  Floats pooled, tail,
      checkpoint;  // [streams, pools + 1, D], [streams, 2, pool, D], [streams * rows, 2, pool, D]
};

constexpr int32_t kPageRows = 3;

bool saved(int32_t row) {
  return row % 3 != 1;
}

// Rows [first, first + count) of every stream in the layout of one call.
PoolUpdateParams pool_params(const PoolCase& c, const PoolInputs& in, int32_t first, int32_t count,
                             Floats& keys, Floats& gates, std::vector<Segment>& segment) {
  PoolUpdateParams p;
  p.ldk = c.dim + 2;
  p.ldgate = c.dim + 1;
  p.pool = c.pool;
  p.dim = c.dim;
  p.rows = c.streams * count;
  keys.assign(static_cast<size_t>(p.rows * p.ldk), NAN);
  gates.assign(static_cast<size_t>(p.rows * p.ldgate), NAN);
  for (int32_t s = 0; s < c.streams; ++s) {
    segment.push_back({s * count, count, c.start + first});
    for (int32_t r = 0; r < count; ++r) {
      const int64_t from = (int64_t{s} * c.rows + first + r) * c.dim, row = s * count + r;
      std::copy_n(in.k.begin() + from, c.dim, keys.begin() + row * p.ldk);
      std::copy_n(in.gate.begin() + from, c.dim, gates.begin() + row * p.ldgate);
    }
  }
  return p;
}

PoolResult pool_on_cpu(check::Gpu& gpu, const PoolCase& c, const PoolInputs& in) {
  const int64_t size = 2 * int64_t{c.pool} * c.dim, pools = (c.start + c.rows) / c.pool;
  PoolResult out{{}, in.tail, Floats(static_cast<size_t>(c.streams * c.rows * size), NAN)};
  Floats keys, gates;
  std::vector<Segment> segment;
  PoolUpdateParams p = pool_params(c, in, 0, c.rows, keys, gates, segment);
  std::vector<std::unique_ptr<check::Pages>> pages;
  check::Tables views;
  std::vector<float*> tails, checkpoints(static_cast<size_t>(p.rows), nullptr);
  for (int32_t s = 0; s < c.streams; ++s) {
    pages.push_back(std::make_unique<check::Pages>(pools + 1, kPageRows, c.dim));
    views.push_back(pages.back()->view());
    tails.push_back(out.tail.data() + s * size);
  }
  for (int32_t row = 0; row < p.rows; ++row) {
    if (saved(row % c.rows)) checkpoints[static_cast<size_t>(row)] = out.checkpoint.data() + row * size;
  }
  p.k = keys.data();
  p.gate = c.gate ? gates.data() : nullptr;
  p.ape = c.ape ? in.ape.data() : nullptr;
  p.segment = segment.data();
  p.segments = c.streams;
  p.tail = {tails.data(), 0};
  p.checkpoint = {checkpoints.data(), 0};
  p.pooled = views.view();
  cpu_ops().pool_update(p, gpu.cpu.exec);
  for (auto& stream : pages) {
    const Floats rows = stream->read(pools + 1);
    out.pooled.insert(out.pooled.end(), rows.begin(), rows.end());
  }
  return out;
}

PoolResult pool_on_gpu(check::Gpu& gpu, const PoolCase& c, const PoolInputs& in, int32_t chunk,
                       const std::string& what) {
  const int64_t size = 2 * int64_t{c.pool} * c.dim, pools = (c.start + c.rows) / c.pool;
  PoolResult out{{}, {}, Floats(static_cast<size_t>(c.streams * c.rows * size), NAN)};
  std::vector<std::unique_ptr<check::GpuPages>> pages;
  std::vector<std::unique_ptr<DeviceArray<float>>> tail;
  std::vector<float* const*> tables;
  std::vector<float*> tails;
  for (int32_t s = 0; s < c.streams; ++s) {
    pages.push_back(std::make_unique<check::GpuPages>(gpu, pools + 1, kPageRows, c.dim, false, c.offset));
    tables.push_back(pages.back()->table());
    Floats block(static_cast<size_t>(c.offset), NAN);
    block.insert(block.end(), in.tail.begin() + s * size, in.tail.begin() + (s + 1) * size);
    tail.push_back(std::make_unique<DeviceArray<float>>(gpu, block));
    tails.push_back(tail.back()->data());
  }
  const DeviceArray<float> ape(gpu, in.ape);
  const std::vector<int32_t> cut = check::cuts(c.rows, chunk);
  for (size_t i = 0; i + 1 < cut.size(); ++i) {
    const int32_t first = cut[i], count = cut[i + 1] - first;
    Floats keys, gates;
    std::vector<Segment> segment;
    PoolUpdateParams p = pool_params(c, in, first, count, keys, gates, segment);
    const int64_t block = size + c.offset;
    const DeviceArray<float> k(gpu, keys), gate(gpu, gates), kept(gpu, p.rows * block);
    std::vector<float*> checkpoints(static_cast<size_t>(p.rows), nullptr);
    for (int32_t row = 0; row < p.rows; ++row) {
      if (saved(first + row % count)) checkpoints[static_cast<size_t>(row)] = kept.data() + row * block;
    }
    std::vector<float*> all_tails = tails;
    all_tails.resize(static_cast<size_t>(std::max(p.rows, c.streams)), nullptr);
    const DeviceArray<float*> tail_blocks(gpu, all_tails), checkpoint_blocks(gpu, checkpoints);
    const check::GpuSegments segments(gpu, segment, tables, p.rows);
    p.k = k.data();
    p.gate = c.gate ? gate.data() : nullptr;
    p.ape = c.ape ? ape.data() : nullptr;
    p.segment = segments.data();
    p.segments = segments.count();
    p.tail = {tail_blocks.data(), c.offset};
    p.checkpoint = {checkpoint_blocks.data(), c.offset};
    p.pooled = segments.pages(kPageRows, c.dim, false, c.offset);
    gpu.ops.pool_update(p, gpu.exec);
    kept.check(what + " checkpoints");
    const Floats all = kept.get();
    for (int32_t row = 0; row < p.rows; ++row) {
      const float* from = all.data() + row * block;
      if (!checkpoints[static_cast<size_t>(row)]) {
        expect(std::isnan(from[0]) && std::isnan(from[block - 1]),
               what + ": a checkpoint that nobody asked for");
        continue;
      }
      const int64_t to = int64_t{row / count} * c.rows + first + row % count;
      std::copy_n(from + c.offset, size, out.checkpoint.begin() + to * size);
    }
  }
  for (int32_t s = 0; s < c.streams; ++s) {
    pages[static_cast<size_t>(s)]->check(what);
    tail[static_cast<size_t>(s)]->check(what + " tail");
    const Floats rows = pages[static_cast<size_t>(s)]->read(pools + 1),
                 block = tail[static_cast<size_t>(s)]->get();
    out.pooled.insert(out.pooled.end(), rows.begin(), rows.end());
    out.tail.insert(out.tail.end(), block.begin() + c.offset, block.end());
  }
  return out;
}

void check_pool(check::Gpu& gpu, const PoolCase& c) {
  if (!gpu.takes_case()) return;
  const std::string what = "pool " + std::to_string(c.pool) + " rows " + std::to_string(c.rows) + " D " +
                           std::to_string(c.dim) + " from " + std::to_string(c.start);
  const int64_t n = int64_t{c.streams} * c.rows * c.dim;
  PoolInputs in{check::normal(n), check::normal(n, 2.0), check::normal(int64_t{c.pool} * c.dim),
                check::normal(2 * int64_t{c.streams} * c.pool * c.dim)};
  const PoolResult expected = pool_on_cpu(gpu, c, in), found = pool_on_gpu(gpu, c, in, -1, what);
  // exp of an argument up to about 10 that was rounded before, additions and products of `pool` terms, a division, on
  // both sides. Pools outside of the step stay NaN.
  check::close(what + ": pooled keys", found.pooled.data(), expected.pooled.data(),
               static_cast<int64_t>(expected.pooled.size()), 2 * check::rounding(2 * c.pool + 12));
  check::same_bits(what + ": tails", found.tail.data(), expected.tail.data(),
                   static_cast<int64_t>(expected.tail.size()));
  const int64_t size = 2 * int64_t{c.pool} * c.dim;
  for (int32_t row = 0; row < c.streams * c.rows; ++row) {
    if (!saved(row % c.rows)) continue;
    check::same_bits(what + ": checkpoint", found.checkpoint.data() + row * size,
                     expected.checkpoint.data() + row * size, size);
  }
  for (const int32_t chunk : {1, 2, 3, 7, 0}) {
    const PoolResult other = pool_on_gpu(gpu, c, in, chunk, what);
    check::same_bits(what + " in chunks: tail", other.tail.data(), found.tail.data(),
                     static_cast<int64_t>(found.tail.size()));
    check::same_bits(what + " in chunks: pooled", other.pooled.data(), found.pooled.data(),
                     static_cast<int64_t>(found.pooled.size()));
    for (int32_t row = 0; row < c.streams * c.rows; ++row) {
      if (!saved(row % c.rows)) continue;
      check::same_bits(what + " in chunks: checkpoint", other.checkpoint.data() + row * size,
                       found.checkpoint.data() + row * size, size);
    }
  }
}

// --- selection ---

struct SelectCase {
  std::vector<int32_t> rows;      // of each segment
  std::vector<int64_t> position;  // of each segment
  int32_t heads, dim, pool, topk;
  bool tail = true;
  bool whole = false;  // small whole numbers: sums have no rounding, and scores tie often
  int64_t odd = 0;     // floats that rows of q and parts of pages are displaced by
  int32_t spare = 0;   // pools of max_pools that nobody sees yet
};

struct SelectInputs {
  std::vector<Floats> pooled;
  Floats q, weight;
  int32_t rows = 0;
  int32_t most = 0;  // visible pools
};

SelectInputs select_inputs(const SelectCase& c) {
  SelectInputs in;
  const auto draw = [&](int64_t n) {
    Floats values = check::normal(n);
    for (float& x : values) x = c.whole ? static_cast<float>(check::uniform_int(-2, 2)) : x;
    return values;
  };
  for (size_t s = 0; s < c.rows.size(); ++s) {
    const int64_t pools = (c.position[s] + c.rows[s]) / c.pool;
    in.pooled.push_back(draw(pools * c.dim));
    in.rows += c.rows[s];
    in.most = std::max(in.most, static_cast<int32_t>(pools));
  }
  in.q = draw(int64_t{in.rows} * c.heads * c.dim);
  in.weight = draw(int64_t{in.rows} * c.heads);
  return in;
}

struct SelectResult {
  std::vector<std::vector<int32_t>> token;
  std::vector<Floats> score;  // of the visible pools
};

// The rows `source` of the inputs, in the layout of one call.
IndexSelectParams select_params(const SelectCase& c, const SelectInputs& in,
                                const std::vector<int64_t>& source, Floats& q, Floats& w) {
  IndexSelectParams p;
  const auto rows = static_cast<int64_t>(source.size()), width = int64_t{c.heads} * c.dim;
  p.ldq = width + c.odd;
  p.ldw = c.heads + c.odd;
  p.rows = static_cast<int32_t>(rows);
  p.heads = c.heads;
  p.dim = c.dim;
  p.pool = c.pool;
  p.topk = c.topk;
  p.select_tail = c.tail;
  p.head_weight_scale = c.whole ? 1 : 1 / std::sqrt(static_cast<float>(c.heads));
  p.scale = c.whole ? 1 : 1 / std::sqrt(static_cast<float>(c.dim));
  p.max_pools = in.most + c.spare;
  p.ldtoken = int64_t{c.topk} * c.pool + c.pool - 1;
  p.ldscore = in.most + 1;
  q.assign(static_cast<size_t>(rows * p.ldq), NAN);
  w.assign(static_cast<size_t>(rows * p.ldw), NAN);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t from = source[static_cast<size_t>(r)];
    std::copy_n(in.q.begin() + from * width, width, q.begin() + r * p.ldq);
    std::copy_n(in.weight.begin() + from * c.heads, c.heads, w.begin() + r * p.ldw);
  }
  return p;
}

struct Part {  // of a call: rows of one segment
  size_t segment;
  int32_t first, count;
};

std::vector<Segment> call_segments(const SelectCase& c, const std::vector<Part>& parts,
                                   std::vector<int64_t>& source) {
  std::vector<Segment> segment;
  for (const Part& part : parts) {
    int64_t base = 0;
    for (size_t s = 0; s < part.segment; ++s) base += c.rows[s];
    segment.push_back(
        {static_cast<int32_t>(source.size()), part.count, c.position[part.segment] + part.first});
    for (int32_t r = 0; r < part.count; ++r) source.push_back(base + part.first + r);
  }
  return segment;
}

void take_result(const IndexSelectParams& p, const std::vector<Segment>& segment,
                 const std::vector<int64_t>& source, const std::vector<int32_t>& token,
                 const std::vector<int32_t>& count, const Floats& score, SelectResult& out,
                 const std::string& what) {
  for (const Segment& s : segment) {
    for (int32_t r = s.first_row; r < s.first_row + s.rows; ++r) {
      const int64_t pools = (s.position + r - s.first_row + 1) / p.pool;
      const auto to = static_cast<size_t>(source[static_cast<size_t>(r)]);
      const int32_t n = count[static_cast<size_t>(r)];
      if (!expect(n >= 0 && n <= p.ldtoken, what + ": count")) continue;
      out.token[to].assign(token.begin() + r * p.ldtoken, token.begin() + r * p.ldtoken + n);
      for (int64_t i = n; i < p.ldtoken; ++i) {
        expect(token[static_cast<size_t>(r * p.ldtoken + i)] == -1, what + ": wrote behind its list");
      }
      if (score.empty()) continue;
      out.score[to].assign(score.begin() + r * p.ldscore, score.begin() + r * p.ldscore + pools);
      expect(std::isnan(score[static_cast<size_t>(r * p.ldscore + pools)]),
             what + ": scores of visible pools only");
    }
  }
}

SelectResult select_on_cpu(check::Gpu& gpu, const SelectCase& c, const SelectInputs& in) {
  SelectResult out{std::vector<std::vector<int32_t>>(static_cast<size_t>(in.rows)),
                   std::vector<Floats>(static_cast<size_t>(in.rows))};
  std::vector<Part> parts;
  std::vector<std::unique_ptr<check::Pages>> pages;
  check::Tables views;
  for (size_t s = 0; s < c.rows.size(); ++s) {
    parts.push_back({s, 0, c.rows[s]});
    pages.push_back(std::make_unique<check::Pages>(in.most, 7, c.dim));
    pages.back()->fill(in.pooled[s]);
    views.push_back(pages.back()->view());
  }
  std::vector<int64_t> source;
  Floats q, w;
  const std::vector<Segment> segment = call_segments(c, parts, source);
  IndexSelectParams p = select_params(c, in, source, q, w);
  std::vector<int32_t> token(static_cast<size_t>(p.rows * p.ldtoken), -1), count(static_cast<size_t>(p.rows));
  Floats score(static_cast<size_t>(p.rows * p.ldscore), NAN);
  p.q = q.data();
  p.head_weight = w.data();
  p.segment = segment.data();
  p.segments = static_cast<int32_t>(segment.size());
  p.pooled = views.view();
  p.token = token.data();
  p.count = count.data();
  p.score = score.data();
  cpu_ops().index_select(p, gpu.cpu.exec);
  take_result(p, segment, source, token, count, score, out, "CPU");
  return out;
}

class GpuSelect {
 public:
  GpuSelect(check::Gpu& gpu, const SelectCase& c, const SelectInputs& in) : gpu_(gpu), c_(c), in_(in) {
    for (const Floats& keys : in.pooled) {
      pages_.push_back(std::make_unique<check::GpuPages>(gpu, in.most, 7, c.dim, false, c.odd));
      pages_.back()->fill(keys);
    }
  }
  void run(const std::vector<Part>& parts, bool scores, SelectResult& out, const std::string& what) {
    std::vector<int64_t> source;
    Floats q, w;
    const std::vector<Segment> segment = call_segments(c_, parts, source);
    IndexSelectParams p = select_params(c_, in_, source, q, w);
    std::vector<float* const*> tables;
    for (const Part& part : parts) tables.push_back(pages_[part.segment]->table());
    const check::GpuSegments segments(gpu_, segment, tables, p.rows);
    const DeviceArray<float> dq(gpu_, q), dw(gpu_, w), score(gpu_, scores ? p.rows * p.ldscore : 0);
    const DeviceArray<int32_t> token(gpu_, p.rows * p.ldtoken), count(gpu_, p.rows);
    p.q = dq.data();
    p.head_weight = dw.data();
    p.segment = segments.data();
    p.segments = segments.count();
    p.pooled = segments.pages(7, c_.dim, false, c_.odd);
    p.token = token.data();
    p.count = count.data();
    p.score = scores ? score.data() : nullptr;
    gpu_.ops.index_select(p, gpu_.exec);
    token.check(what + " tokens");
    count.check(what + " counts");
    score.check(what + " scores");
    expect(gpu_.scratch.used() == 0, what + ": gives its scratch back");
    take_result(p, segment, source, token.get(), count.get(), score.get(), out, what);
  }
  SelectResult empty() const {
    return {std::vector<std::vector<int32_t>>(static_cast<size_t>(in_.rows)),
            std::vector<Floats>(static_cast<size_t>(in_.rows))};
  }

 private:
  check::Gpu& gpu_;
  const SelectCase& c_;
  const SelectInputs& in_;
  std::vector<std::unique_ptr<check::GpuPages>> pages_;
};

// The token list that follows from a row's scores.
std::vector<int32_t> expand(const SelectCase& c, const Floats& score, int64_t position) {
  std::vector<int32_t> order(score.size()), list;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const float x = score[static_cast<size_t>(a)], y = score[static_cast<size_t>(b)];
    return std::isnan(y) ? !std::isnan(x) : x > y;
  });
  order.resize(std::min<size_t>(order.size(), static_cast<size_t>(c.topk)));
  std::sort(order.begin(), order.end());
  for (const int32_t p : order) {
    for (int32_t t = 0; t < c.pool; ++t) list.push_back(p * c.pool + t);
  }
  if (c.tail) {
    for (int64_t t = (position + 1) / c.pool * c.pool; t <= position; ++t)
      list.push_back(static_cast<int32_t>(t));
  }
  return list;
}

void check_select(check::Gpu& gpu, const SelectCase& c) {
  if (!gpu.takes_case()) return;
  const SelectInputs in = select_inputs(c);
  const std::string what = "select rows " + std::to_string(in.rows) + " heads " + std::to_string(c.heads) +
                           " D " + std::to_string(c.dim) + " pools " + std::to_string(in.most) + " topk " +
                           std::to_string(c.topk) + (c.whole ? " whole numbers" : "");
  const SelectResult expected = select_on_cpu(gpu, c, in);
  GpuSelect on_gpu(gpu, c, in);
  SelectResult found = on_gpu.empty();
  std::vector<Part> everything;
  for (size_t s = 0; s < c.rows.size(); ++s) everything.push_back({s, 0, c.rows[s]});
  on_gpu.run(everything, true, found, what);

  Floats got, wanted;
  size_t row = 0;
  for (size_t s = 0; s < c.rows.size(); ++s) {
    for (int32_t r = 0; r < c.rows[s]; ++r, ++row) {
      got.insert(got.end(), found.score[row].begin(), found.score[row].end());
      wanted.insert(wanted.end(), expected.score[row].begin(), expected.score[row].end());
      expect(found.token[row] == expand(c, found.score[row], c.position[s] + r),
             what + ": the tokens that follow from the scores of row " + std::to_string(row));
      expect(found.token[row].size() == expected.token[row].size(), what + ": count");
      if (c.whole) expect(found.token[row] == expected.token[row], what + ": the CPU's tokens");
    }
  }
  if (c.whole) {
    check::equal(what + ": scores", got.data(), wanted.data(), static_cast<int64_t>(got.size()));
  } else {
    // Dot products one rounding a channel, then a sum over heads, on both sides; relative to the largest score.
    check::close(what + ": scores", got.data(), wanted.data(), static_cast<int64_t>(got.size()),
                 2 * check::rounding(c.dim + c.heads + 4));
  }

  SelectResult alone = on_gpu.empty(), unscored = on_gpu.empty();
  for (size_t s = 0; s < c.rows.size(); ++s) {
    for (int32_t r = 0; r < c.rows[s]; ++r) {
      on_gpu.run({{s, r, 1}}, r % 2 == 0, alone, what + " alone");
    }
  }
  on_gpu.run(everything, false, unscored, what + " without scores");
  for (row = 0; row < static_cast<size_t>(in.rows); ++row) {
    expect(alone.token[row] == found.token[row], what + ": a row alone has the same tokens");
    expect(unscored.token[row] == found.token[row], what + ": the same tokens without scores");
    if (alone.score[row].empty()) continue;
    check::same_bits(what + ": a row alone has the same scores", alone.score[row].data(),
                     found.score[row].data(), static_cast<int64_t>(alone.score[row].size()));
  }
}

void nan_scores_are_last(check::Gpu& gpu, int32_t heads) {
  SelectCase c{{2}, {39}, heads, 16, 4, 3};
  SelectInputs in = select_inputs(c);
  for (size_t p = 0; p < 8; ++p) in.pooled[0][p * 16 + 3] = NAN;
  GpuSelect on_gpu(gpu, c, in);
  SelectResult found = on_gpu.empty();
  on_gpu.run({{0, 0, 2}}, true, found, "NaN");
  for (size_t p = 0; p < 8; ++p) expect(std::isnan(found.score[0][p]), "a NaN passes the ReLU");
  // Two pools have numbers; of the others the lowest comes along.
  const std::vector<int32_t> expected = {0, 1, 2, 3, 32, 33, 34, 35, 36, 37, 38, 39};
  expect(found.token[0] == expected, "NaN scores are the smallest");
}

void all(check::Gpu& gpu) {
  for (const PoolCase& c :
       {PoolCase{1, 1, 4, 128, true, true, 3}, PoolCase{2, 64, 4, 128}, PoolCase{3, 21, 4, 40, true, true, 6},
        PoolCase{1, 50, 16, 32, true, true, 9, 5}, PoolCase{2, 13, 4, 24, false, true, 0, 3},
        PoolCase{1, 8, 1, 16}, PoolCase{2, 9, 1, 40, false, false}, PoolCase{1, 2, 16, 200, true, true, 5}}) {
    check_pool(gpu, c);
  }
  // Positions from 0 to beyond several pages; rows that cross topk by one pool and one token; several streams; odd and
  // unaligned shapes; ties; more rows than scratch holds; long contexts.
  for (const SelectCase& c : {
           SelectCase{{1}, {20001}, 32, 128, 4, 512},
           SelectCase{{2, 3}, {2044, 9000}, 32, 128, 4, 512, true, true},
           SelectCase{{12}, {2046}, 32, 128, 4, 512, true, false, 0, 100},
           SelectCase{{40}, {0}, 4, 32, 4, 6},
           SelectCase{{40}, {0}, 32, 64, 4, 6, true, true},
           SelectCase{{3, 1, 20}, {15, 400, 0}, 3, 40, 4, 5},
           SelectCase{{64}, {100}, 5, 17, 16, 4, false},
           SelectCase{{1, 1, 1}, {500, 23, 24}, 9, 64, 4, 6, true, false, 1},
           SelectCase{{18}, {300}, 8, 48, 4, 30, true, true},
           SelectCase{{9}, {70}, 2, 128, 1, 16},
           SelectCase{{9}, {700}, 64, 128, 1, 16, true, true, 4},
           SelectCase{{1}, {262143}, 32, 128, 4, 512, true, true},
           SelectCase{{3}, {130}, 2, 8, 4, 100, true, false, 0, 6 << 20},
           SelectCase{{5}, {130}, 32, 8, 4, 30, true, true, 0, 6 << 20},
       }) {
    check_select(gpu, c);
  }
  nan_scores_are_last(gpu, 4);
  nan_scores_are_last(gpu, 32);
}

}  // namespace

int main() {
  return check::run_on_gpu("gpu_indexer", all);
}
