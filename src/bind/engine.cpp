#include "bind/engine.h"

#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "runtime/engine.h"
#include "runtime/score.h"

namespace py = pybind11;

namespace rocket::bind {
namespace {

using FloatArray = py::array_t<float, py::array::c_style | py::array::forcecast>;

struct PyRow {
  Row row;
  std::vector<float> embedding;
  bool has_embedding = false;
};

py::array_t<float> to_array(const float* values, py::ssize_t rows, py::ssize_t columns) {
  py::array_t<float> array({rows, columns});
  if (rows * columns > 0)
    std::memcpy(array.mutable_data(), values, static_cast<size_t>(rows * columns) * sizeof(float));
  return array;
}

py::dict info_dict(const EngineInfo& i) {
  py::dict d;
#define FIELD(name) d[#name] = i.name
  FIELD(fuel);
  FIELD(chemistry);
  FIELD(backend);
  FIELD(prefill_precision);
  FIELD(kv_dtype);
  FIELD(device);
  FIELD(choices);
  FIELD(vocab);
  FIELD(hidden);
  FIELD(layers);
  FIELD(moe_layers);
  FIELD(experts);
  FIELD(topk);
  FIELD(max_context);
  FIELD(max_rows);
  FIELD(max_streams);
  FIELD(max_logits_rows);
  FIELD(threads);
  FIELD(dense_bytes);
  FIELD(expert_bytes);
  FIELD(boosters);
  FIELD(rank);
  FIELD(split_dense);
  FIELD(experts_owned);
  FIELD(owned_bytes);
  FIELD(slot_bytes);
  FIELD(slots);
  FIELD(expert_store);
  FIELD(bank_bytes);
  FIELD(slots_requested);
  FIELD(cache_bytes_requested);
  FIELD(token_bytes);
  FIELD(state_bytes_per_stream);
  FIELD(state_bytes_per_token);
  FIELD(workspace_bytes);
  FIELD(draft_tensors);
  FIELD(vision_tensors);
  FIELD(draft_bytes);
  FIELD(vision_bytes);
#undef FIELD
  return d;
}

py::dict booster_dict(const BoosterStats& b) {
  py::dict d;
  d["rank"] = b.rank;
  d["device"] = b.device;
  d["experts_owned"] = b.experts_owned;
  d["expert_bytes"] = b.expert_bytes;
  d["dense_bytes"] = b.dense_bytes;
  d["rows_sent"] = b.rows_sent;
  d["rows_received"] = b.rows_received;
  d["wait_ms"] = b.wait_ms;
  return d;
}

py::dict hints_dict(const ExpertHintStats& h) {
  py::dict d;
  d["taken"] = h.taken;
  d["useful"] = h.useful;
  d["late"] = h.late;
  d["wasted"] = h.wasted;
  d["on_their_way"] = h.on_their_way;
  d["there"] = h.there;
  d["useful_bytes"] = h.useful_bytes;
  d["late_bytes"] = h.late_bytes;
  d["wasted_bytes"] = h.wasted_bytes;
  return d;
}

// The engine as Python holds it. Calls of several threads take turns: each waits for the lock without the GIL, so that
// the call in progress can take the GIL when it needs it.
class CoreEngine {
 public:
  CoreEngine(const std::string& dir, const std::string& backend, int threads, int64_t max_context,
             int32_t max_rows, int32_t max_streams, const std::string& prefill_precision,
             const std::string& kv_dtype, int64_t expert_cache_bytes, int64_t expert_slots,
             const std::vector<int64_t>& layer_slots, const std::string& expert_slab,
             const std::string& expert_bank, const std::shared_ptr<Fabric>& fabric,
             const std::vector<std::vector<int32_t>>& owners, bool split_dense, const py::object& progress)
      : fabric_(fabric) {
    EngineOptions options;
    options.expert_slab = expert_slab;
    options.expert_bank = expert_bank;
    options.split_dense = split_dense;
    if (fabric) {
      options.fabric = fabric;
      options.split.ranks = fabric->ranks();
      for (const std::vector<int32_t>& layer : owners) {
        options.split.experts = static_cast<int32_t>(layer.size());
        options.split.owner.insert(options.split.owner.end(), layer.begin(), layer.end());
      }
    }
    options.expert_cache = {expert_cache_bytes, expert_slots, layer_slots};
    options.fuel_dir = dir;
    options.backend = backend;
    options.threads = threads;
    options.max_context = max_context;
    options.max_rows = max_rows;
    options.max_streams = max_streams;
    options.prefill_precision = prefill_precision;
    options.kv_dtype = kv_dtype;
    options.progress = [&progress](int64_t done, int64_t total) {
      py::gil_scoped_acquire acquire;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      if (!progress.is_none()) progress(done, total);
    };
    py::gil_scoped_release release;
    engine_ = load_engine(options);
  }

