// Whole steps of a fuel on the device: a prompt, then decode steps of 1, 2, 4, 8 … streams, and what each stage of a step
// takes.
//
//   bench_gpu_step FUEL [prompt tokens = 512] [steps = 64] [most streams = 8] [expert slots = all, without a cache]
//                  [expert bank = auto]
//
// Tokens are random and the same in every run. Every figure is also a field of a line of results (ROCKET_BENCH_OUT), of
// which `step` names the kind.
#include <chrono>
#include <cmath>
#include <cstdlib>

#include "gpu_bench.h"
#include "runtime/engine.h"

namespace {

using namespace rocket;
using check::ResultLine;
using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

std::vector<int32_t> random_tokens(int32_t count, int32_t vocab) {
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < count; ++i)
    tokens.push_back(static_cast<int32_t>(check::uniform_int(0, vocab - 1)));
  return tokens;
}

// Feeds a prompt in chunks of the engine's rows; the time includes drawing the token that follows.
double feed(Engine& engine, StreamId stream, const std::vector<int32_t>& tokens) {
  const auto start = Clock::now();
  const int32_t chunk = engine.info().max_rows;
  for (size_t begin = 0; begin < tokens.size(); begin += static_cast<size_t>(chunk)) {
    Step step;
    const size_t end = std::min(tokens.size(), begin + static_cast<size_t>(chunk));
    for (size_t i = begin; i < end; ++i) {
      Row row;
      row.token = tokens[i];
      row.stream = stream;
      row.kind = RowKind::kPrefill;
      row.wants_logits = i + 1 == tokens.size();
      step.rows.push_back(row);
    }
    engine.step(step);
  }
  engine.sample(0, {}, tokens.size());
  return ms_since(start);
}

// Median milliseconds of a step of so many streams.
double decode(Engine& engine, int32_t streams, int steps) {
  std::vector<SamplingParams> greedy(static_cast<size_t>(streams));
  std::vector<int32_t> token = random_tokens(streams, engine.info().vocab);
  std::vector<double> ms;
  for (int i = 0; i < steps; ++i) {
    Step step;
    for (int32_t s = 0; s < streams; ++s) {
      Row row;
      row.token = token[static_cast<size_t>(s)];
      row.stream = s;
      row.wants_logits = true;
      step.rows.push_back(row);
    }
    const auto start = Clock::now();
    token = engine.step_and_sample(step, greedy);
    ms.push_back(ms_since(start));
    // Drawn greedily from random weights, streams would soon run alike.
    token = random_tokens(streams, engine.info().vocab);
  }
  std::sort(ms.begin(), ms.end());
  return ms[ms.size() / 2];
}

// What the cache of experts did between two readings of its counters.
void report_misses(const EngineStats& before, const EngineStats& after, const EngineInfo& info,
                   ResultLine& line) {
  const double hits = static_cast<double>(after.expert_hits - before.expert_hits);
  const double misses = static_cast<double>(after.expert_misses - before.expert_misses);
  const double steps = static_cast<double>(after.steps - before.steps);
  const double lookups = steps * info.moe_layers;
  const double bytes = static_cast<double>(after.streamed_bytes - before.streamed_bytes);
  const double seconds = after.fetch_seconds - before.fetch_seconds;
  const double rate = seconds > 0 ? bytes / seconds * 1e-9 : 0.0;
  std::printf("    experts %.1f %% hit, %.2f misses a layer, %.1f MB a step, %.2f GB/s while fetching\n",
              100 * hits / (hits + misses), misses / lookups, bytes * 1e-6 / steps, rate);
  line.add("expert_hits", hits).add("expert_misses", misses).add("expert_hit_rate", hits / (hits + misses));
  line.add("misses_a_layer", misses / lookups).add("streamed_bytes", bytes);
  line.add("bytes_a_step", bytes / steps).add("fetch_seconds", seconds).add("fetch_gb_s", rate);
}

// Median milliseconds of steps of one row, each of a stream that has seen nothing else: its experts are its own. Those of
// a stream of random tokens hardly change from step to step, once it is some tokens long.
constexpr int32_t kFresh = 96, kFreshBefore = 32;

