// What a program sees of an engine: streams, steps, logits, checkpoints and snapshots. One engine per fuel;
// calls on one engine must not overlap.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "experts/budget.h"
#include "fabric/fabric.h"
#include "fabric/split.h"
#include "ops/sample.h"
#include "runtime/step.h"

namespace rocket {

struct EngineOptions {
  std::string fuel_dir;
  std::string backend = "auto";            // auto | cpu | cuda
  int threads = 0;                         // 0 = all CPUs that this process may use
  std::string prefill_precision = "auto";  // auto | f32 | bf16; auto = bf16 where the backend has it
  std::string kv_dtype = "auto";           // of the latent KV, likewise
  int64_t max_context = 0;                 // tokens a stream may hold; 0 = min(the model's, what fits, 8192)
  int32_t max_rows = 0;     // rows a step may have; 0 = automatic. Prompts are fed in chunks of at most this
  int32_t max_streams = 0;  // streams that may be open at once; 0 = automatic
  // A bounded cache of routed experts, filled as they are asked for: on the CPU from the fuel's files, on a device from
  // the host's memory or from a slab. None given: every expert is resident, on the CPU in the mapped files.
  CacheRequest expert_cache;
  std::string
      expert_slab;  // the folder of the fuel's slab, from which that cache is filled instead; empty: none
  // On a device: yes = all experts in the host's memory; exclusive = those without a slot, which change with the slots'; no
  // = they stay in the slab, from which a thread reads what is missing; auto = the first of these that fits, the last only
  // with a slab. Where the device's memory is the host's, experts that fit are read in place instead, but for no.
  std::string expert_bank = "auto";
  // Several boosters: what joins them, and which owns which expert; every rank loads with the same. Null: one booster.
  // Context, rows and streams that are 0 on other ranks are those of rank 0.
  std::shared_ptr<Fabric> fabric;
  ExpertSplit split;
  bool split_dense = false;  // of the dense weights, too, each has its heads, columns and rows
  // Called while dense weights are read, with bytes done and in all. May throw to stop the load.
  std::function<void(int64_t done, int64_t total)> progress;
};

struct EngineInfo {
  std::string fuel;                  // directory
  std::string chemistry;             // model_type
  std::string backend;               // cpu | cuda
  std::string prefill_precision;     // f32 | bf16
  std::string kv_dtype;              // of the latent KV: f32 | bf16
  std::string device;                // for instance "AMD EPYC, 2 threads, avx512"
  std::vector<std::string> choices;  // each automatic choice, one line
  int32_t vocab = 0, hidden = 0, layers = 0, moe_layers = 0, experts = 0, topk = 0;
  int64_t max_context = 0;
  int32_t max_rows = 0, max_streams = 0, threads = 0;
  int32_t max_logits_rows = 0;  // rows of a step that may want logits
  int64_t dense_bytes = 0;      // resident weights, of this rank
  int64_t expert_bytes = 0;     // all routed experts
  int32_t boosters = 1, rank = 0;
  bool split_dense = false;                    // dense_bytes, token_bytes and the state are a share
  int64_t experts_owned = 0, owned_bytes = 0;  // routed experts that this rank has, of all MoE layers
  int64_t slot_bytes = 0;                      // one expert in slot layout
  int64_t slots = 0;  // slots of the expert cache (all experts where they are used in place)
  std::string
      expert_store;  // where experts are that have no slot, and how they are read: checkpoint, slab, …, host bank;
                     // empty: all are resident or in place
  int64_t bank_bytes = 0;  // of experts in the host's memory, for a device's cache
  int64_t slots_requested = 0, cache_bytes_requested = 0;  // as asked for; 0: no cache was
  int64_t token_bytes = 0;  // weight bytes that one decoded token reads (one embedding row counted)
  int64_t state_bytes_per_stream = 0;  // independent of the context
  int64_t state_bytes_per_token = 0;
  int64_t workspace_bytes = 0;
  int64_t draft_tensors = 0, vision_tensors = 0;  // recognised and left alone
  int64_t draft_bytes = 0, vision_bytes = 0;
};

// Counted for each distinct expert of a step.
struct ExpertLayerStats {
  int32_t layer = 0;  // the model's number
  int64_t hits = 0, misses = 0, evictions = 0;
};

// One of several boosters.
struct BoosterStats {
  int32_t rank = 0;
  std::string device;
  int64_t experts_owned = 0, expert_bytes = 0, dense_bytes = 0;
  int64_t rows_sent = 0,
          rows_received = 0;  // unsummed rows of experts; one that goes to two boosters counts twice
  double wait_ms = 0;         // for rows of others that had not come when they were needed
};

// Of hinted experts that were given a slot: taken = useful + late + wasted + on_their_way + there. Bytes of wasted ones
// only where they were read.
struct ExpertHintStats {
  int64_t taken = 0;
  int64_t useful = 0, late = 0, wasted = 0;  // as src/experts/cache.h says
  int64_t on_their_way = 0, there = 0;       // have their slot, and were not demanded yet
  int64_t useful_bytes = 0, late_bytes = 0, wasted_bytes = 0;
};

struct EngineStats {
  int64_t steps = 0, rows = 0;
  int64_t steps_recorded = 0,
          steps_replayed = 0;  // kinds of steps as CUDA graphs, and steps that were replayed
  int64_t expert_hits = 0, expert_misses = 0, expert_evictions = 0,
          streamed_bytes = 0;    // distinct experts a step
  double fetch_seconds = 0;      // of a bounded cache, while a step waited for experts
  ExpertHintStats expert_hints;  // counted apart from hits, misses and streamed bytes
  std::vector<ExpertLayerStats>
      expert_layers;  // MoE layers; empty where every expert is resident on a device
  std::vector<BoosterStats>
      boosters;  // in the order of ranks; empty with one. All above are then sums over them
};

struct StageTime {
  std::string name;       // as printed: "KDA, 34 layers"
  double ms = 0;          // of the profiled steps together
  bool of_which = false;  // part of the stage before it; stays out of the sum
};

struct LayerDiagnostics {
  double stream_mean_rms =
      0;  // RMS of the mean over residual streams after the layer, last row of the last step
  double router_entropy =
      -1;  // nats over the chosen experts' normalised weights, mean over the step's rows; -1 = dense layer
};

// Which rows of a step wanted logits, in row order.
struct StepResult {
  std::vector<int32_t> row;  // index in the step of each row of logits
};

// A token to draw from a row of the last step's logits.
struct Draw {
  int32_t row = 0;
  SamplingParams sampling;
  uint64_t counter = 0;  // the position of the token that is drawn
};

// Intermediate results of a step for tests; only filled while recording.
struct StepRecord {
  std::vector<std::vector<float>> hidden;       // after each layer [rows, N, H]
  std::vector<std::vector<int32_t>> expert_id;  // each MoE layer [rows, topk], ascending
  std::vector<std::vector<float>> expert_weight;
  std::vector<std::vector<int32_t>>
      selected;  // each sparse-MLA layer: row lengths [rows], then the positions of each row in turn
};

class Engine {
 public:
  virtual ~Engine() = default;