  // Holds the engine for one call of one thread. Waits without the GIL.
  class Turn {
   public:
    explicit Turn(const CoreEngine& owner) : owner_(owner) {
      ++owner_.calls_;
      py::gil_scoped_release release;
      owner_.mutex_.lock();
    }
    ~Turn() {
      owner_.mutex_.unlock();
      --owner_.calls_;
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    Engine* operator->() const { return &owner_.engine(); }

   private:
    const CoreEngine& owner_;
  };
  Turn take() const { return Turn(*this); }

  Engine& engine() const {
    if (!engine_) throw InputError("the engine is closed");
    return *engine_;
  }

  void follow() {
    const Turn turn(*this);
    if (!fabric_ || fabric_->rank() == 0)
      throw InputError("follow: expected a rank above 0 of several boosters");
    py::gil_scoped_release release;
    follow_engine(engine(), *fabric_);
  }

  // Waits for the calls of other threads: at the interpreter's end none may be torn out of C++.
  void unload() {
    {
      const Turn turn(*this);
      engine_.reset();
    }
    py::gil_scoped_release release;
    for (int waited_ms = 0; calls_ > 0 && waited_ms < 10000; ++waited_ms) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  void truncate(StreamId stream, int64_t position) {
    const Turn turn(*this);
    py::gil_scoped_release release;
    engine().truncate(stream, position);
  }

  py::tuple step(const std::vector<PyRow>& rows) {
    const Turn turn(*this);
    Step step;
    for (const PyRow& row : rows) {
      step.rows.push_back(row.row);
      if (!row.has_embedding) continue;
      const int32_t hidden = engine().info().hidden;
      if (static_cast<int32_t>(row.embedding.size()) != hidden) {
        throw InputError("embedding: expected " + std::to_string(hidden) + " values, found " +
                         std::to_string(row.embedding.size()));
      }
      step.rows.back().embedding = row.embedding.data();
    }
    StepResult result;
    {
      py::gil_scoped_release release;
      result = engine().step(step);
    }
    last_ = result;
    note_streams(step);
    return py::make_tuple(
        to_array(engine().logits(), static_cast<py::ssize_t>(result.row.size()), engine().info().vocab),
        result.row);
  }

  py::object feed(StreamId stream, const std::vector<int32_t>& ids, const std::string& logits,
                  int32_t chunk) {
    const Turn turn(*this);
    if (logits != "none" && logits != "last" && logits != "all") {
      throw InputError("logits: expected none, last or all, found '" + logits + "'");
    }
    const bool all = logits == "all";
    py::object out = py::none();
    float* to = nullptr;
    const int64_t vocab = engine().info().vocab;
    if (all) {
      py::array_t<float> array({static_cast<py::ssize_t>(ids.size()), static_cast<py::ssize_t>(vocab)});
      to = array.mutable_data();
      out = array;
    }
    check_ids(stream, ids);
    for_chunks(ids.size(), all, chunk, [&](size_t begin, size_t end) {
      Step step = prompt_step(stream, ids, begin, end, all);
      if (logits == "last" && end == ids.size()) step.rows.back().wants_logits = true;
      {
        py::gil_scoped_release release;
        last_ = engine().step(step);
      }
      note_streams(step);
      if (all)
        std::memcpy(to + static_cast<int64_t>(begin) * vocab, engine().logits(),
                    (end - begin) * static_cast<size_t>(vocab) * 4);
    });
    return out;
  }

  py::tuple score(StreamId stream, const std::vector<int32_t>& ids, const std::vector<int32_t>& targets,
                  int32_t chunk) {
    const Turn turn(*this);
    if (ids.size() != targets.size()) {
      throw InputError("score: " + std::to_string(ids.size()) + " tokens and " +
                       std::to_string(targets.size()) + " targets");
    }
    const int32_t vocab = engine().info().vocab;
    for (const int32_t target : targets) {
      if (target < 0 || target >= vocab) {
        throw InputError("score: target id " + std::to_string(target) +
                         " is outside the vocabulary, expected 0 to " + std::to_string(vocab - 1));
      }
    }
    const py::ssize_t n = static_cast<py::ssize_t>(ids.size());
    py::array_t<double> log_prob(n);
    py::array_t<int32_t> rank(n), best(n);
    check_ids(stream, ids);
    for_chunks(ids.size(), true, chunk, [&](size_t begin, size_t end) {
      const Step step = prompt_step(stream, ids, begin, end, true);
      double* const p = log_prob.mutable_data();
      int32_t* const r = rank.mutable_data();
      int32_t* const b = best.mutable_data();
      py::gil_scoped_release release;
      last_ = engine().step(step);
      note_streams(step);
      const float* logits = engine().logits();
      for (size_t i = begin; i < end; ++i) {
        const TokenScore score =
            score_token(logits + static_cast<int64_t>(i - begin) * vocab, vocab, targets[i]);
        p[i] = score.log_prob;
        r[i] = score.rank;
        b[i] = score.best;
      }
    });
    return py::make_tuple(log_prob, rank, best);
  }

  // `stream` >= 0: its last row, which must have had logits in the last step.
  int32_t sample(const SamplingParams& sampling, uint64_t counter, int32_t row, StreamId stream) {
    const Turn turn(*this);
    if (stream >= 0) {
      row = static_cast<int32_t>(last_stream_.size()) - 1;
      while (row >= 0 && last_stream_[static_cast<size_t>(row)] != stream) --row;
      if (row < 0) {
        throw InputError("sample: the engine's last step left no logits of stream " + std::to_string(stream),
                         "feed the stream before drawing from it");
      }
    }
    return engine().sample(row, sampling, counter);
  }

  // feed() and sample() as one call, so that no other thread's step comes between them.
  int32_t prompt(StreamId stream, const std::vector<int32_t>& ids, const SamplingParams& sampling,
                 int32_t chunk) {
    const Turn turn(*this);
    feed(stream, ids, "last", chunk);
    return engine().sample(0, sampling, static_cast<uint64_t>(engine().position(stream)));
  }

  int32_t decode(StreamId stream, int32_t token, const SamplingParams& sampling) {
    const Turn turn(*this);
    Step step;
    Row row;
    row.token = token;
    row.stream = stream;
    row.wants_logits = true;
    step.rows.push_back(row);
    py::gil_scoped_release release;
    return draw_each(step, {sampling})[0];
  }

  // A token of each stream, and a draw for each.
  std::vector<int32_t> decode_batch(const std::vector<StreamId>& streams, const std::vector<int32_t>& tokens,
                                    const std::vector<SamplingParams>& sampling) {
    const Turn turn(*this);
    if (streams.size() != tokens.size() || streams.size() != sampling.size()) {
      throw InputError("decode_batch: " + std::to_string(streams.size()) + " streams, " +
                       std::to_string(tokens.size()) + " tokens and " + std::to_string(sampling.size()) +
                       " sampling params");
    }
    Step step;
    for (size_t i = 0; i < streams.size(); ++i) {
      Row row;
      row.token = tokens[i];
      row.stream = streams[i];
      row.wants_logits = true;
      step.rows.push_back(row);
    }
    py::gil_scoped_release release;
    return draw_each(step, sampling);
  }

  py::array_t<float> last_logits() const {
    const Turn turn(*this);
    return to_array(engine().logits(), static_cast<py::ssize_t>(last_.row.size()), engine().info().vocab);
  }

  py::dict record() const {
    const Turn turn(*this);
    const StepRecord& r = engine().record();
    const auto floats = [](const std::vector<std::vector<float>>& all) {
      py::list list;
      for (const auto& v : all) list.append(py::array_t<float>(static_cast<py::ssize_t>(v.size()), v.data()));
      return list;
    };
    const auto ints = [](const std::vector<std::vector<int32_t>>& all) {
      py::list list;
      for (const auto& v : all)
        list.append(py::array_t<int32_t>(static_cast<py::ssize_t>(v.size()), v.data()));
      return list;
    };
    py::dict d;
    d["hidden"] = floats(r.hidden);
    d["expert_id"] = ints(r.expert_id);
    d["expert_weight"] = floats(r.expert_weight);
    d["selected"] = ints(r.selected);
    return d;
  }

 private:
  // Everything that can be wrong with a prompt, before its first chunk changes the stream.
  void check_ids(StreamId stream, const std::vector<int32_t>& ids) const {
    const EngineInfo& info = engine().info();
    const int64_t end = engine().position(stream) + static_cast<int64_t>(ids.size());
    if (ids.empty()) throw InputError("feed: there are no tokens");
    if (end > info.max_context) {
      throw PlanError("stream " + std::to_string(stream) + ": the context holds " +
                          std::to_string(info.max_context) + " tokens, these would make " +
                          std::to_string(end),
                      "raise --max-context");
    }
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] < 0 || ids[i] >= info.vocab) {
        throw InputError("token " + std::to_string(i) + ": id " + std::to_string(ids[i]) +
                         " is outside the vocabulary, expected 0 to " + std::to_string(info.vocab - 1));
      }
    }
  }

