// A device's exchanges with other ranks, which are threads of this process on the host: places, packed and unpacked
// rows, sums and columns are bit by bit those of one rank, call by call and recorded; a rank that is silent ends the wait.
#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "fabric/row_kernels.h"
#include "fabric/staged_exchange.h"
#include "fabric/wire_fabric.h"
#include "gpu_check.h"
#include "thread_wire.h"

namespace {

using namespace rocket;

constexpr int32_t kLayers = 2;
constexpr int kSteps = 4;  // the first is issued call by call, the second recorded, the others replayed

enum class Owners { kMixed, kAllMine, kNoneMine };

struct Case {
  int32_t ranks, device_rank, rows, topk, hidden, experts;
  Owners owners = Owners::kMixed;
  int32_t columns = 0;  // of each rank's part of a sum; 0: no dense weights are shared
};

std::string describe(const Case& c) {
  return std::to_string(c.ranks) + " ranks, device " + std::to_string(c.device_rank) + ", rows " +
         std::to_string(c.rows) + ", top " + std::to_string(c.topk) + " of " + std::to_string(c.experts) +
         ", hidden " + std::to_string(c.hidden) +
         (c.owners == Owners::kMixed     ? ""
          : c.owners == Owners::kAllMine ? ", all are the device's"
                                         : ", none is the device's") +
         (c.columns ? ", parts of " + std::to_string(c.columns) : "");
}

int32_t draw(int32_t low, int32_t high) {
  return std::uniform_int_distribution<int32_t>(low, high)(check::rng());
}

ExpertSplit draw_split(const Case& c) {
  ExpertSplit split{c.ranks, c.experts, {}};
  for (int32_t i = 0; i < kLayers * c.experts; ++i) {
    const int32_t any = draw(0, c.ranks - 1), other = (c.device_rank + 1 + draw(0, c.ranks - 2)) % c.ranks;
    split.owner.push_back(c.owners == Owners::kMixed     ? any
                          : c.owners == Owners::kAllMine ? c.device_rank
                                                         : other);
  }
  return split;
}

// One layer of one step: choices, rows of all experts, and each rank's part of a sum.
struct Layer {
  std::vector<int32_t> id;                // [rows, topk] ascending
  std::vector<float> routed, shared;      // [rows, topk, hidden], [rows, hidden]
  std::vector<std::vector<float>> parts;  // [ranks] of [rows, columns]
};

Layer draw_layer(const Case& c) {
  Layer layer;
  for (int32_t row = 0; row < c.rows; ++row) {
    std::vector<int32_t> all(static_cast<size_t>(c.experts));
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), check::rng());
    std::sort(all.begin(), all.begin() + c.topk);
    layer.id.insert(layer.id.end(), all.begin(), all.begin() + c.topk);
  }
  layer.routed = check::normal(int64_t{c.rows} * c.topk * c.hidden);
  layer.shared = check::normal(int64_t{c.rows} * c.hidden);
  for (int32_t r = 0; r < c.ranks && c.columns; ++r)
    layer.parts.push_back(check::normal(int64_t{c.rows} * c.columns));
  return layer;
}

using Steps = std::vector<std::vector<Layer>>;  // [steps][layers]

std::vector<int32_t> own_of(const ExpertSplit& split, int32_t layer, const std::vector<int32_t>& id,
                            int32_t rank) {
  std::vector<int32_t> own;
  for (const int32_t e : id) own.push_back(split.owner_of(layer, e) == rank ? e : -1);
  return own;
}

// What a rank has before the exchange: its own rows, and nothing that counts in place of the others.
std::vector<float> rows_of(const std::vector<float>& routed, const std::vector<int32_t>& own,
                           int32_t hidden) {
  std::vector<float> mine(routed.size(), NAN);
  for (size_t i = 0; i < own.size(); ++i) {
    const auto at = static_cast<ptrdiff_t>(i) * hidden;
    if (own[i] >= 0) std::copy_n(routed.begin() + at, hidden, mine.begin() + at);
  }
  return mine;
}

