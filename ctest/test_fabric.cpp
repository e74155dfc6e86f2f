// Several ranks as threads of one process, over a wire in memory that can lose a rank: rows that cross arrive whole and
// in their places, every wait ends within its limit, and what goes wrong on one rank is known on all.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "fabric/handshake.h"
#include "fabric/part_exchange.h"
#include "fabric/row_exchange.h"
#include "fabric/wire_fabric.h"
#include "thread_wire.h"

using namespace rocket;

namespace {

using check::Post;
using check::ThreadWire;

void expect(bool ok, const std::string& what) {
  check::expect_of_rank(ok, what);
}

// What each rank threw; empty where nothing.
std::vector<std::string> on_ranks(int ranks, double limit,
                                  const std::function<void(WireFabric&, Post&)>& body, int* stops = nullptr) {
  Post post;
  post.dead.resize(static_cast<size_t>(ranks));
  std::vector<std::unique_ptr<ThreadWire>> wires;
  std::vector<std::unique_ptr<WireFabric>> fabrics;
  std::vector<std::string> thrown(static_cast<size_t>(ranks));
  for (int r = 0; r < ranks; ++r) {
    wires.push_back(std::make_unique<ThreadWire>(post, r, ranks));
    fabrics.push_back(std::make_unique<WireFabric>(*wires.back()));
    fabrics.back()->set_limit(limit);
  }
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        body(*fabrics[static_cast<size_t>(r)], post);
      } catch (const Error& error) {
        thrown[static_cast<size_t>(r)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (stops) *stops = post.stops;
  return thrown;
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// --- what crosses ---------------------------------------------------------------------------------------------

struct Layer {
  ExpertSplit split;
  std::vector<int32_t> ids;   // [rows, topk]
  std::vector<float> routed;  // [rows, topk, hidden], of all experts
};

Layer random_layer(std::mt19937& rng, int ranks, int rows, int topk, int hidden, int experts) {
  Layer layer;
  layer.split = {ranks, experts, {}};
  for (int e = 0; e < experts; ++e)
    layer.split.owner.push_back(std::uniform_int_distribution<int>(0, ranks - 1)(rng));
  for (int r = 0; r < rows; ++r) {
    std::vector<int32_t> all(static_cast<size_t>(experts));
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), rng);
    std::sort(all.begin(), all.begin() + topk);
    layer.ids.insert(layer.ids.end(), all.begin(), all.begin() + topk);
  }
  for (int64_t i = 0; i < int64_t{rows} * topk * hidden; ++i)
    layer.routed.push_back(std::uniform_real_distribution<float>(-1, 1)(rng));
  return layer;
}

void test_rows() {
  std::mt19937 rng(5);
  for (int round = 0; round < 30; ++round) {
    const int ranks = 2 + round % 3, rows = 1 + round % 9, topk = 1 + round % 4, hidden = 8 + round,
              experts = 7;
    std::vector<Layer> steps;
    for (int s = 0; s < 4; ++s) steps.push_back(random_layer(rng, ranks, rows, topk, hidden, experts));
    for (Layer& layer : steps) layer.split = steps[0].split;
    int stops = 0;
    const auto thrown = on_ranks(
        ranks, 20,
        [&](WireFabric& fabric, Post&) {
          RowExchange exchange(fabric, steps[0].split, topk, hidden, {3});
          std::vector<float> buffer(
              static_cast<size_t>(RowExchange::buffer_floats(ranks, rows, topk, hidden)));
          int64_t sent = 0, received = 0;
          for (const Layer& layer : steps) {
            std::vector<int32_t> own(layer.ids.size());
            std::vector<float> routed(layer.routed.size(), NAN);
            exchange.begin_step();
            exchange.begin(0, layer.ids, own.data(), buffer.data());
            for (size_t i = 0; i < own.size(); ++i) {
              const bool mine = layer.split.owner_of(0, layer.ids[i]) == fabric.rank();
              expect(own[i] == (mine ? layer.ids[i] : -1), "own choices");
              sent += mine ? ranks - 1 : 0;
              received += !mine;
              if (!mine) continue;
              std::copy_n(layer.routed.begin() + static_cast<ptrdiff_t>(i) * hidden, hidden,
                          routed.begin() + static_cast<ptrdiff_t>(i) * hidden);
            }
            exchange.send(routed.data());
            exchange.finish(routed.data());
            expect(std::memcmp(routed.data(), layer.routed.data(), routed.size() * 4) == 0,
                   "every rank has every row");
          }
          expect(fabric.figures().rows_sent == sent && fabric.figures().rows_received == received,
                 "rows that crossed are counted");
          fabric.leave();
        },
        &stops);
    for (const std::string& error : thrown) expect(error.empty(), "no error: " + error);
    expect(stops == ranks, "all ranks part in order");
  }
}

// A rank whose router says something else is found by its first block.
void test_out_of_step() {
  std::mt19937 rng(6);
  Layer layer = random_layer(rng, 2, 3, 2, 16, 6);
  for (size_t e = 0; e < 6; ++e) layer.split.owner[e] = static_cast<int32_t>(e % 2);
  for (int kind = 0; kind < 2; ++kind) {
    const auto thrown = on_ranks(2, 5, [&](WireFabric& fabric, Post&) {
      RowExchange exchange(fabric, layer.split, 2, 16, {7});
      std::vector<int32_t> ids = {0, 1, 2, 3, 4, 5}, own(6);
      if (fabric.rank() == 1 && kind == 0) std::swap(ids[0], ids[2]);
      std::vector<float> buffer(static_cast<size_t>(RowExchange::buffer_floats(2, 3, 2, 16))), routed(96);
      exchange.begin_step();
      if (fabric.rank() == 1 && kind == 1) exchange.begin_step();
      exchange.begin(0, ids, own.data(), buffer.data());
      exchange.send(routed.data());
      exchange.finish(routed.data());
    });
    for (const std::string& error : thrown)
      expect(has(error, "out of step") && has(error, "layer 7"), "out of step: " + error);
  }
}

// --- parts ----------------------------------------------------------------------------------------------------

// Sums are those of ranks in order, on all of them; columns stand side by side. An exchange of expert rows may be under
// way meanwhile.
void test_parts() {
  std::mt19937 rng(8);
  std::normal_distribution<float> normal;
  for (int round = 0; round < 12; ++round) {
    const int ranks = 2 + round % 3, rows = 1 + round % 5, columns = 3 + 7 * round;
    std::vector<std::vector<float>> part(static_cast<size_t>(ranks));
    for (auto& p : part) {
      for (int i = 0; i < rows * columns; ++i) p.push_back(normal(rng));
    }
    std::vector<float> sum = part[0], side(static_cast<size_t>(ranks * rows * columns));
    for (size_t r = 0; r < part.size(); ++r) {
      for (size_t i = 0; i < sum.size(); ++i) {
        if (r > 0) sum[i] += part[r][i];
        const size_t row = i / static_cast<size_t>(columns), column = i % static_cast<size_t>(columns);
        side[(row * part.size() + r) * static_cast<size_t>(columns) + column] = part[r][i];
      }
    }
    const Layer layer = random_layer(rng, ranks, rows, 2, 16, 6);
    const auto thrown = on_ranks(ranks, 20, [&](WireFabric& fabric, Post&) {
      const auto me = static_cast<size_t>(fabric.rank());
      PartExchange parts(fabric);
      RowExchange exchange(fabric, layer.split, 2, 16, {3});
      std::vector<float> buffer(static_cast<size_t>(PartExchange::buffer_floats(ranks, rows, columns)));
      std::vector<float> wire(static_cast<size_t>(RowExchange::buffer_floats(ranks, rows, 2, 16)));
      for (int step = 0; step < 3; ++step) {
        std::vector<float> x = part[me], all(side.size(), NAN), routed(layer.routed.size(), NAN);
        std::vector<int32_t> own(layer.ids.size());
        parts.begin_step();
        exchange.begin_step();
        exchange.begin(0, layer.ids, own.data(), wire.data());
        for (size_t i = 0; i < own.size(); ++i) {
          const auto at = static_cast<ptrdiff_t>(i) * 16;
          if (own[i] >= 0) std::copy_n(layer.routed.begin() + at, 16, routed.begin() + at);
        }
        exchange.send(routed.data());
        parts.sum(x.data(), rows, columns, buffer.data(), "a sum");
        exchange.finish(routed.data());
        parts.join(part[me].data(), rows, columns, all.data(), buffer.data(), "columns");
        expect(std::memcmp(x.data(), sum.data(), x.size() * 4) == 0, "the sum in the order of ranks");
        expect(std::memcmp(all.data(), side.data(), all.size() * 4) == 0, "columns side by side");
        expect(std::memcmp(routed.data(), layer.routed.data(), routed.size() * 4) == 0, "rows beside parts");
      }
      fabric.leave();
    });
    for (const std::string& error : thrown) expect(error.empty(), "no error: " + error);
  }
}

void test_parts_out_of_step() {
  const auto thrown = on_ranks(2, 5, [&](WireFabric& fabric, Post&) {
    PartExchange parts(fabric);
    std::vector<float> x(8), buffer(static_cast<size_t>(PartExchange::buffer_floats(2, 2, 4)));
    parts.begin_step();
    if (fabric.rank() == 1) parts.begin_step();
    parts.sum(x.data(), 2, 4, buffer.data(), "attention");
  });
  for (const std::string& error : thrown)
    expect(has(error, "out of step") && has(error, "attention"), "out of step: " + error);
}

// --- what is told ---------------------------------------------------------------------------------------------

void test_messages() {
  const std::vector<size_t> sizes = {0, 1, 2039, 2040, 2041, 5000, 1 << 20};
  const auto thrown = on_ranks(3, 20, [&](WireFabric& fabric, Post&) {
    for (const size_t size : sizes) {
      std::string message(size, 'x');
      for (size_t i = 0; i < size; ++i) message[i] = static_cast<char>(i * 31 + size);
      if (fabric.rank() == 0) {
        fabric.tell(message);
      } else {
        expect(fabric.hear("a message") == message, "heard as told");
      }
      const auto all = fabric.gather(message + std::to_string(fabric.rank()), "a message");
      if (fabric.rank() != 0) continue;
      for (size_t r = 0; r < all.size(); ++r)
        expect(all[r] == message + std::to_string(r), "gathered in the order of ranks");
    }
    fabric.leave();
  });
  for (const std::string& error : thrown) expect(error.empty(), "no error: " + error);
}

void test_handshake() {
  const Paper paper = {{"version", "1"}, {"fuel fingerprint", "ab"}, {"page size", "4096"}};
  for (size_t field = 0; field <= paper.size(); ++field) {
    const auto thrown = on_ranks(3, 5, [&](WireFabric& fabric, Post&) {
      Paper mine = paper;
      if (fabric.rank() == 2 && field < paper.size()) mine[field].second = "other";
      compare_papers(fabric, mine);
      std::vector<int64_t> numbers = {10 + fabric.rank(), 10 - fabric.rank()};
      least_of_all(fabric, numbers, "numbers");
      expect(numbers == std::vector<int64_t>({10, 8}), "the least of all");
      fabric.leave();
    });
    const std::string wanted = field == paper.size() ? ""
                                                     : "boosters: " + paper[field].first + ": rank 0 has " +
                                                           paper[field].second + ", rank 2 has other";
    for (const std::string& error : thrown) expect(error == wanted, "handshake: " + error);
  }
}

// --- what goes wrong ------------------------------------------------------------------------------------------

void test_failure_reaches_all() {
  const auto start = std::chrono::steady_clock::now();
  const auto thrown = on_ranks(3, 30, [&](WireFabric& fabric, Post&) {
    if (fabric.rank() == 1) {
      fabric.fail("expert 5 of layer 3: the file shrank", "a hint");
      expect(fabric.failed() && fabric.rank0_knows(), "rank 0 knows");
      return;
    }
    if (fabric.rank() == 0) fabric.gather("", "figures");
    fabric.hear("its next call");
  });
  expect(thrown[0] == "boosters: rank 1: expert 5 of layer 3: the file shrank",
         "rank 0 says it: " + thrown[0]);
  expect(thrown[2] == thrown[0], "so does rank 2: " + thrown[2]);
  expect(std::chrono::steady_clock::now() - start < std::chrono::seconds(10), "at once");
}

// A rank that answers nothing and gives no sign of life; one that lives and does not come; and one that takes its time
// where it may.
void test_limits() {
  for (const bool dead : {true, false}) {
    const auto start = std::chrono::steady_clock::now();
    const auto thrown = on_ranks(3, 0.5, [&](WireFabric& fabric, Post& post) {
      if (fabric.rank() == 1) {
        if (dead) {
          const std::lock_guard lock(post.mutex);
          post.dead[1] = true;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1500));
        return;
      }
      std::vector<char> bytes(64);
      const RowBlock block{1, 1, bytes.data(), 64};
      fabric.receive_rows({&block, 1}, "rows of layer 4 in step 9");
      fabric.wait_rows();
    });
    const std::string want = dead ? "gives no sign of life" : "lives but does not get there";
    expect(has(thrown[0], "waited") && has(thrown[0], "for rows of layer 4 in step 9 from rank 1") &&
               has(thrown[0], want),
           "who waited for what: " + thrown[0]);
    expect(std::chrono::steady_clock::now() - start < std::chrono::seconds(5), "within the limit");
  }
  const auto thrown = on_ranks(2, 0.4, [&](WireFabric& fabric, Post&) {
    if (fabric.rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      fabric.tell("at last");
    } else {
      expect(fabric.hear("its next call") == "at last", "whoever lives may take its time");
    }
    fabric.leave();
  });
  for (const std::string& error : thrown) expect(error.empty(), "no error: " + error);
}