  static Step prompt_step(StreamId stream, const std::vector<int32_t>& ids, size_t begin, size_t end,
                          bool all) {
    Step step;
    for (size_t i = begin; i < end; ++i) {
      Row row;
      row.token = ids[i];
      row.stream = stream;
      row.wants_logits = all;
      row.kind = RowKind::kPrefill;
      step.rows.push_back(row);
    }
    return step;
  }

  // Every row of the step wants logits.
  std::vector<int32_t> draw_each(const Step& step, const std::vector<SamplingParams>& sampling) {
    const std::vector<int32_t> tokens = engine().step_and_sample(step, sampling);
    last_.row.resize(step.rows.size());
    std::iota(last_.row.begin(), last_.row.end(), 0);
    note_streams(step);
    return tokens;
  }

  void note_streams(const Step& step) {
    last_stream_.clear();
    for (const int32_t row : last_.row) last_stream_.push_back(step.rows[static_cast<size_t>(row)].stream);
  }

  template <typename F>
  void for_chunks(size_t count, bool all, int32_t chunk, F&& f) {
    if (chunk < 0)
      throw InputError("chunk: expected 0 (automatic) or more rows, found " + std::to_string(chunk));
    const EngineInfo& info = engine().info();
    int64_t size = chunk > 0 ? std::min(chunk, info.max_rows) : info.max_rows;
    if (all) size = std::min<int64_t>(size, info.max_logits_rows);
    for (size_t begin = 0; begin < count; begin += static_cast<size_t>(size)) {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      f(begin, std::min(count, begin + static_cast<size_t>(size)));
    }
  }

