// The indexer against double precision: pool compression with its tail, scores, selection and token lists.
#include <algorithm>
#include <numeric>

#include "ops_check.h"

namespace {

using namespace rocket;
using check::expect;
using check::Pages;
using Doubles = std::vector<double>;
using Floats = std::vector<float>;

// --- pool compression ---

struct PoolCase {
  int32_t streams, rows, pool, dim;
  bool ape = true, gate = true;
  int64_t start = 0;  // position of the first row, to begin inside a pool
};

struct PoolResult {
  Floats pooled, tail,
      checkpoint;  // [streams, pools, D], [streams, 2, pool, D], [streams * rows, 2, pool, D]
};

PoolResult run_pool(const OpTable& ops, const PoolCase& c, int32_t chunk, int threads, const Floats& k,
                    const Floats& gate, const Floats& ape, const Floats& tail, const std::string& what) {
  const int64_t dim = c.dim, size = 2 * c.pool * dim, pools = (c.start + c.rows) / c.pool;
  PoolResult out{{}, tail, Floats(c.streams * c.rows * size, NAN)};
  std::vector<std::unique_ptr<Pages>> pages;
  for (int32_t s = 0; s < c.streams; ++s) pages.push_back(std::make_unique<Pages>(pools + 1, 3, c.dim));
  check::Bench bench(threads);
  const std::vector<int32_t> cut = check::cuts(c.rows, chunk);
  for (size_t i = 0; i + 1 < cut.size(); ++i) {
    const int32_t rows = cut[i + 1] - cut[i];
    const int64_t ldk = dim + 2, ldgate = dim + 1;
    Floats keys(c.streams * rows * ldk, NAN), gates(c.streams * rows * ldgate, NAN);
    check::Guarded<float> saved(c.streams * rows * size);
    std::vector<Segment> segment;
    std::vector<float*> tails, checkpoints(c.streams * rows, nullptr);
    check::Tables views;
    for (int32_t s = 0; s < c.streams; ++s) {
      segment.push_back({s * rows, rows, c.start + cut[i]});
      tails.push_back(out.tail.data() + s * size);
      views.push_back(pages[s]->view());
      for (int32_t r = 0; r < rows; ++r) {
        const int64_t from = (s * c.rows + cut[i] + r) * dim, row = s * rows + r;
        std::memcpy(keys.data() + row * ldk, k.data() + from, dim * sizeof(float));
        std::memcpy(gates.data() + row * ldgate, gate.data() + from, dim * sizeof(float));
        if ((cut[i] + r) % 3 != 1) checkpoints[row] = saved.data() + row * size;
      }
    }
    PoolUpdateParams p;
    p.k = keys.data();
    p.ldk = ldk;
    p.gate = c.gate ? gates.data() : nullptr;
    p.ldgate = ldgate;
    p.ape = c.ape ? ape.data() : nullptr;
    p.pool = c.pool;
    p.dim = c.dim;
    p.segment = segment.data();
    p.segments = c.streams;
    p.tail = {tails.data(), 0};
    p.checkpoint = {checkpoints.data(), 0};
    p.pooled = views.view();
    p.rows = c.streams * rows;
    ops.pool_update(p, bench.exec);
    saved.check(what + " checkpoints");
    for (int64_t row = 0; row < p.rows; ++row) {
      if (!checkpoints[row]) {
        expect(std::isnan(saved[row * size]), what + ": a checkpoint that nobody asked for");
        continue;
      }
      const int64_t to = row / rows * c.rows + cut[i] + row % rows;
      std::memcpy(out.checkpoint.data() + to * size, checkpoints[row], size * sizeof(float));
    }
  }
  for (auto& p : pages) {
    p->check(what);
    const Floats rows = p->read(pools + 1);
    expect(std::isnan(rows[pools * dim]), what + ": the unfinished pool has no key");
    out.pooled.insert(out.pooled.end(), rows.begin(), rows.end() - dim);
  }
  return out;
}

void check_pool(const OpTable& ops, const std::string& isa, const PoolCase& c) {
  const std::string what = isa + "pool " + std::to_string(c.pool) + " rows " + std::to_string(c.rows) +
                           " D " + std::to_string(c.dim) + " from " + std::to_string(c.start);
  const int64_t dim = c.dim, size = 2 * c.pool * dim, pools = (c.start + c.rows) / c.pool,
                before = c.start / c.pool;
  const int64_t n = static_cast<int64_t>(c.streams) * c.rows * dim;
  const Floats k = check::normal(n), gate = check::normal(n, 2.0), ape = check::normal(c.pool * dim);
  const Floats tail = check::normal(c.streams * size);
  const PoolResult found = run_pool(ops, c, -1, 2, k, gate, ape, tail, what);
  // Token `position` of a stream: from the tail before the first row.
  const auto value = [&](const Floats& rows, int half, int64_t s, int64_t position, int64_t d) {
    return position < c.start ? tail[s * size + (half * c.pool + position % c.pool) * dim + d]
                              : rows[(s * c.rows + position - c.start) * dim + d];
  };
  Doubles expected;
  Floats got;
  for (int64_t s = 0; s < c.streams; ++s) {
    for (int64_t p = before; p < pools; ++p) {
      for (int64_t d = 0; d < dim; ++d) {
        double total = 0, sum = 0;
        for (int64_t t = 0; t < c.pool; ++t) {
          const double z =
              c.gate ? value(gate, 1, s, p * c.pool + t, d) + (c.ape ? double{ape[t * dim + d]} : 0.0) : 0.0;
          total += std::exp(z);
          sum += std::exp(z) * value(k, 0, s, p * c.pool + t, d);
        }
        expected.push_back(sum / total);
        got.push_back(found.pooled[(s * pools + p) * dim + d]);
      }
    }
    for (int64_t i = 0; i < before * dim; ++i) {
      expect(std::isnan(found.pooled[s * pools * dim + i]), what + ": a finished pool never changes");
    }
  }
  // exp of an argument up to about 10 that was rounded before, additions and products of `pool` terms, a
  // division.
  check::close(what + ": pooled keys", got.data(), expected.data(), got.size(),
               check::rounding(2 * c.pool + 12), 1.89e-03);
  for (const int32_t chunk : {1, 2, 3, 7, 0}) {
    const PoolResult other = run_pool(ops, c, chunk, 1 + chunk % 3, k, gate, ape, tail, what);
    check::same_bits(what + " in chunks: pooled", other.pooled.data(), found.pooled.data(),
                     found.pooled.size());
    check::same_bits(what + " in chunks: tail", other.tail.data(), found.tail.data(), found.tail.size());
    check::same_bits(what + " in chunks: checkpoints", other.checkpoint.data(), found.checkpoint.data(),
                     found.checkpoint.size());
  }
  // A checkpoint after a row is the tail of a stream that ends there.
  for (const int32_t rows : {1, 3, c.rows}) {
    PoolCase shorter = c;
    shorter.streams = 1;
    shorter.rows = std::min(rows, c.rows);
    if ((shorter.rows - 1) % 3 == 1) continue;
    const PoolResult alone =
        run_pool(ops, shorter, -1, 1, k, gate, ape, {tail.begin(), tail.begin() + size}, what);
    check::same_bits(what + ": checkpoint", found.checkpoint.data() + (shorter.rows - 1) * size,
                     alone.tail.data(), size);
  }
}

void copies_without_gate(const OpTable& ops, const std::string& isa) {
  const PoolCase c{2, 9, 1, 40, false, false};
  const Floats k = check::normal(2 * 9 * 40);
  const PoolResult found = run_pool(ops, c, -1, 2, k, k, {}, Floats(2 * 2 * 40, 0.0f), isa + "pool 1");
  check::same_bits(isa + "pool 1 without gate copies keys", found.pooled.data(), k.data(), k.size());
}

// --- selection ---

struct SelectCase {
  std::vector<int32_t> rows;      // of each segment
  std::vector<int64_t> position;  // of each segment
  int32_t heads, dim, pool, topk;
  bool tail = true;
  bool ties = false;  // pooled keys repeat, so that scores do
};

struct SelectInputs {
  std::vector<std::unique_ptr<Pages>> pages;
  std::vector<Floats> pooled;
  Floats q, weight;
  int32_t rows = 0;
};

SelectInputs select_inputs(const SelectCase& c) {
  SelectInputs in;
  for (size_t s = 0; s < c.rows.size(); ++s) {
    const int64_t pools = (c.position[s] + c.rows[s]) / c.pool;
    Floats keys = check::normal(pools * c.dim);
    for (int64_t p = 5; c.ties && p < pools; ++p) {
      std::copy_n(keys.begin() + (p % 5) * c.dim, c.dim, keys.begin() + p * c.dim);
    }
    in.pages.push_back(std::make_unique<Pages>(pools, 7, c.dim));
    in.pages.back()->fill(keys);
    in.pooled.push_back(keys);
    in.rows += c.rows[s];
  }
  in.q = check::normal(static_cast<int64_t>(in.rows) * c.heads * c.dim);
  in.weight = check::normal(in.rows * c.heads);
  return in;
}

struct SelectResult {
  std::vector<std::vector<int32_t>> token;
  std::vector<Floats> score;
};

// One call over the given rows (first, count) of each segment.
void run_select(const OpTable& ops, const SelectCase& c, SelectInputs& in, const std::vector<int32_t>& first,
                const std::vector<int32_t>& count, int threads, bool scores, SelectResult& out,
                const std::string& what) {
  std::vector<Segment> segment;
  check::Tables views;
  std::vector<int64_t> source;
  int64_t most = 0;
  for (size_t s = 0, base = 0; s < c.rows.size(); base += c.rows[s++]) {
    if (count[s] == 0) continue;
    segment.push_back({static_cast<int32_t>(source.size()), count[s], c.position[s] + first[s]});
    views.push_back(in.pages[s]->view());
    for (int32_t r = 0; r < count[s]; ++r) source.push_back(base + first[s] + r);
    most = std::max(most, (c.position[s] + first[s] + count[s]) / c.pool);
  }
  const auto rows = static_cast<int64_t>(source.size());
  if (rows == 0) return;
  const int64_t width = static_cast<int64_t>(c.heads) * c.dim, ldq = width + 3, ldw = c.heads + 1;
  Floats q(rows * ldq, NAN), w(rows * ldw, NAN);
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(q.data() + r * ldq, in.q.data() + source[r] * width, width * sizeof(float));
    std::memcpy(w.data() + r * ldw, in.weight.data() + source[r] * c.heads, c.heads * sizeof(float));
  }
  const int64_t ldtoken = c.topk * c.pool + c.pool - 1;
  check::Guarded<int32_t> token(rows * ldtoken), counts(rows);
  check::Guarded<float> score(scores ? rows * (most + 1) : 0);
  IndexSelectParams p;
  p.q = q.data();
  p.ldq = ldq;
  p.head_weight = w.data();
  p.ldw = ldw;
  p.head_weight_scale = 1 / std::sqrt(static_cast<float>(c.heads));
  p.scale = 1 / std::sqrt(static_cast<float>(c.dim));
  p.rows = static_cast<int32_t>(rows);
  p.heads = c.heads;
  p.dim = c.dim;
  p.pool = c.pool;
  p.topk = c.topk;
  p.select_tail = c.tail;
  p.segment = segment.data();
  p.segments = static_cast<int32_t>(segment.size());
  p.pooled = views.view();
  p.token = token.data();
  p.ldtoken = ldtoken;
  p.count = counts.data();
  p.score = scores ? score.data() : nullptr;
  p.ldscore = most + 1;
  check::Bench bench(threads);
  ops.index_select(p, bench.exec);
  token.check(what + " tokens");
  counts.check(what + " counts");
  score.check(what + " scores");
  expect(bench.scratch.peak() <= static_cast<size_t>(index_select_scratch_bytes(rows, most)),
         what + ": scratch as stated");
  for (const Segment& s : segment) {
    for (int32_t r = s.first_row; r < s.first_row + s.rows; ++r) {
      const int64_t pools = (s.position + r - s.first_row + 1) / c.pool;
      if (!expect(counts[r] >= 0 && counts[r] <= ldtoken, what + ": count")) continue;
      out.token[source[r]].assign(token.data() + r * ldtoken, token.data() + r * ldtoken + counts[r]);
      if (!scores) continue;
      out.score[source[r]].assign(score.data() + r * (most + 1), score.data() + r * (most + 1) + pools);
      expect(std::isnan(score[r * (most + 1) + pools]), what + ": scores of visible pools only");
    }
  }
}

