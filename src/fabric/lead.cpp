#include "fabric/lead.h"

#include <algorithm>
#include <utility>

#include "fabric/parcel.h"

namespace rocket {
namespace {

enum Order : int32_t {
  kStop,
  kOpen,
  kClose,
  kFork,
  kStep,
  kCommit,
  kSnapshot,
  kRestore,
  kDrop,
  kLoad,
  kTruncate,
  kFigures,
  kHint,
};
constexpr const char* kOrderNames[] = {"stop",     "open",     "close",   "fork", "step",
                                       "commit",   "snapshot", "restore", "drop", "load",
                                       "truncate", "figures",  "hint"};
constexpr int32_t kOrders = sizeof kOrderNames / sizeof *kOrderNames;

struct Head {
  int64_t serial;
  int32_t order;
  int32_t refused;  // the call before threw before it changed anything
};

struct PackedRow {
  int64_t position;
  int32_t token, stream;
  bool logits, checkpoint, embedding;
  RowKind kind;
};

void put_step(ParcelWriter& parcel, const Step& step, int32_t hidden) {
  parcel.put(static_cast<uint64_t>(step.rows.size()));
  for (const Row& row : step.rows) {
    PackedRow packed{};
    packed.position = row.position;
    packed.token = row.token;
    packed.stream = row.stream;
    packed.logits = row.wants_logits;
    packed.checkpoint = row.checkpoint;
    packed.embedding = row.embedding != nullptr;
    packed.kind = row.kind;
    parcel.put(packed);
    if (row.embedding) parcel.array(row.embedding, static_cast<size_t>(hidden));
  }
}

Step get_step(ParcelReader& parcel, std::vector<std::vector<float>>& embeddings) {
  Step step;
  const auto rows = parcel.get<uint64_t>();
  for (uint64_t i = 0; i < rows; ++i) {
    const auto packed = parcel.get<PackedRow>();
    Row row;
    row.position = packed.position;
    row.token = packed.token;
    row.stream = packed.stream;
    row.wants_logits = packed.logits;
    row.checkpoint = packed.checkpoint;
    row.kind = packed.kind;
    if (packed.embedding) {
      parcel.array(embeddings.emplace_back());
      row.embedding = embeddings.back().data();
    }
    step.rows.push_back(row);
  }
  return step;
}

// --- figures --------------------------------------------------------------------------------------------------

std::string pack_stats(const EngineStats& s, const EngineInfo& info, const Fabric& fabric) {
  ParcelWriter parcel;
  for (const int64_t value : {s.expert_hits, s.expert_misses, s.expert_evictions, s.streamed_bytes})
    parcel.put(value);
  parcel.put(s.fetch_seconds);
  parcel.put(s.expert_hints);
  parcel.array(s.expert_layers.data(), s.expert_layers.size());
  const FabricFigures& f = fabric.figures();
  parcel.text(info.device);
  for (const int64_t value :
       {info.experts_owned, info.owned_bytes, info.dense_bytes, f.rows_sent, f.rows_received})
    parcel.put(value);
  parcel.put(f.wait_seconds);
  return parcel.data();
}

void add_hints(ExpertHintStats& all, const ExpertHintStats& one) {
  for (int64_t ExpertHintStats::* const part :
       {&ExpertHintStats::taken, &ExpertHintStats::useful, &ExpertHintStats::late, &ExpertHintStats::wasted,
        &ExpertHintStats::on_their_way, &ExpertHintStats::there, &ExpertHintStats::useful_bytes,
        &ExpertHintStats::late_bytes, &ExpertHintStats::wasted_bytes})
    all.*part += one.*part;
}

void add_stats(EngineStats& all, const std::string& message, int32_t rank) {
  ParcelReader parcel(message);
  for (int64_t* sum : {&all.expert_hits, &all.expert_misses, &all.expert_evictions, &all.streamed_bytes})
    *sum += parcel.get<int64_t>();
  all.fetch_seconds = std::max(all.fetch_seconds, parcel.get<double>());
  add_hints(all.expert_hints, parcel.get<ExpertHintStats>());
  std::vector<ExpertLayerStats> layers;
  parcel.array(layers);
  all.expert_layers.resize(std::max(all.expert_layers.size(), layers.size()));
  for (size_t i = 0; i < layers.size(); ++i) {
    ExpertLayerStats& sum = all.expert_layers[i];
    sum.layer = layers[i].layer;
    sum.hits += layers[i].hits;
    sum.misses += layers[i].misses;
    sum.evictions += layers[i].evictions;
  }
  BoosterStats& booster = all.boosters.emplace_back();
  booster.rank = rank;
  booster.device = parcel.text();
  for (int64_t* value : {&booster.experts_owned, &booster.expert_bytes, &booster.dense_bytes,
                         &booster.rows_sent, &booster.rows_received})
    *value = parcel.get<int64_t>();
  booster.wait_ms = 1000 * parcel.get<double>();
}

// --- following ------------------------------------------------------------------------------------------------

void obey(Session& session, Fabric& fabric, int32_t order, ParcelReader& parcel) {
  switch (order) {
    case kOpen:
      session.open();
      break;
    case kClose:
      session.close(parcel.get<StreamId>());
      break;
    case kFork:
      session.fork(parcel.get<StreamId>());
      break;
    case kStep: {
      std::vector<std::vector<float>> embeddings;
      session.step(get_step(parcel, embeddings));
      break;
    }
    case kCommit: {
      const auto stream = parcel.get<StreamId>();
      session.commit(stream, parcel.get<int32_t>());
      break;
    }
    case kSnapshot: {
      const auto stream = parcel.get<StreamId>();
      session.snapshot(stream, parcel.text());
      break;
    }
    case kRestore:
      session.restore(parcel.text());
      break;
    case kDrop:
      session.drop_snapshot(parcel.text());
      break;
    case kLoad: {
      const std::string name = parcel.text();
      session.load_snapshot(name, parcel.text());
      break;
    }
    case kTruncate: {
      const auto stream = parcel.get<StreamId>();
      session.truncate(stream, parcel.get<int64_t>());
      break;
    }
    case kFigures:
      fabric.gather(pack_stats(session.stats(), session.info(), fabric), "figures");
      break;
    case kHint: {
      const auto layer = parcel.get<int32_t>();
      std::vector<int32_t> experts;
      parcel.array(experts);
      session.hint(layer, experts);
      break;
    }
    default:
      break;
  }
}

// Both ranks must have refused the call before, or neither.
void check_order(const Head& head, int64_t serial, bool refused, const std::string& why,
                 const Fabric& fabric) {
  const std::string me = "rank " + std::to_string(fabric.rank());
  if (head.serial != serial || head.order < 0 || head.order >= kOrders) {
    throw DeviceError("boosters: out of step: " + me + " expected call " + std::to_string(serial) +
                          " of rank 0, found " + std::to_string(head.serial),
                      "start the same version of Rocket on all ranks");
  }
  if ((head.refused != 0) != refused) {
    throw DeviceError("boosters: out of step: call " + std::to_string(serial - 1) + " was " +
                          (refused ? "refused by " + me + " (" + why + ") and not by rank 0"
                                   : "refused by rank 0 and not by " + me),
                      "give all ranks the same memory");
  }
}

}  // namespace

void follow(Session& session, Fabric& fabric) {
  bool refused = false;
  std::string why;
  try {
    for (int64_t serial = 1;; ++serial) {
      const std::string message = fabric.hear("its next call");
      ParcelReader parcel(message);
      const auto head = parcel.get<Head>();
      check_order(head, serial, refused, why, fabric);
      if (head.order == kStop) return;
      refused = false;
      try {
        obey(session, fabric, head.order, parcel);
      } catch (const InputError& error) {
        refused = true;
        why = error.what();
      } catch (const PlanError& error) {
        refused = true;
        why = error.what();
      }
    }
  } catch (const Error& error) {
    fabric.fail(error.what(), error.hint());
    throw;
  } catch (const std::exception& error) {
    fabric.fail(error.what(), "");
    throw;
  }
}

// --- leading --------------------------------------------------------------------------------------------------

Lead::Lead(std::unique_ptr<Session> session, std::shared_ptr<Fabric> fabric)
    : session_(std::move(session)), fabric_(std::move(fabric)) {}

Lead::~Lead() {
  if (fabric_->failed()) return;
  try {
    ParcelWriter parcel;
    parcel.put(Head{++serial_, kStop, refused_});
    fabric_->tell(parcel.data());
  } catch (const Error&) {  // the next use of the fabric says it
  }
}

// What a call throws before it changes anything leaves all ranks as they were. Anything else ends the run: the others
// may be in the midst of a step.
template <typename Write, typename Call>
auto Lead::lead(int32_t order, Write&& write, Call&& call) {
  ParcelWriter parcel;
  parcel.put(Head{++serial_, order, refused_});
  write(parcel);
  fabric_->tell(parcel.data());
  refused_ = false;
  try {
    return call();
  } catch (const InputError&) {
    refused_ = true;
    throw;
  } catch (const PlanError&) {
    refused_ = true;
    throw;
  } catch (const Error& error) {
    fabric_->fail(error.what(), error.hint());
    throw;
  } catch (const std::exception& error) {
    fabric_->fail(error.what(), "");
    throw;
  }
}

StreamId Lead::open() {
  return lead(kOpen, [](ParcelWriter&) {}, [&] { return session_->open(); });
}

void Lead::close(StreamId stream) {
  if (fabric_->failed()) return session_->close(stream);
  lead(kClose, [&](ParcelWriter& p) { p.put(stream); }, [&] { session_->close(stream); });
}

StreamId Lead::fork(StreamId stream) {
  return lead(kFork, [&](ParcelWriter& p) { p.put(stream); }, [&] { return session_->fork(stream); });
}

StepResult Lead::step(const Step& step) {
  return lead(
      kStep, [&](ParcelWriter& p) { put_step(p, step, info().hidden); },
      [&] { return session_->step(step); });
}

std::vector<int32_t> Lead::step_and_sample(const Step& step, const std::vector<SamplingParams>& sampling) {
  const auto wanted =
      std::count_if(step.rows.begin(), step.rows.end(), [](const Row& row) { return row.wants_logits; });
  if (static_cast<size_t>(wanted) != sampling.size())  // the others do not draw, and would not see it
    return session_->step_and_sample(step, sampling);
  return lead(
      kStep, [&](ParcelWriter& p) { put_step(p, step, info().hidden); },
      [&] { return session_->step_and_sample(step, sampling); });
}

void Lead::commit(StreamId stream, int32_t rows) {
  lead(
      kCommit,
      [&](ParcelWriter& p) {
        p.put(stream);
        p.put(rows);
      },
      [&] { session_->commit(stream, rows); });
}

void Lead::snapshot(StreamId stream, const std::string& name) {
  lead(
      kSnapshot,
      [&](ParcelWriter& p) {
        p.put(stream);
        p.text(name);
      },
      [&] { session_->snapshot(stream, name); });
}

StreamId Lead::restore(const std::string& name) {
  return lead(kRestore, [&](ParcelWriter& p) { p.text(name); }, [&] { return session_->restore(name); });
}

void Lead::drop_snapshot(const std::string& name) {
  lead(kDrop, [&](ParcelWriter& p) { p.text(name); }, [&] { session_->drop_snapshot(name); });
}

void Lead::save_snapshot(const std::string& name, const std::string& file) {
  refuse_shares();
  session_->save_snapshot(name, file);
}

// A file would have one rank's heads only.
void Lead::refuse_shares() const {
  if (!info().split_dense) return;
  throw InputError("snapshot file: expected state that is whole on one booster, found heads shared by " +
                       std::to_string(info().boosters) + " (--split-dense)",
                   "keep the snapshot in memory, or run without --split-dense");
}

void Lead::load_snapshot(const std::string& name, const std::string& file) {
  refuse_shares();
  lead(
      kLoad,
      [&](ParcelWriter& p) {
        p.text(name);
        p.text(file);
      },
      [&] { session_->load_snapshot(name, file); });
}

void Lead::truncate(StreamId stream, int64_t position) {
  lead(
      kTruncate,
      [&](ParcelWriter& p) {
        p.put(stream);
        p.put(position);
      },
      [&] { session_->truncate(stream, position); });
}

bool Lead::hint(int32_t layer, std::span<const int32_t> experts) {
  return lead(
      kHint,
      [&](ParcelWriter& p) {
        p.put(layer);
        p.array(experts.data(), experts.size());
      },
      [&] { return session_->hint(layer, experts); });
}

EngineStats Lead::stats() {
  const EngineStats mine = session_->stats();
  EngineStats all;
  all.steps = mine.steps;
  all.rows = mine.rows;
  all.steps_recorded = mine.steps_recorded;
  all.steps_replayed = mine.steps_replayed;
  const std::string own = pack_stats(mine, info(), *fabric_);
  if (fabric_->failed()) {  // what this rank knows
    add_stats(all, own, 0);
    return all;
  }
  const std::vector<std::string> every =
      lead(kFigures, [](ParcelWriter&) {}, [&] { return fabric_->gather(own, "figures"); });
  for (size_t r = 0; r < every.size(); ++r) add_stats(all, every[r], static_cast<int32_t>(r));
  return all;
}

}  // namespace rocket