  mutable std::atomic<int> calls_{0};   // that have begun and not returned
  mutable std::recursive_mutex mutex_;  // a signal handler may call in from the thread that holds it
  std::shared_ptr<Fabric> fabric_;      // outlives the engine
  std::unique_ptr<Engine> engine_;
  StepResult last_;
  std::vector<StreamId> last_stream_;  // of each row of last_.logits
};

void add_row(py::module_& m) {
  py::class_<PyRow>(m, "Row").def(
      py::init([](int32_t token, StreamId stream, int64_t position, bool wants_logits, bool checkpoint,
                  bool prefill, const std::optional<FloatArray>& embedding) {
        PyRow r;
        r.row.token = token;
        r.row.stream = stream;
        r.row.position = position;
        r.row.wants_logits = wants_logits;
        r.row.checkpoint = checkpoint;
        r.row.kind = prefill ? RowKind::kPrefill : RowKind::kDecode;
        if (embedding) {
          r.has_embedding = true;
          r.embedding.assign(embedding->data(), embedding->data() + embedding->size());
        }
        return r;
      }),
      py::arg("token") = -1, py::arg("stream") = 0, py::kw_only(), py::arg("position") = -1,
      py::arg("wants_logits") = false, py::arg("checkpoint") = false, py::arg("prefill") = false,
      py::arg("embedding") = py::none());
}

void check_sampling(const SamplingParams& s) {
  const auto bad = [](const char* name, const char* expected, double found) {
    throw InputError(std::string(name) + ": expected " + expected + ", found " + std::to_string(found));
  };
  if (!(s.temperature >= 0) || std::isinf(s.temperature))
    bad("temperature", "a finite number of 0 (greedy) or more", s.temperature);
  if (s.top_k < 0) bad("top_k", "0 (off) or more", s.top_k);
  if (!(s.top_p > 0 && s.top_p <= 1)) bad("top_p", "more than 0, at most 1 (off)", s.top_p);
  if (!(s.min_p >= 0 && s.min_p < 1)) bad("min_p", "0 (off) or more, less than 1", s.min_p);
}

void add_sampling(py::module_& m) {
  py::class_<SamplingParams>(m, "SamplingParams")
      .def(py::init([](float temperature, int32_t top_k, float top_p, float min_p, uint64_t seed) {
             const SamplingParams s{temperature, top_k, top_p, min_p, seed};
             check_sampling(s);
             return s;
           }),
           py::arg("temperature") = 0.0f, py::arg("top_k") = 0, py::arg("top_p") = 1.0f,
           py::arg("min_p") = 0.0f, py::arg("seed") = 0)
      .def_readonly("temperature", &SamplingParams::temperature)
      .def_readonly("top_k", &SamplingParams::top_k)
      .def_readonly("top_p", &SamplingParams::top_p)
      .def_readonly("min_p", &SamplingParams::min_p)
      .def_readonly("seed", &SamplingParams::seed);
}

}  // namespace

