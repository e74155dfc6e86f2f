#include "runtime/session.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/dtype.h"
#include "runtime/snapshot_file.h"

namespace rocket {
namespace {

constexpr int32_t kDecodeRows = 16;  // of a step, up to which a row's bits do not depend on the others

std::string number(int64_t value) {
  return std::to_string(value);
}

}  // namespace

Session::Session(std::unique_ptr<Model> model, const SessionLimits& limits)
    : model_(std::move(model)),
      limits_(limits),
      info_(model_->info()),
      pool_(model_->layout(), limits.state_budget_bytes, model_->memory()) {
  info_.max_context = limits.max_context;
  info_.max_rows = limits.max_rows;
  info_.max_streams = limits.max_streams;
  info_.max_logits_rows = model_->max_logits_rows();
  info_.state_bytes_per_stream = model_->layout().stream_bytes();
  info_.state_bytes_per_token = static_cast<int64_t>(std::ceil(model_->layout().token_bytes()));
}

const Session::Stream& Session::stream(StreamId id) const {
  if (id < 0 || static_cast<size_t>(id) >= streams_.size() || !streams_[static_cast<size_t>(id)]) {
    throw InputError("stream " + number(id) + ": not open", "open() gives the id of a new stream");
  }
  return *streams_[static_cast<size_t>(id)];
}

Session::Stream& Session::stream(StreamId id) {
  return const_cast<Stream&>(std::as_const(*this).stream(id));
}

Session::Stream& Session::usable(StreamId id) {
  settle();
  Stream& found = stream(id);
  if (found.broken) {
    throw InputError("stream " + number(id) + ": a step failed half-way, its state is lost",
                     "close it, and feed its tokens again or restore a snapshot");
  }
  return found;
}

StreamId Session::place(std::unique_ptr<StreamState> state) {
  size_t slot = 0;
  while (slot < streams_.size() && streams_[slot]) ++slot;
  if (slot == streams_.size()) {
    if (static_cast<int32_t>(slot) >= limits_.max_streams) {
      throw PlanError("streams: at most " + number(limits_.max_streams) + " may be open, all are",
                      "close one, or raise max_streams");
    }
    streams_.emplace_back();
  }
  streams_[slot].emplace();
  streams_[slot]->state = std::move(state);
  return static_cast<StreamId>(slot);
}

StreamId Session::open() {
  return place(std::make_unique<StreamState>(pool_));
}

void Session::close(StreamId id) {
  stream(id);
  streams_[static_cast<size_t>(id)].reset();
}

int64_t Session::position(StreamId id) const {
  return stream(id).state->position();
}

StreamId Session::fork(StreamId id) {
  return place(std::make_unique<StreamState>(*usable(id).state));
}

void Session::check_row(const Row& row, size_t index, int64_t expected) const {
  const std::string where = "row " + number(static_cast<int64_t>(index));
  if (row.position >= 0 && row.position != expected) {
    throw InputError(where + " of stream " + number(row.stream) + ": expected position " + number(expected) +
                     ", found " + number(row.position));
  }
  if (expected >= limits_.max_context) {
    throw PlanError("stream " + number(row.stream) + ": the context holds " + number(limits_.max_context) +
                        " tokens, one more was fed",
                    "raise --max-context");
  }
  if (row.embedding) {
    for (int32_t i = 0; i < info_.hidden; ++i) {
      if (!std::isfinite(row.embedding[i])) {
        throw InputError(where + ": element " + number(i) + " of the embedding is not finite");
      }
    }
  } else if (row.token < 0 || row.token >= info_.vocab) {
    throw InputError(where + ": token id " + number(row.token) +
                     " is outside the vocabulary, expected 0 to " + number(info_.vocab - 1));
  }
}

// Looks at everything that could be wrong with a step, and changes nothing.
StepPlan Session::check(const Step& step) const {
  const int64_t rows = static_cast<int64_t>(step.rows.size());
  if (rows == 0) throw InputError("step: it has no rows");
  if (rows > limits_.max_rows) {
    throw PlanError("step: at most " + number(limits_.max_rows) + " rows were planned, found " + number(rows),
                    "feed fewer rows, or raise --prefill-chunk");
  }
  StepPlan plan;
  plan.checkpoint.assign(step.rows.size(), nullptr);
  std::vector<StreamId> seen;
  for (size_t i = 0; i < step.rows.size(); ++i) {
    const Row& row = step.rows[i];
    const Stream& owner = const_cast<Session*>(this)->usable(row.stream);
    if (i == 0 || step.rows[i - 1].stream != row.stream) {
      if (std::find(seen.begin(), seen.end(), row.stream) != seen.end()) {
        throw InputError("row " + number(static_cast<int64_t>(i)) + ": the rows of stream " +
                         number(row.stream) + " do not stand together");
      }
      seen.push_back(row.stream);
      plan.segment.push_back({static_cast<int32_t>(i), 0, owner.state->position()});
      plan.stream.push_back(owner.state.get());
      plan.stream_id.push_back(row.stream);
    }
    Segment& segment = plan.segment.back();
    check_row(row, i, segment.position + segment.rows);
    ++segment.rows;
    plan.token.push_back(row.token);
    plan.kind.push_back(row.kind);
    plan.embedding.push_back(row.embedding);
    plan.any_embedding |= row.embedding != nullptr;
    plan.any_checkpoint |= row.checkpoint;
    if (row.wants_logits) plan.logits_row.push_back(static_cast<int32_t>(i));
  }
  if (static_cast<int32_t>(plan.logits_row.size()) > model_->max_logits_rows()) {
    throw PlanError("step: logits of at most " + number(model_->max_logits_rows()) + " rows were planned, " +
                        number(static_cast<int64_t>(plan.logits_row.size())) + " want them",
                    "feed fewer rows at a time");
  }
  return plan;
}

// Takes all memory that the step needs. Throws PlanError with the streams as they were.
void Session::prepare(const Step& step, StepPlan& plan) {
  std::vector<std::map<int32_t, StatePool::Block>> kept(plan.segment.size());
  for (size_t s = 0; s < plan.segment.size(); ++s) {
    const Segment& segment = plan.segment[s];
    for (int32_t i = 0; i < segment.rows; ++i) {
      const size_t row = static_cast<size_t>(segment.first_row + i);
      if (!step.rows[row].checkpoint) continue;
      StatePool::Block block = pool_.recurrent("checkpoint");
      plan.checkpoint[row] = block.get();
      kept[s][i + 1] = std::move(block);
    }
    if (!kept[s].empty()) {
      StatePool::Block before = pool_.recurrent("checkpoint");
      pool_.memory().copy(before.get(), plan.stream[s]->recurrent(),
                          static_cast<size_t>(pool_.layout().recurrent_floats()) * 4);
      kept[s][0] = std::move(before);
    }
    plan.stream[s]->reserve(segment.rows);
  }
  for (size_t s = 0; s < plan.segment.size(); ++s) {
    Stream& owner = stream(step.rows[static_cast<size_t>(plan.segment[s].first_row)].stream);
    owner.checkpoints = std::move(kept[s]);
    owner.step_start = plan.segment[s].position;
  }
}

// A backend that rounds prompts for tensor cores gets decode rows in a pass of their own, so that what shares a step
// with them never changes their bits. A stream with any prompt row counts as a prompt.
std::vector<StepPlan> Session::passes(const Step& step, const StepPlan& plan) {
  std::vector<StepPlan> all;
  StepPlan decode, prompt;
  size_t wanted = 0;
  for (size_t s = 0; s < plan.segment.size(); ++s) {
    const Segment& segment = plan.segment[s];
    const auto first = step.rows.begin() + segment.first_row;
    const bool is_prompt = std::any_of(first, first + segment.rows,
                                       [](const Row& row) { return row.kind == RowKind::kPrefill; });
    StepPlan& to = is_prompt ? prompt : decode;
    to.segment.push_back({to.rows(), segment.rows, segment.position});
    to.stream.push_back(plan.stream[s]);
    to.stream_id.push_back(plan.stream_id[s]);
    for (int32_t i = segment.first_row; i < segment.first_row + segment.rows; ++i) {
      const size_t row = static_cast<size_t>(i);
      if (step.rows[row].wants_logits) {
        if (!plan.sampling.empty()) {
          to.sampling.push_back(plan.sampling[wanted]);
          to.counter.push_back(plan.counter[wanted]);
        }
        to.logits_row.push_back(to.rows());
        ++wanted;
      }
      to.token.push_back(plan.token[row]);
      to.kind.push_back(plan.kind[row]);
      to.embedding.push_back(plan.embedding[row]);
      to.any_embedding |= plan.embedding[row] != nullptr;
      to.checkpoint.push_back(plan.checkpoint[row]);
      to.any_checkpoint |= plan.checkpoint[row] != nullptr;
    }
  }
  decode.tensor_cores = decode.rows() > kDecodeRows;
  prompt.tensor_cores = true;
  prompt.first_logit = static_cast<int32_t>(decode.logits_row.size());
  // Where the logits of each row went: decode rows come first.
  int32_t next[2] = {0, prompt.first_logit};
  for (Wanted& place : wanted_) {
    const bool is_prompt = std::find(prompt.stream.begin(), prompt.stream.end(),
                                     stream(place.stream).state.get()) != prompt.stream.end();
    place.at = next[is_prompt]++;
  }
  for (StepPlan* part : {&decode, &prompt}) {
    if (part->rows() == 0) continue;
    part->continues = !all.empty();
    all.push_back(std::move(*part));
  }
  return all;
}

// Weights or activations that are not finite give no tokens, but an error that says where.
void Session::settle() {
  if (settled_) return;
  settled_ = true;
  const int32_t rows = static_cast<int32_t>(wanted_.size());
  const int32_t bad = model_->first_bad_logits(rows);
  if (bad < 0) return;
  const auto found =
      std::find_if(wanted_.begin(), wanted_.end(), [&](const Wanted& w) { return w.at == bad; });
  const Wanted where = *found;
  for (const Wanted& wanted : wanted_) {
    if (streams_[static_cast<size_t>(wanted.stream)]) stream(wanted.stream).broken = true;
  }
  wanted_.clear();
  throw FuelError("stream " + number(where.stream) + ": the logits after token " + number(where.position) +
                      " are not finite: the weights hold NaN or infinity, or overflow",
                  "check the fuel's files against their publisher's checksums");
}

StepResult Session::run(const Step& step, const std::vector<SamplingParams>* sampling) {
  settle();
  StepPlan plan = check(step);
  if (sampling && sampling->size() != plan.logits_row.size()) {
    throw InputError("step: " + number(static_cast<int64_t>(plan.logits_row.size())) +
                     " rows want logits, and " + number(static_cast<int64_t>(sampling->size())) +
                     " ways to draw from them were given");
  }
  prepare(step, plan);
  if (silent_) plan.logits_row.clear();
  const StepResult result{plan.logits_row};
  wanted_.clear();
  for (const int32_t row : plan.logits_row) {
    size_t s = 0;
    while (s + 1 < plan.segment.size() && plan.segment[s + 1].first_row <= row) ++s;
    wanted_.push_back({static_cast<int32_t>(wanted_.size()), step.rows[static_cast<size_t>(row)].stream,
                       plan.segment[s].position + row - plan.segment[s].first_row});
    if (sampling) plan.counter.push_back(static_cast<uint64_t>(wanted_.back().position + 1));
  }
  if (sampling) plan.sampling = *sampling;
  try {
    if (model_->rounds_prefill()) {
      for (const StepPlan& pass : passes(step, plan)) model_->forward(pass);
    } else {
      model_->forward(plan);
    }
    settled_ = wanted_.empty();
    if (pool_.memory().host()) settle();
  } catch (...) {
    wanted_.clear();
    settled_ = true;
    for (const Segment& segment : plan.segment)
      stream(step.rows[static_cast<size_t>(segment.first_row)].stream).broken = true;
    throw;
  }
  for (size_t s = 0; s < plan.segment.size(); ++s) {
    for (int32_t i = 0; i < plan.segment[s].rows; ++i) {
      const Row& row = step.rows[static_cast<size_t>(plan.segment[s].first_row + i)];
      plan.stream[s]->push(row.token, row.embedding, info_.hidden);
    }
  }
  ++steps_;
  rows_ += plan.rows();
  return result;
}

std::vector<int32_t> Session::step_and_sample(const Step& step, const std::vector<SamplingParams>& sampling) {
  run(step, &sampling);
  std::vector<int32_t> by_place(wanted_.size()), token;
  model_->drawn(static_cast<int32_t>(by_place.size()), by_place.data());
  settle();
  for (const Wanted& wanted : wanted_) token.push_back(by_place[static_cast<size_t>(wanted.at)]);
  return token;
}

const float* Session::logits() {
  settle();
  if (wanted_.empty()) return nullptr;
  const int32_t rows = static_cast<int32_t>(wanted_.size());
  const float* from = model_->logits(rows);
  bool in_order = true;
  for (int32_t i = 0; i < rows; ++i) in_order &= wanted_[static_cast<size_t>(i)].at == i;
  if (in_order) return from;
  const size_t vocab = static_cast<size_t>(info_.vocab);
  ordered_.resize(static_cast<size_t>(rows) * vocab);
  for (size_t i = 0; i < wanted_.size(); ++i) {
    std::memcpy(ordered_.data() + i * vocab, from + static_cast<size_t>(wanted_[i].at) * vocab, vocab * 4);
  }
  return ordered_.data();
}

EngineStats Session::stats() {
  EngineStats stats = model_->stats();
  stats.steps = steps_;
  stats.rows = rows_;
  return stats;
}

std::vector<StageTime> Session::profile() {
  settle();
  return model_->timer().stages();
}

void Session::commit(StreamId id, int32_t rows) {
  Stream& owner = usable(id);
  const int64_t last = owner.state->position() - owner.step_start;
  if (owner.checkpoints.empty()) {
    throw InputError("commit of stream " + number(id) + ": its last step left no checkpoint",
                     "ask for one with Row::checkpoint");
  }
  if (rows < 0 || rows > last) {
    throw InputError("commit of stream " + number(id) + ": expected 0 to " + number(last) + " rows, found " +
                     number(rows));
  }
  if (rows < last) {
    const auto kept = owner.checkpoints.find(rows);
    if (kept == owner.checkpoints.end()) {
      throw InputError("commit of stream " + number(id) + ": row " + number(rows) +
                       " of its last step had no checkpoint");
    }
    owner.state->cut(owner.step_start + rows, std::move(kept->second));
  }
  owner.checkpoints.clear();
}

void Session::snapshot(StreamId id, const std::string& name) {
  if (name.empty()) throw InputError("snapshot: the name is empty");
  snapshots_[name] = std::make_unique<StreamState>(*usable(id).state);
}

const StreamState& Session::named(const std::string& name) const {
  const auto found = snapshots_.find(name);
  if (found != snapshots_.end()) return *found->second;
  std::string known;
  for (const auto& [key, value] : snapshots_) known += (known.empty() ? "" : ", ") + key;
  throw InputError("snapshot '" + name + "': not found",
                   known.empty() ? "there are no snapshots" : "there are: " + known);
}

StreamId Session::restore(const std::string& name) {
  return place(std::make_unique<StreamState>(named(name)));
}

void Session::drop_snapshot(const std::string& name) {
  named(name);
  snapshots_.erase(name);
}

std::vector<std::string> Session::snapshots() const {
  std::vector<std::string> names;
  for (const auto& [name, state] : snapshots_) names.push_back(name);
  return names;
}

void Session::save_snapshot(const std::string& name, const std::string& file) {
  write_snapshot(named(name), pool_, model_->fingerprint(), file);
}

void Session::load_snapshot(const std::string& name, const std::string& file) {
  if (name.empty()) throw InputError("snapshot: the name is empty");
  snapshots_[name] =
      read_snapshot(pool_, model_->fingerprint(), info_.hidden, info_.vocab, limits_.max_context, file);
}

void Session::truncate(StreamId id, int64_t position) {
  Stream& owner = stream(id);  // a broken stream may be brought back this way
  const int64_t now = owner.state->position();
  if (position < 0 || position > now) {
    throw InputError("truncate of stream " + number(id) + ": expected 0 to " + number(now) +
                     " tokens, found " + number(position));
  }
  if (position == now && !owner.broken) return;
  const StreamState* best = nullptr;
  for (const auto& [name, past] : snapshots_) {
    const bool fits = past->position() <= position && owner.state->starts_with(*past);
    if (fits && (!best || past->position() > best->position())) best = past.get();
  }
  replay(id, best ? *best : StreamState(pool_), position);
}

// Makes the stream `past` and feeds it the stream's own tokens up to `position`. On failure the stream is as
// before.
void Session::replay(StreamId id, const StreamState& past, int64_t position) {
  Stream& owner = stream(id);
  Stream before = std::move(owner);
  try {
    owner.state = std::make_unique<StreamState>(past);
    owner.broken = false;
    owner.checkpoints.clear();
    const std::vector<int32_t>& tokens = before.state->tokens();
    const auto& embeddings = before.state->embeddings();
    while (owner.state->position() < position) {
      Step step;
      const int64_t start = owner.state->position();
      for (int64_t at = start; at < std::min<int64_t>(position, start + limits_.max_rows); ++at) {
        Row row;
        row.stream = id;
        row.token = tokens[static_cast<size_t>(at)];
        const auto embedding = embeddings.find(at);
        if (embedding != embeddings.end()) row.embedding = embedding->second.data();
        row.kind = RowKind::kPrefill;
        step.rows.push_back(row);
      }
      this->step(step);
    }
  } catch (...) {
    stream(id) = std::move(before);
    throw;
  }
}

std::vector<int32_t> Session::sample(const std::vector<Draw>& draws) {
  const int32_t rows = static_cast<int32_t>(wanted_.size());
  if (rows == 0) throw InputError("sample: the last step left no logits");
  std::vector<Draw> placed = draws;
  for (Draw& draw : placed) {
    const int32_t row = draw.row < 0 ? draw.row + rows : draw.row;
    if (row < 0 || row >= rows) {
      throw InputError("sample: the last step left logits of " + number(rows) + " rows, row " + number(row) +
                       " is none");
    }
    draw.row = wanted_[static_cast<size_t>(row)].at;
  }
  std::vector<int32_t> token(placed.size());
  model_->sample(placed.data(), static_cast<int32_t>(placed.size()), token.data());
  settle();
  return token;
}

std::vector<float> Session::state(StreamId id, const std::string& name) const {
  const StreamState& state = *stream(id).state;
  const StateLayout& layout = model_->layout();
  std::string known;
  for (const RecurrentPart& part : layout.recurrent()) {
    if (part.name == name) {
      std::vector<float> values(static_cast<size_t>(part.floats));
      pool_.memory().read(values.data(), state.recurrent() + part.offset, values.size() * 4);
      return values;
    }
    known += (known.empty() ? "" : ", ") + part.name;
  }
  for (size_t i = 0; i < layout.paged().size(); ++i) {
    const PagedPart& part = layout.paged()[i];
    if (part.name != name) {
      known += ", " + part.name;
      continue;
    }
    std::vector<char> bytes;
    for (const auto& [from, size] : state.runs(static_cast<int>(i), state.position() / part.tokens_per_row)) {
      bytes.resize(bytes.size() + size);
      pool_.memory().read(bytes.data() + bytes.size() - size, from, size);
    }
    std::vector<float> all(bytes.size() / (part.bf16 ? 2 : 4));
    if (!part.bf16) std::memcpy(all.data(), bytes.data(), bytes.size());
    for (size_t j = 0; part.bf16 && j < all.size(); ++j) {
      uint16_t bits;
      std::memcpy(&bits, bytes.data() + 2 * j, 2);
      all[j] = bf16_to_f32(bits);
    }
    return all;
  }
  throw InputError("state '" + name + "': not found", "there are: " + known);
}

}  // namespace rocket