double decode_fresh(Engine& engine, int32_t first, EngineStats* before) {
  const std::vector<int32_t> token = random_tokens(kFresh, engine.info().vocab);
  std::vector<double> ms;
  for (int32_t i = 0; i < kFresh; ++i) {
    if (i == kFreshBefore) *before = engine.stats();
    Row row;
    row.token = token[static_cast<size_t>(i)];
    row.stream = first + i;
    row.wants_logits = true;
    const auto start = Clock::now();
    engine.step_and_sample({{row}}, std::vector<SamplingParams>(1));
    if (i >= kFreshBefore) ms.push_back(ms_since(start));
  }
  std::sort(ms.begin(), ms.end());
  return ms[ms.size() / 2];
}

// Median milliseconds of steps of four rows of one stream, as where rows are checked that were guessed: with `commit` each
// row leaves a checkpoint, and two of the four are kept. Nothing else is fed, so that both ways read the same.
double decode_four(Engine& engine, int steps, bool commit) {
  std::vector<double> ms;
  for (int i = 0; i < steps; ++i) {
    const std::vector<int32_t> token = random_tokens(4, engine.info().vocab);
    Step step;
    for (const int32_t t : token) {
      Row row;
      row.token = t;
      row.wants_logits = true;
      row.checkpoint = commit;
      step.rows.push_back(row);
    }
    const auto start = Clock::now();
    engine.step_and_sample(step, std::vector<SamplingParams>(4));
    if (commit) engine.commit(0, 2);
    ms.push_back(ms_since(start));
  }
  std::sort(ms.begin(), ms.end());
  return ms[ms.size() / 2];
}

// Median microseconds that the host takes to issue a step of one stream.
double issue_us(Engine& engine, int steps) {
  std::vector<double> us;
  for (int i = 0; i < steps; ++i) {
    Row row;
    row.token = random_tokens(1, engine.info().vocab)[0];
    row.wants_logits = true;
    const auto start = Clock::now();
    engine.step({{row}});
    us.push_back(ms_since(start) * 1e3);
    engine.sample(0, {}, 0);
  }
  std::sort(us.begin(), us.end());
  return us[us.size() / 2];
}

void profile(Engine& engine, int32_t streams, int steps) {
  engine.set_profile(true);
  decode(engine, streams, steps);
  for (const StageTime& stage : engine.profile()) {
    const double us = stage.ms * 1e3 / steps;
    std::printf("    %-56s %9.1f us\n", stage.name.c_str(), us);
    ResultLine().add("step", "stage").add("streams", streams).add("stage", stage.name).add("us", us).append();
  }
  engine.set_profile(false);
}

// Bytes/s; not a number where it cannot be measured, as where GPU and host have one memory and it is full of files.
double read_rate() {
  try {
    return device_read_gb_s(0.3) * 1e9;
  } catch (const Error& e) {
    std::fprintf(stderr, "the read rate was not measured: %s\n", e.what());
    return std::nan("");
  }
}

// What runs, on what.
void report_run(const EngineOptions& options, const EngineInfo& info, double rate, double load_s) {
  const double token_bytes = static_cast<double>(info.token_bytes);
  std::string choices;
  for (const std::string& choice : info.choices) {
    std::printf("%s\n", choice.c_str());
    choices += (choices.empty() ? "" : "; ") + choice;
  }
  std::printf("%s on %s, a token reads %.1f MB", options.fuel_dir.c_str(), info.device.c_str(),
              token_bytes * 1e-6);
  if (!std::isnan(rate))
    std::printf(", read rate %.0f GB/s: limit %.1f tok/s", rate * 1e-9, rate / token_bytes);
  std::printf("\n");
  std::printf("loaded in %.1f s\n", load_s);
  ResultLine line;
  line.add("step", "run").add("fuel", options.fuel_dir).add("device", info.device).add("choices", choices);
  line.add("expert_slots", options.expert_cache.slots).add("expert_bank", options.expert_bank);
  line.add("read_gb_s", rate * 1e-9).add("token_bytes", info.token_bytes);
  line.add("limit_tok_s", rate / token_bytes).add("load_seconds", load_s).append();
}