// The token list that follows from a row's scores.
std::vector<int32_t> expand(const SelectCase& c, const Floats& score, int64_t position) {
  std::vector<int32_t> order(score.size()), list;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return std::isnan(score[b]) ? !std::isnan(score[a]) : score[a] > score[b];
  });
  order.resize(std::min<size_t>(order.size(), c.topk));
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

void check_select(const OpTable& ops, const std::string& isa, const SelectCase& c) {
  SelectInputs in = select_inputs(c);
  const std::string what = isa + "select rows " + std::to_string(in.rows) + " heads " +
                           std::to_string(c.heads) + " D " + std::to_string(c.dim) + " pool " +
                           std::to_string(c.pool) + " topk " + std::to_string(c.topk);
  const std::vector<int32_t> none(c.rows.size(), 0);
  SelectResult found{std::vector<std::vector<int32_t>>(in.rows), std::vector<Floats>(in.rows)};
  run_select(ops, c, in, none, c.rows, 2, true, found, what);

  Floats got;
  Doubles expected;
  int64_t row = 0;
  for (size_t s = 0; s < c.rows.size(); ++s) {
    for (int32_t r = 0; r < c.rows[s]; ++r, ++row) {
      const int64_t position = c.position[s] + r, pools = (position + 1) / c.pool;
      for (int64_t p = 0; p < pools; ++p) {
        double total = 0;
        for (int64_t h = 0; h < c.heads; ++h) {
          double dot = 0;
          for (int64_t d = 0; d < c.dim; ++d) {
            dot += static_cast<double>(in.q[(row * c.heads + h) * c.dim + d]) * in.pooled[s][p * c.dim + d];
          }
          total += in.weight[row * c.heads + h] / std::sqrt(static_cast<double>(c.heads)) *
                   std::max(dot / std::sqrt(static_cast<double>(c.dim)), 0.0);
        }
        expected.push_back(total);
      }
      got.insert(got.end(), found.score[row].begin(), found.score[row].end());
      const std::vector<int32_t> list = expand(c, found.score[row], position);
      expect(found.token[row] == list, what + ": tokens of row " + std::to_string(row));
    }
  }
  // Dot products one rounding a channel, then a sum over heads; both relative to the largest score.
  check::close(what + ": scores", got.data(), expected.data(), got.size(),
               check::rounding(c.dim + c.heads + 4));

  for (const int32_t chunk : {1, 3, 7, 17, 0}) {
    SelectResult other{std::vector<std::vector<int32_t>>(in.rows), std::vector<Floats>(in.rows)};
    std::vector<std::vector<int32_t>> cut;
    size_t calls = 0;
    for (const int32_t rows : c.rows) {
      cut.push_back(check::cuts(rows, chunk));
      calls = std::max(calls, cut.back().size() - 1);
    }
    for (size_t i = 0; i < calls; ++i) {
      std::vector<int32_t> first, count;
      for (const auto& at : cut) {
        first.push_back(i + 1 < at.size() ? at[i] : 0);
        count.push_back(i + 1 < at.size() ? at[i + 1] - at[i] : 0);
      }
      run_select(ops, c, in, first, count, 1 + chunk % 3, chunk % 2, other, what);
    }
    for (int32_t r = 0; r < in.rows; ++r) {
      expect(other.token[r] == found.token[r], what + " in chunks: tokens");
      if (chunk % 2) {
        check::same_bits(what + " in chunks: scores", other.score[r].data(), found.score[r].data(),
                         found.score[r].size());
      }
    }
  }
}