  virtual const EngineInfo& info() const = 0;

  // Streams. Ids are small integers, reused after close().
  virtual StreamId open() = 0;
  virtual void close(StreamId stream) = 0;
  virtual int64_t position(StreamId stream) const = 0;
  virtual StreamId fork(StreamId stream) = 0;  // a new stream with the same past

  // Runs a step. Throws InputError before anything changes if a row cannot be: unknown stream, token outside
  // the vocabulary, position that is not the stream's next, rows of a stream apart, a non-finite embedding;
  // PlanError if it has too many rows or a stream would pass max_context.
  virtual StepResult step(const Step& step) = 0;

  // Runs a step and draws a token from each row that wants logits, as step() and sample() would, with
  // counter = the row's position + 1; `sampling` has an entry for each, in row order. The fastest way to decode.
  virtual std::vector<int32_t> step_and_sample(const Step& step,
                                               const std::vector<SamplingParams>& sampling) = 0;

  // The last step's logits on the host, [rows, vocab], row i for StepResult::row[i]; null if no row wanted any. Valid
  // until the next step. A device may still be at work when step() returns: a failure that shows later, logits that
  // are not finite among them, is thrown by the next call that has to wait for it.
  virtual const float* logits() = 0;

  // After a step with checkpoints: makes `rows` rows of the stream's last step count (1 = the first), drops
  // the rest. Row `rows` must have had a checkpoint, or be the last. rows = 0 goes back to before the step,
  // which must then have had a checkpoint request on any row.
  virtual void commit(StreamId stream, int32_t rows) = 0;

  // Named snapshots of a stream at its present position. They survive the stream.
  virtual void snapshot(StreamId stream, const std::string& name) = 0;
  virtual StreamId restore(const std::string& name) = 0;  // a new stream
  virtual void drop_snapshot(const std::string& name) = 0;
  virtual std::vector<std::string> snapshots() const = 0;
  virtual void save_snapshot(const std::string& name, const std::string& file) = 0;
  virtual void load_snapshot(const std::string& name, const std::string& file) = 0;

  // Experts that a layer (the model's number) may take in its next step, the most likely first. They are read while the
  // link is idle, for a device only until the next step begins; no result depends on them. False: nothing was done, as no cache of experts that takes hints is there.
  // Throws InputError.
  virtual bool hint(int32_t layer, std::span<const int32_t> experts) = 0;

  // Cuts a stream back to its first `position` tokens: the nearest snapshot of its past, then replay.
  virtual void truncate(StreamId stream, int64_t position) = 0;

  // Draws the next token from a row of the last step's logits (index into StepResult::row), or from several rows.
  virtual int32_t sample(int32_t logits_row, const SamplingParams& sampling, uint64_t counter) = 0;
  virtual std::vector<int32_t> sample(const std::vector<Draw>& draws) = 0;

  // State of a stream as float32, for tests (with split dense weights that of this rank's heads): "kda/<layer>" [heads, Dk, Dv], "conv/<layer>" [taps-1, C],
  // "latent/<layer>" [position, width], "pooled/<layer>" [position / pool, D].
  virtual std::vector<float> state(StreamId stream, const std::string& name) const = 0;

  virtual EngineStats stats() = 0;
  virtual void set_profile(bool on) = 0;  // times each stage of the following steps; clears earlier times
  virtual std::vector<StageTime> profile() = 0;
  virtual void set_diagnostics(bool on) = 0;
  virtual std::vector<LayerDiagnostics> diagnostics() const = 0;

  // Writes the routing of every row from here on to a compact trace (src/experts/trace.h), step by step. stop_trace()
  // gives the number of rows, 0 if none was begun, and throws what ended the file early. Throws DeviceError, InputError.
  virtual void start_trace(const std::string& file) = 0;
  virtual int64_t stop_trace() = 0;

  virtual void set_record(bool on) = 0;
  virtual const StepRecord& record() const = 0;
};

// Reads config.json, chooses the engine by model_type and loads the fuel. Throws FuelError, PlanError,
// DeviceError; with several boosters also where they do not agree, and on all of them when it throws on one.
std::unique_ptr<Engine> load_engine(const EngineOptions& options);

// With several boosters, on every rank but 0: makes the calls of rank 0's engine until that is gone. Throws what ends
// the run.
void follow_engine(Engine& engine, Fabric& fabric);

}  // namespace rocket