void feed_prompts(Engine& engine, int32_t streams, int prompt) {
  const std::vector<int32_t> tokens = random_tokens(prompt, engine.info().vocab);
  for (int32_t s = 0; s < streams; ++s) {
    const double ms = feed(engine, s, tokens);
    if (s >= 3) continue;
    std::printf("prompt of %d: %.2f ms, %.0f tok/s\n", prompt, ms, prompt / ms * 1e3);
    ResultLine line;
    line.add("step", "prompt").add("stream", s).add("tokens", prompt).add("ms", ms);
    line.add("tok_s", prompt / ms * 1e3).append();
  }
}

// Of 1, 2, 4 … streams.
void decode_streams(Engine& engine, int32_t most, int steps, double rate) {
  const EngineInfo& info = engine.info();
  double one = 0;
  for (int32_t streams = 1; streams <= most; streams *= 2) {
    const EngineStats before = engine.stats();
    const double ms = decode(engine, streams, steps);
    if (streams == 1) one = ms;
    const double tok_s = streams / ms * 1e3, gain = streams * one / ms;
    std::printf("decode, %d streams: %.3f ms a step, %.1f tok/s, %.2fx one stream", streams, ms, tok_s, gain);
    ResultLine line;
    line.add("step", "decode").add("streams", streams).add("steps", steps).add("ms", ms);
    line.add("tok_s", tok_s).add("times_one_stream", gain);
    if (streams == 1) {
      const double fraction = static_cast<double>(info.token_bytes) / ms * 1e3 / rate;
      if (!std::isnan(rate)) std::printf(", %.1f %% of the read rate", 100 * fraction);
      line.add("fraction_of_read_rate", fraction);
    }
    std::printf("\n");
    if (!info.expert_store.empty()) report_misses(before, engine.stats(), info, line);
    std::fflush(stdout);
    line.append();
  }
}

void decode_new_streams(Engine& engine, int32_t first) {
  EngineStats before;
  const double ms = decode_fresh(engine, first, &before);
  std::printf("decode, a new stream each step: %.3f ms, %.1f tok/s\n", ms, 1e3 / ms);
  ResultLine line;
  line.add("step", "decode, new streams").add("ms", ms).add("tok_s", 1e3 / ms);
  report_misses(before, engine.stats(), engine.info(), line);
  line.append();
}

void decode_checked(Engine& engine, int steps) {
  const double four = decode_four(engine, steps, false), checked = decode_four(engine, steps, true);
  std::printf("4 rows of one stream: %.3f ms a step; with checkpoints and commit %.3f ms\n", four, checked);
  ResultLine().add("step", "4 rows").add("ms", four).add("ms_with_commit", checked).append();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: bench_gpu_step FUEL [prompt] [steps] [most streams] [slots] [bank]\n");
    return 2;
  }
  const auto number = [&](int i, int otherwise) { return argc > i ? std::atoi(argv[i]) : otherwise; };
  const int prompt = number(2, 512), steps = number(3, 64), most = number(4, 8);
  try {
    check::append_result("");  // fails before the fuel is loaded
    EngineOptions options;
    options.fuel_dir = argv[1];
    options.backend = "cuda";
    const int slots = number(5, 0);
    options.max_streams = most + (slots > 0 ? kFresh : 0);
    options.max_context = prompt + 24 * steps;
    options.expert_cache.slots = slots;
    if (argc > 6) options.expert_bank = argv[6];
    const auto loading = Clock::now();
    const auto engine = load_engine(options);
    const double load_s = ms_since(loading) * 1e-3;
    const double rate = read_rate();
    report_run(options, engine->info(), rate, load_s);
    for (int32_t s = 0; s < options.max_streams; ++s) engine->open();
    feed_prompts(*engine, most, prompt);
    decode_streams(*engine, most, steps, rate);
    if (slots > 0) decode_new_streams(*engine, most);
    decode_checked(*engine, steps);
    const double issue = issue_us(*engine, 32);
    std::printf("issuing a step of one stream: %.1f us of the host\n", issue);
    ResultLine().add("step", "issue").add("us", issue).append();
    for (const int32_t streams : {1, most}) {
      std::printf("stages of a step of %d, issued call by call:\n", streams);
      profile(*engine, streams, 8);
    }
  } catch (const Error& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
  return 0;
}