void nan_scores_are_last(const OpTable& ops, const std::string& isa) {
  SelectCase c{{2}, {39}, 4, 16, 4, 3};
  SelectInputs in = select_inputs(c);
  for (int p = 0; p < 8; ++p) in.pages[0]->row(p)[3] = NAN;
  SelectResult found{std::vector<std::vector<int32_t>>(2), std::vector<Floats>(2)};
  run_select(ops, c, in, {0}, c.rows, 2, true, found, isa + "NaN");
  for (int p = 0; p < 8; ++p) expect(std::isnan(found.score[0][p]), isa + "a NaN passes the ReLU");
  // Two pools have numbers; of the others the lowest comes along.
  const std::vector<int32_t> expected = {0, 1, 2, 3, 32, 33, 34, 35, 36, 37, 38, 39};
  expect(found.token[0] == expected, isa + "NaN scores are the smallest");
}

}  // namespace

int main() {
  check::on_each_isa([](const OpTable& ops, const std::string& isa) {
    for (const PoolCase& c : {PoolCase{1, 1, 4, 128, true, true, 3}, PoolCase{2, 64, 4, 128},
                              PoolCase{3, 21, 4, 40, true, true, 6}, PoolCase{1, 50, 16, 32, true, true, 9},
                              PoolCase{2, 13, 4, 24, false}, PoolCase{1, 8, 1, 16}}) {
      check_pool(ops, isa, c);
    }
    copies_without_gate(ops, isa);
    // One row far on; rows that cross topk by one pool and one token; several streams; odd shapes; all at
    // once.
    for (const SelectCase& c :
         {SelectCase{{1}, {20001}, 32, 128, 4, 512}, SelectCase{{40}, {0}, 4, 32, 4, 6},
          SelectCase{{3, 1, 20}, {15, 400, 0}, 3, 40, 4, 5}, SelectCase{{64}, {100}, 5, 17, 16, 4, false},
          SelectCase{{1, 1, 1}, {500, 23, 24}, 9, 64, 4, 6},
          SelectCase{{18}, {300}, 8, 48, 4, 30, true, true}, SelectCase{{9}, {70}, 2, 128, 1, 16}}) {
      check_select(ops, isa, c);
    }
    nan_scores_are_last(ops, isa);
  });
  std::printf("      token lists compared exactly (published: exact top-k)\n");
  return check::finish("indexer");
}