// What devices exchange among themselves may take as long as it likes while something still comes.
void test_watch() {
  for (const bool dead : {true, false}) {
    const auto thrown = on_ranks(3, 1.0, [&](WireFabric& fabric, Post& post) {
      if (fabric.rank() == 1) {
        if (dead) {
          const std::lock_guard lock(post.mutex);
          post.dead[1] = true;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(5000));
        return;
      }
      const auto start = std::chrono::steady_clock::now();
      const auto so_far = [&] {
        return (std::chrono::steady_clock::now() - start) / std::chrono::milliseconds(100);
      };
      fabric.watch([&]() -> int64_t { return so_far() < 15 ? so_far() : -1; }, "what comes");
      expect(so_far() >= 15, "watched to its end");
      fabric.watch([] { return int64_t{5}; }, "rows of step 9");
    });
    const std::string want =
        dead ? "from rank 1, which gives no sign of life" : "which lives but does not get there";
    expect(has(thrown[0], "waited") && has(thrown[0], "for rows of step 9 from rank") && has(thrown[0], want),
           "who waited for what: " + thrown[0]);
  }
}

// A rank's goodbye may come before what it sent earlier.
void test_last_words() {
  const auto thrown = on_ranks(2, 5, [&](WireFabric& fabric, Post& post) {
    {
      const std::lock_guard lock(post.mutex);
      post.slow_channel = 2;  // messages
      post.slow_until = std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
    }
    const std::vector<std::string> all = fabric.gather("from " + std::to_string(fabric.rank()), "last words");
    if (fabric.rank() == 0) expect(all.size() == 2 && all[1] == "from 1", "the last words");
  });
  for (const std::string& error : thrown) expect(error.empty(), "no error: " + error);
}

void test_one_that_has_left() {
  const auto thrown = on_ranks(2, 5, [&](WireFabric& fabric, Post&) {
    if (fabric.rank() == 0) {
      fabric.set_limit(0.5);
      fabric.leave();
    } else {
      fabric.hear("its next call");
    }
  });
  expect(has(thrown[1], "rank 1 waited") && has(thrown[1], "from rank 0, which has ended"), thrown[1]);
}

}  // namespace

int main() {
  test_rows();
  test_out_of_step();
  test_parts();
  test_parts_out_of_step();
  test_messages();
  test_handshake();
  test_failure_reaches_all();
  test_limits();
  test_watch();
  test_last_words();
  test_one_that_has_left();
  return check::finish("test_fabric");
}