void add_engine(py::module_& m) {
  add_row(m);
  add_sampling(m);
  py::class_<CoreEngine>(m, "CoreEngine")
      .def(py::init<const std::string&, const std::string&, int, int64_t, int32_t, int32_t,
                    const std::string&, const std::string&, int64_t, int64_t, const std::vector<int64_t>&,
                    const std::string&, const std::string&, const std::shared_ptr<Fabric>&,
                    const std::vector<std::vector<int32_t>>&, bool, const py::object&>(),
           py::arg("fuel_dir"), py::kw_only(), py::arg("backend") = "auto", py::arg("threads") = 0,
           py::arg("max_context") = 0, py::arg("max_rows") = 0, py::arg("max_streams") = 0,
           py::arg("prefill_precision") = "auto", py::arg("kv_dtype") = "auto",
           py::arg("expert_cache_bytes") = 0, py::arg("expert_slots") = 0,
           py::arg("layer_slots") = std::vector<int64_t>{}, py::arg("expert_slab") = "",
           py::arg("expert_bank") = "auto", py::arg("fabric") = py::none(),
           py::arg("owners") = std::vector<std::vector<int32_t>>{}, py::arg("split_dense") = false,
           py::arg("progress") = py::none())
      .def("info", [](const CoreEngine& e) { return info_dict(e.take()->info()); })
      .def("open", [](CoreEngine& e) { return e.take()->open(); })
      .def(
          "close", [](CoreEngine& e, StreamId s) { e.take()->close(s); }, py::arg("stream"))
      .def(
          "position", [](CoreEngine& e, StreamId s) { return e.take()->position(s); }, py::arg("stream"))
      .def(
          "fork", [](CoreEngine& e, StreamId s) { return e.take()->fork(s); }, py::arg("stream"))
      .def("step", &CoreEngine::step, py::arg("rows"))
      .def("feed", &CoreEngine::feed, py::arg("stream"), py::arg("ids"), py::kw_only(),
           py::arg("logits") = "last", py::arg("chunk") = 0)
      .def("score", &CoreEngine::score, py::arg("stream"), py::arg("ids"), py::arg("targets"),
           py::arg("chunk") = 0)
      .def("sample", &CoreEngine::sample, py::arg("sampling"), py::arg("counter"), py::arg("row") = -1,
           py::arg("stream") = -1)
      .def("prompt", &CoreEngine::prompt, py::arg("stream"), py::arg("ids"), py::arg("sampling"),
           py::arg("chunk") = 0)
      .def("decode", &CoreEngine::decode, py::arg("stream"), py::arg("token"), py::arg("sampling"))
      .def("decode_batch", &CoreEngine::decode_batch, py::arg("streams"), py::arg("tokens"),
           py::arg("sampling"))
      .def("last_logits", &CoreEngine::last_logits)
      .def(
          "commit", [](CoreEngine& e, StreamId s, int32_t rows) { e.take()->commit(s, rows); },
          py::arg("stream"), py::arg("rows"))
      .def(
          "snapshot", [](CoreEngine& e, StreamId s, const std::string& n) { e.take()->snapshot(s, n); },
          py::arg("stream"), py::arg("name"))
      .def(
          "restore", [](CoreEngine& e, const std::string& n) { return e.take()->restore(n); },
          py::arg("name"))
      .def(
          "drop_snapshot", [](CoreEngine& e, const std::string& n) { e.take()->drop_snapshot(n); },
          py::arg("name"))
      .def("snapshots", [](CoreEngine& e) { return e.take()->snapshots(); })
      .def(
          "save_snapshot",
          [](CoreEngine& e, const std::string& n, const std::string& f) { e.take()->save_snapshot(n, f); },
          py::arg("name"), py::arg("file"))
      .def(
          "load_snapshot",
          [](CoreEngine& e, const std::string& n, const std::string& f) { e.take()->load_snapshot(n, f); },
          py::arg("name"), py::arg("file"))
      .def(
          "truncate", [](CoreEngine& e, StreamId s, int64_t p) { e.truncate(s, p); }, py::arg("stream"),
          py::arg("position"))
      .def(
          "state",
          [](CoreEngine& e, StreamId s, const std::string& n) {
            const std::vector<float> v = e.take()->state(s, n);
            return py::array_t<float>(static_cast<py::ssize_t>(v.size()), v.data());
          },
          py::arg("stream"), py::arg("name"))
      .def(
          "hint",
          [](CoreEngine& e, int32_t layer, const std::vector<int32_t>& experts) {
            return e.take()->hint(layer, experts);
          },
          py::arg("layer"), py::arg("experts"))
      .def("stats",
           [](CoreEngine& e) {
             const EngineStats s = e.take()->stats();
             py::dict d;
             d["steps"] = s.steps;
             d["rows"] = s.rows;
             d["steps_recorded"] = s.steps_recorded;
             d["steps_replayed"] = s.steps_replayed;
             d["expert_hits"] = s.expert_hits;
             d["expert_misses"] = s.expert_misses;
             d["expert_evictions"] = s.expert_evictions;
             d["streamed_bytes"] = s.streamed_bytes;
             d["fetch_seconds"] = s.fetch_seconds;
             d["expert_hints"] = hints_dict(s.expert_hints);
             std::vector<std::tuple<int32_t, int64_t, int64_t, int64_t>> layers;
             for (const ExpertLayerStats& l : s.expert_layers)
               layers.emplace_back(l.layer, l.hits, l.misses, l.evictions);
             d["expert_layers"] = layers;
             py::list boosters;
             for (const BoosterStats& b : s.boosters) boosters.append(booster_dict(b));
             d["boosters"] = boosters;
             return d;
           })
      .def(
          "set_profile", [](CoreEngine& e, bool on) { e.take()->set_profile(on); }, py::arg("on"))
      .def("profile",
           [](CoreEngine& e) {
             std::vector<std::tuple<std::string, double, bool>> stages;
             for (const StageTime& s : e.take()->profile()) stages.emplace_back(s.name, s.ms, s.of_which);
             return stages;
           })
      .def(
          "set_diagnostics", [](CoreEngine& e, bool on) { e.take()->set_diagnostics(on); }, py::arg("on"))
      .def("diagnostics",
           [](CoreEngine& e) {
             std::vector<std::pair<double, double>> layers;
             for (const LayerDiagnostics& d : e.take()->diagnostics())
               layers.emplace_back(d.stream_mean_rms, d.router_entropy);
             return layers;
           })
      .def(
          "start_trace", [](CoreEngine& e, const std::string& file) { e.take()->start_trace(file); },
          py::arg("file"))
      .def("stop_trace", [](CoreEngine& e) { return e.take()->stop_trace(); })
      .def(
          "set_record", [](CoreEngine& e, bool on) { e.take()->set_record(on); }, py::arg("on"))
      .def("record", &CoreEngine::record)
      .def("follow", &CoreEngine::follow)
      .def("unload", &CoreEngine::unload);
}

}  // namespace rocket::bind