// A rank of the host: the exchanges that the CPU backend makes. What went wrong, empty if nothing.
std::string host_rank(WireFabric& fabric, const Case& c, const ExpertSplit& split, const Steps& steps) {
  try {
    RowExchange rows(fabric, split, c.topk, c.hidden, {3, 5});
    PartExchange parts(fabric);
    std::vector<float> wire(
        static_cast<size_t>(RowExchange::buffer_floats(c.ranks, c.rows, c.topk, c.hidden)));
    std::vector<float> buffer(static_cast<size_t>(PartExchange::buffer_floats(c.ranks, c.rows, c.columns)));
    for (const std::vector<Layer>& step : steps) {
      rows.begin_step();
      parts.begin_step();
      for (int32_t l = 0; l < kLayers; ++l) {
        const Layer& layer = step[static_cast<size_t>(l)];
        std::vector<int32_t> own(layer.id.size());
        rows.begin(l, layer.id, own.data(), wire.data());
        std::vector<float> routed = rows_of(layer.routed, own, c.hidden);
        rows.send(routed.data());
        std::vector<float> x, all(static_cast<size_t>(c.ranks * c.rows * c.columns));
        if (c.columns) x = layer.parts[static_cast<size_t>(fabric.rank())];
        if (c.columns) parts.sum(x.data(), c.rows, c.columns, buffer.data(), "a sum");
        rows.finish(routed.data());
        if (std::memcmp(routed.data(), layer.routed.data(), routed.size() * sizeof(float)) != 0)
          return "rank " + std::to_string(fabric.rank()) + " has not every row";
        if (!c.columns) continue;
        const std::vector<float>& mine = layer.parts[static_cast<size_t>(fabric.rank())];
        parts.join(mine.data(), c.rows, c.columns, all.data(), buffer.data(), "columns");
      }
    }
    fabric.leave();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

// All ranks' fabrics over messages in memory; every rank but the device's runs in a thread.
struct Ranks {
  Ranks(int32_t ranks, double limit) {
    post.dead.resize(static_cast<size_t>(ranks));
    for (int32_t r = 0; r < ranks; ++r) {
      wires.push_back(std::make_unique<check::ThreadWire>(post, r, ranks));
      fabrics.push_back(std::make_unique<WireFabric>(*wires.back()));
      fabrics.back()->set_limit(limit);
    }
  }
  check::Post post;
  std::vector<std::unique_ptr<check::ThreadWire>> wires;
  std::vector<std::unique_ptr<WireFabric>> fabrics;
};

Backend::Key next_key(int32_t rows) {
  static int32_t number = 0;
  Backend::Key key;
  key.rows = rows;
  key.first_logit = ++number;
  return key;
}

// A layer's arrays on the device. They stay where they are from step to step, as a recorded step has it.
struct DeviceLayer {
  DeviceLayer(check::Gpu& gpu, const Case& c)
      : id(gpu, int64_t{c.rows} * c.topk),
        own(gpu, int64_t{c.rows} * c.topk),
        routed(gpu, int64_t{c.rows} * c.topk * c.hidden),
        wire(gpu, RowExchange::buffer_floats(c.ranks, c.rows, c.topk, c.hidden)),
        sum(gpu, int64_t{c.rows} * c.hidden),
        x(gpu, int64_t{c.rows} * c.columns),
        mine(gpu, int64_t{c.rows} * c.columns),
        all(gpu, int64_t{c.ranks} * c.rows * c.columns) {}
  void set(const Case& c, const ExpertSplit& split, int32_t l, const Layer& layer) {
    const std::vector<int32_t> of_rank = own_of(split, l, layer.id, c.device_rank);
    id.set(layer.id);
    own.set(of_rank);
    routed.set(rows_of(layer.routed, of_rank, c.hidden));
    sum.set(layer.shared);
    if (!c.columns) return;
    x.set(layer.parts[static_cast<size_t>(c.device_rank)]);
    mine.set(layer.parts[static_cast<size_t>(c.device_rank)]);
    all.set(std::vector<float>(static_cast<size_t>(all.count()), NAN));
  }
  void check(const std::string& what) const {
    for (const auto* each : {&routed, &wire, &sum, &x, &mine, &all}) each->check(what);
    id.check(what);
    own.check(what);
  }
  check::DeviceArray<int32_t> id, own;
  check::DeviceArray<float> routed, wire, sum, x, mine, all;
};

void issue(check::Gpu& gpu, const Case& c, Exchange& exchange, int32_t l, DeviceLayer& d) {
  const auto choices = static_cast<size_t>(c.rows) * static_cast<size_t>(c.topk);
  exchange.rows->begin(l, {d.id.data(), choices}, d.own.data(), d.wire.data());
  exchange.rows->send(d.routed.data());
  if (c.columns) exchange.parts->sum(d.x.data(), c.rows, c.columns, nullptr, "a sum");
  exchange.rows->finish(d.routed.data());
  ExpertSumParams p;
  p.out = d.routed.data();
  p.shared = p.y = d.sum.data();
  p.rows = c.rows;
  p.topk = c.topk;
  p.hidden = c.hidden;
  gpu.ops.expert_sum(p, gpu.exec);
  if (c.columns) exchange.parts->join(d.mine.data(), c.rows, c.columns, d.all.data(), nullptr, "columns");
}

// One rank's sum: ((out[0] + out[1]) + …) + shared.
std::vector<float> sum_of(const Case& c, const Layer& layer) {
  std::vector<float> y = layer.shared;
  const auto H = static_cast<size_t>(c.hidden), K = static_cast<size_t>(c.topk);
  for (size_t i = 0; i < y.size(); ++i) {
    const float* from = layer.routed.data() + i / H * K * H + i % H;
    float sum = from[0];
    for (size_t j = 1; j < K; ++j) sum += from[j * H];
    y[i] = sum + layer.shared[i];
  }
  return y;
}

void check_layer(const Case& c, const ExpertSplit& split, const DeviceLayer& d, const Layer& layer, int32_t l,
                 const std::string& what) {
  const auto count = [](const std::vector<float>& v) { return static_cast<int64_t>(v.size()); };
  check::same_bits(what + ": rows", d.routed.get().data(), layer.routed.data(), count(layer.routed));
  check::same_bits(what + ": sum", d.sum.get().data(), sum_of(c, layer).data(), d.sum.count());
  const std::vector<int32_t> own = own_of(split, l, layer.id, c.device_rank);
  check::equal(what + ": own choices stay", d.own.get().data(), own.data(), d.own.count());
  d.check(what);
  if (!c.columns) return;
  std::vector<float> x = layer.parts[0], all(static_cast<size_t>(d.all.count()));
  const auto columns = static_cast<size_t>(c.columns), ranks = static_cast<size_t>(c.ranks);
  for (size_t r = 0; r < ranks; ++r) {
    for (size_t i = 0; i < x.size(); ++i) {
      if (r > 0) x[i] += layer.parts[r][i];
      all[(i / columns * ranks + r) * columns + i % columns] = layer.parts[r][i];
    }
  }
  check::same_bits(what + ": parts summed", d.x.get().data(), x.data(), count(x));
  check::same_bits(what + ": columns", d.all.get().data(), all.data(), count(all));
}

ExchangeConfig config_of(const Case& c, const ExpertSplit& split) {
  ExchangeConfig config;
  config.split = split;
  config.topk = c.topk;
  config.hidden = c.hidden;
  config.numbers = {3, 5};
  config.max_rows = c.rows;
  config.split_dense = c.columns > 0;
  config.part_floats = int64_t{c.rows} * c.columns;
  return config;
}

void exchanges(check::Gpu& gpu, const Case& c) {
  if (!gpu.takes_case()) return;
  const std::string what = describe(c);
  const ExpertSplit split = draw_split(c);
  Steps steps(kSteps);
  for (std::vector<Layer>& step : steps) {
    for (int32_t l = 0; l < kLayers; ++l) step.push_back(draw_layer(c));
  }
  Ranks ranks(c.ranks, 30);
  std::vector<std::string> errors(static_cast<size_t>(c.ranks));
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < c.ranks; ++r) {
    if (r == c.device_rank) continue;
    const auto i = static_cast<size_t>(r);
    threads.emplace_back([&, i] { errors[i] = host_rank(*ranks.fabrics[i], c, split, steps); });
  }
  WireFabric& fabric = *ranks.fabrics[static_cast<size_t>(c.device_rank)];
  try {
    Exchange exchange = make_staged_exchange(fabric, config_of(c, split), gpu.exec, gpu.memory());
    std::vector<std::unique_ptr<DeviceLayer>> layers;
    for (int32_t l = 0; l < kLayers; ++l) layers.push_back(std::make_unique<DeviceLayer>(gpu, c));
    const Backend::Key key = next_key(c.rows);
    for (size_t s = 0; s < steps.size(); ++s) {
      for (int32_t l = 0; l < kLayers; ++l)
        layers[static_cast<size_t>(l)]->set(c, split, l, steps[s][static_cast<size_t>(l)]);
      exchange.rows->begin_step();
      if (exchange.parts) exchange.parts->begin_step();
      gpu.backend->run(key, [&] {
        for (int32_t l = 0; l < kLayers; ++l) issue(gpu, c, exchange, l, *layers[static_cast<size_t>(l)]);
      });
      exchange.rows->end_step();
      for (int32_t l = 0; l < kLayers; ++l)
        check_layer(c, split, *layers[static_cast<size_t>(l)], steps[s][static_cast<size_t>(l)], l,
                    what + ", step " + std::to_string(s) + ", layer " + std::to_string(l));
    }
    fabric.leave();
  } catch (const Error& error) {
    errors[static_cast<size_t>(c.device_rank)] = error.what();
    fabric.fail("the device's rank failed", "");
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) check::expect(error.empty(), what + ": " + error);
}

// Where rows lie, against the layout that the host reads and writes.
void places(check::Gpu& gpu, int32_t ranks, int64_t n, int32_t hidden) {
  if (!gpu.takes_case()) return;
  constexpr int64_t kStamp = 16;
  constexpr int32_t kExperts = 50;
  std::vector<int32_t> id, owner;
  for (int64_t i = 0; i < n; ++i) id.push_back(draw(0, kExperts - 1));
  for (int32_t e = 0; e < kExperts; ++e) owner.push_back(draw(0, ranks - 1));
  std::vector<int64_t> expected(static_cast<size_t>(n));
  int64_t at = 0;
  for (int32_t r = 0; r < ranks; ++r) {
    at += kStamp;
    for (size_t i = 0; i < id.size(); ++i) {
      if (owner[static_cast<size_t>(id[i])] != r) continue;
      expected[i] = at;
      at += hidden;
    }
  }
  const check::DeviceArray<int32_t> d_id(gpu, id), d_owner(gpu, owner), copy(gpu, n);
  const check::DeviceArray<int64_t> place(gpu, n);
  cuda::RowPlaces p;
  p.id = d_id.data();
  p.owner = d_owner.data();
  p.n = n;
  p.ranks = ranks;
  p.hidden = hidden;
  p.stamp_floats = kStamp;
  p.place = place.data();
  p.host_copy = copy.data();
  cuda::place_rows(p, nullptr, gpu.exec);
  const std::string what = "places of " + std::to_string(n) + " rows of " + std::to_string(ranks) + " ranks";
  check::equal(what, place.get().data(), expected.data(), n);
  check::equal(what + ": the choices again", copy.get().data(), id.data(), n);
  place.check(what);
  copy.check(what);
}

// Rows out of all that another rank has sent, as they lie there, and what is noted of them.
void takes(check::Gpu& gpu, int32_t ranks, int32_t rows, int32_t topk, int32_t hidden, int32_t wrong) {
  if (!gpu.takes_case()) return;
  const Case c = {ranks, 0, rows, topk, hidden, 40};
  const ExpertSplit split = draw_split(c);
  const Layer layer = draw_layer(c);
  const std::vector<int32_t> owner(split.owner.begin(), split.owner.begin() + c.experts);
  const std::vector<int32_t> own = own_of(split, 0, layer.id, 0);
  const auto n = static_cast<int64_t>(layer.id.size());
  const check::DeviceArray<int32_t> id(gpu, layer.id), d_owner(gpu, owner);
  check::DeviceArray<int32_t> other(gpu, n);
  const check::DeviceArray<float> routed(gpu, rows_of(layer.routed, own, hidden));
  check::DeviceArray<float> sent(gpu, n * hidden);
  check::DeviceArray<cuda::ExchangeNotes> notes(gpu, std::vector<cuda::ExchangeNotes>(1));
  const std::string what = "rows taken, " + describe(c);
  int64_t others = 0;
  for (int32_t from = 1; from < ranks; ++from) {
    std::vector<int32_t> their = layer.id;
    for (int32_t i = 0; i < wrong; ++i) ++their[static_cast<size_t>(i) * 2];
    other.set(their);
    sent.set(rows_of(layer.routed, own_of(split, 0, layer.id, from), hidden));
    cuda::TakenRows p;
    p.id = id.data();
    p.other_id = other.data();
    p.owner = d_owner.data();
    p.n = n;
    p.hidden = hidden;
    p.from = from;
    p.rows = sent.data();
    p.routed = routed.data();
    p.notes = notes.data();
    cuda::take_rows(p, nullptr, gpu.exec);
    cuda::note_reached(notes.data(), gpu.exec);
    const cuda::ExchangeNotes found = notes.get()[0];
    check::expect(found.own == std::count_if(own.begin(), own.end(), [](int32_t e) { return e >= 0; }),
                  what + ": own choices are counted");
    check::expect(found.wrong == wrong && found.taken > 0 && found.reached >= found.taken, what + ": notes");
    others += found.others;
  }
  check::expect(others == std::count(own.begin(), own.end(), -1), what + ": the others' are counted");
  check::same_bits(what, routed.get().data(), layer.routed.data(), routed.count());
  routed.check(what);
  notes.check(what);
}

// What is waited for parts adds up from note to note.
void waits(check::Gpu& gpu) {
  if (!gpu.takes_case()) return;
  constexpr int32_t kCount = 300;
  const check::DeviceArray<float> x(gpu, check::normal(kCount)), all(gpu, kCount);
  const check::DeviceArray<cuda::PartClock> clock(gpu, std::vector<cuda::PartClock>(1));
  const check::DeviceArray<uint64_t> waited(gpu, std::vector<uint64_t>(1));
  cuda::PartSum sum;
  sum.x = x.data();
  sum.count = kCount;
  cuda::PartJoin join;
  join.mine = x.data();
  join.rows = 1;
  join.columns = kCount;
  join.all = all.data();
  sum.ranks = join.ranks = 1;
  sum.clock = join.clock = clock.data();
  sum.waited = join.waited = waited.data();
  uint64_t before = 0;
  for (int turn = 0; turn < 4; ++turn) {
    cuda::note_reached(clock.data(), gpu.exec);
    if (turn % 2 == 0) cuda::sum_parts(sum, gpu.exec);
    if (turn % 2 == 1) cuda::join_parts(join, gpu.exec);
    const uint64_t now = waited.get()[0];
    check::expect(now >= before && now - before < 1'000'000'000, "a wait is added, in nanoseconds");
    check::expect(now == clock.get()[0].waited, "what the host sees is what the device has");
    before = now;
  }
  check::expect(before > 0, "waits are counted");
  clock.check("the clock of parts");
  waited.check("what was waited for parts");
}

// Nobody answers: the step ends within the limit and says who waited for what, and so do steps after it.
void silence(check::Gpu& gpu) {
  const Case c = {2, 0, 3, 2, 16, 6, Owners::kNoneMine};
  const ExpertSplit split = draw_split(c);
  const Layer layer = draw_layer(c);
  Ranks ranks(2, 0.5);
  {
    const std::lock_guard lock(ranks.post.mutex);
    ranks.post.dead[1] = true;
  }
  Exchange exchange = make_staged_exchange(*ranks.fabrics[0], config_of(c, split), gpu.exec, gpu.memory());
  DeviceLayer d(gpu, c);
  d.set(c, split, 0, layer);
  const Backend::Key key = next_key(c.rows);
  for (int step = 0; step < 3; ++step) {
    const auto start = std::chrono::steady_clock::now();
    exchange.rows->begin_step();
    std::string error;
    try {
      gpu.backend->run(key, [&] { issue(gpu, c, exchange, 0, d); });
      exchange.rows->end_step();
    } catch (const Error& thrown) {
      error = thrown.what();
    }
    check::expect(error.find("rank 0 waited") != std::string::npos &&
                      error.find("for rows of layer 3 in step 1 from rank 1") != std::string::npos,
                  "who waited for what: " + error);
    check::expect(std::chrono::steady_clock::now() - start < std::chrono::seconds(10), "within the limit");
  }
}

void all(check::Gpu& gpu) {
  for (const int32_t ranks : {1, 2, 3, 7}) {
    for (const int64_t n : {1, 8, 31, 32, 33, 512, 1024, 1025, 4096, 70001}) places(gpu, ranks, n, 20);
  }
  for (const int32_t ranks : {2, 3}) {
    for (int32_t device = 0; device < ranks; ++device) {
      for (const int32_t rows : {1, 2, 7, 16, 64}) {
        exchanges(gpu, {ranks, device, rows, 8, 64, 40});
        exchanges(gpu, {ranks, device, rows, 3, 21, 9, Owners::kMixed, 33});
      }
      for (const Owners owners : {Owners::kAllMine, Owners::kNoneMine}) {
        exchanges(gpu, {ranks, device, 1, 8, 64, 40, owners});
        exchanges(gpu, {ranks, device, 9, 4, 36, 12, owners, 20});
      }
    }
    exchanges(gpu, {ranks, 1, 4, 8, 4096, 288, Owners::kMixed, 4096});
    exchanges(gpu, {ranks, 0, 130, 8, 256, 288});  // too many rows to be recorded
  }
  for (const int32_t ranks : {2, 3}) {
    for (const int32_t wrong : {0, 2}) {
      takes(gpu, ranks, 5, 4, 64, wrong);
      takes(gpu, ranks, 40, 8, 21, wrong);
    }
  }
  waits(gpu);
  silence(gpu);
}

}  // namespace

int main() {
  return check::run_on_gpu("gpu_booster_rows", all);
}
