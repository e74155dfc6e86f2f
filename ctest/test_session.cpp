// Streams, checkpoints, forks, snapshots and truncation, operation by operation against a naive model: a list
// of tokens for each stream and snapshot, from which the state is computed afresh after every operation.
#include <unistd.h>

#include <cstdio>
#include <map>
#include <memory>

#include "check.h"
#include "runtime/session.h"

namespace {

constexpr int32_t kVocab = 50, kHidden = 3;

// What a row adds: the token, or the first element of its embedding.
float input(const rocket::StepPlan& step, int32_t row) {
  const float* embedding = step.embedding[static_cast<size_t>(row)];
  return embedding ? 100.0f + embedding[0] : static_cast<float>(step.token[static_cast<size_t>(row)]);
}

// A model whose state is easy to follow: a recurrent number, a paged log of inputs, and a paged sum for every
// two tokens.
class FakeModel : public rocket::Model {
 public:
  FakeModel() : layout_(4) {
    layout_.add_recurrent("hash/0", {2});
    layout_.add_paged("log/0", 1, 1);
    layout_.add_paged("pairs/0", 2, 1);
    layout_.finish();
    info_.vocab = kVocab;
    info_.hidden = kHidden;
    logits_.resize(64 * kVocab);
  }
  const rocket::StateLayout& layout() const override { return layout_; }
  const rocket::EngineInfo& info() const override { return info_; }
  uint64_t fingerprint() const override { return 0x1234; }
  int32_t max_logits_rows() const override { return 8; }

  void forward(const rocket::StepPlan& step) override {
    if (fail_next) {
      fail_next = false;
      throw rocket::DeviceError("planned failure");
    }
    size_t logit = 0;
    for (int32_t s = 0; s < step.segments(); ++s) {
      const rocket::Segment segment = step.segment[static_cast<size_t>(s)];
      for (int32_t i = 0; i < segment.rows; ++i) {
        const int32_t row = segment.first_row + i;
        const int64_t position = segment.position + i;
        float* state = step.stream[static_cast<size_t>(s)]->recurrent();
        state[0] = std::fmod(state[0] * 3 + input(step, row), 1009.0f);
        state[1] += 1;
        const rocket::PagedRows log = paged(step, s, 0), pairs = paged(step, s, 1);
        *log.row(position) = input(step, row);
        if (position % 2 == 1) *pairs.row(position / 2) = input(step, row) + *log.row(position - 1);
        if (float* checkpoint = step.checkpoint[static_cast<size_t>(row)]) {
          std::memcpy(checkpoint, state, 2 * sizeof(float));
        }
        if (logit < step.logits_row.size() && step.logits_row[logit] == row)
          logits_[logit++ * kVocab] = state[0];
      }
    }
  }
  const float* logits(int32_t) override { return logits_.data(); }
  int32_t first_bad_logits(int32_t) override { return -1; }
  void sample(const rocket::Draw* draws, int32_t count, int32_t* token) override {
    for (int32_t i = 0; i < count; ++i) sample_row(draws[i].row, token + i);
  }
  void drawn(int32_t rows, int32_t* token) override {
    for (int32_t i = 0; i < rows; ++i) sample_row(i, token + i);
  }
  rocket::EngineStats stats() override { return stats_; }
  rocket::StageTimer& timer() override { return timer_; }
  void set_diagnostics(bool) override {}
  std::vector<rocket::LayerDiagnostics> diagnostics() const override { return {}; }
  void set_record(bool) override {}
  void start_trace(const std::string&) override {}
  int64_t stop_trace() override { return 0; }
  const rocket::StepRecord& record() const override { return record_; }

  bool fail_next = false;

 private:
  void sample_row(int32_t row, int32_t* token) const {
    *token = static_cast<int32_t>(logits_[static_cast<size_t>(row) * kVocab]) % kVocab;
  }
  rocket::PagedRows paged(const rocket::StepPlan& step, int32_t segment, size_t index) const {
    const rocket::PagedPart& part = layout_.paged()[index];
    return {step.stream[static_cast<size_t>(segment)]->page_table(), part.offset, part.page_rows, part.width};
  }

  rocket::StateLayout layout_;
  rocket::EngineInfo info_;
  rocket::EngineStats stats_;
  rocket::StageTimer timer_;
  rocket::StepRecord record_;
  std::vector<float> logits_;
};

using Tokens = std::vector<int32_t>;  // a negative entry -e stands for an embedding with first element e

float value(int32_t token) {
  return token < 0 ? 100.0f - static_cast<float>(token) : static_cast<float>(token);
}

bool matches(rocket::Session& session, rocket::StreamId stream, const Tokens& tokens) {
  float hash = 0;
  std::vector<float> log, pairs;
  for (const int32_t token : tokens) {
    hash = std::fmod(hash * 3 + value(token), 1009.0f);
    log.push_back(value(token));
    if (log.size() % 2 == 0) pairs.push_back(log[log.size() - 1] + log[log.size() - 2]);
  }
  return session.position(stream) == static_cast<int64_t>(tokens.size()) &&
         session.state(stream, "hash/0") == std::vector<float>{hash, static_cast<float>(tokens.size())} &&
         session.state(stream, "log/0") == log && session.state(stream, "pairs/0") == pairs;
}

template <typename E, typename F>
void throws(const char* what, F&& f) {
  bool thrown = false;
  try {
    f();
  } catch (const E&) {
    thrown = true;
  }
  check::expect(thrown, what);
}

struct Walk {
  static constexpr int kStreams = 6, kRows = 12, kContext = 60;
  FakeModel* model;
  rocket::Session session;
  std::map<rocket::StreamId, Tokens> streams;
  std::map<std::string, Tokens> snapshots;
  std::string file = "/tmp/rocket-session-test-" + std::to_string(getpid()) + ".safetensors";

  Walk() : Walk(std::make_unique<FakeModel>()) {}
  explicit Walk(std::unique_ptr<FakeModel> m)
      : model(m.get()), session(std::move(m), {kContext, kRows, kStreams, 64 << 20}) {}
  ~Walk() { std::remove(file.c_str()); }

  rocket::StreamId any() const {
    auto it = streams.begin();
    std::advance(it, check::uniform_int(0, static_cast<int64_t>(streams.size()) - 1));
    return it->first;
  }

  // Feeds random rows to one or more streams; sometimes with checkpoints, of which one is then committed.
  void step() {
    rocket::Step step;
    std::vector<std::vector<float>> embeddings;
    embeddings.reserve(kRows);
    std::map<rocket::StreamId, int32_t> fed;
    const bool checkpoints = check::uniform_int(0, 1) == 1;
    const std::map<rocket::StreamId, Tokens> before = streams;
    for (auto& [id, tokens] : streams) {
      if (check::uniform_int(0, 2) == 0) continue;
      const int64_t room = std::min<int64_t>({5, kContext - static_cast<int64_t>(tokens.size()),
                                              kRows - static_cast<int64_t>(step.rows.size())});
      for (int64_t i = check::uniform_int(0, 2); i < room; ++i) {
        rocket::Row row;
        row.stream = id;
        row.token = static_cast<int32_t>(check::uniform_int(0, kVocab - 1));
        row.checkpoint = checkpoints;
        int32_t entry = row.token;
        if (check::uniform_int(0, 4) == 0) {
          entry = -static_cast<int32_t>(check::uniform_int(1, 30));
          embeddings.push_back({static_cast<float>(-entry), 0, 0});
          row.embedding = embeddings.back().data();
        }
        tokens.push_back(entry);
        ++fed[id];
        step.rows.push_back(row);
      }
    }
    if (step.rows.empty()) return;
    session.step(step);
    if (!checkpoints) return;
    for (const auto& [id, rows] : fed) {
      const int32_t keep = static_cast<int32_t>(check::uniform_int(0, rows));
      session.commit(id, keep);
      streams[id].resize(before.at(id).size() + static_cast<size_t>(keep));
    }
  }

  void operate() {
    const int64_t what = check::uniform_int(0, 9);
    const bool room = static_cast<int>(streams.size()) < kStreams;
    if (streams.empty() || (what == 0 && room)) {
      streams[session.open()] = {};
    } else if (what == 1 && streams.size() > 1) {
      const auto id = any();
      session.close(id);
      streams.erase(id);
    } else if (what == 2 && room) {
      const auto id = any();
      const Tokens tokens = streams[id];
      streams[session.fork(id)] = tokens;
    } else if (what == 3) {
      const auto id = any();
      const std::string name = "s" + std::to_string(check::uniform_int(0, 3));
      session.snapshot(id, name);
      snapshots[name] = streams[id];
    } else if (what == 4 && room && !snapshots.empty()) {
      const auto& [name, tokens] = *snapshots.begin();
      streams[session.restore(name)] = tokens;
    } else if (what == 5) {
      const auto id = any();
      const int64_t at = check::uniform_int(0, static_cast<int64_t>(streams[id].size()));
      session.truncate(id, at);
      streams[id].resize(static_cast<size_t>(at));
    } else if (what == 6 && !snapshots.empty()) {
      const auto [name, tokens] = *snapshots.rbegin();
      session.save_snapshot(name, file);
      session.drop_snapshot(name);
      session.load_snapshot(name, file);
    } else {
      step();
    }
  }
};

void random_walk() {
  Walk walk;
  for (int i = 0; i < 6000; ++i) {
    walk.operate();
    bool all = true;
    for (const auto& [id, tokens] : walk.streams) all = all && matches(walk.session, id, tokens);
    if (!check::expect(all, "operation " + std::to_string(i) + ": state equals that of the tokens fed"))
      return;
  }
}

rocket::Row token_row(rocket::StreamId stream, int32_t token, bool checkpoint = false) {
  rocket::Row row;
  row.stream = stream;
  row.token = token;
  row.checkpoint = checkpoint;
  return row;
}

void refusals() {
  Walk walk;
  rocket::Session& session = walk.session;
  const auto a = session.open(), b = session.open();
  session.step({{token_row(a, 1), token_row(b, 2)}});
  throws<rocket::InputError>("no rows", [&] { session.step({}); });
  throws<rocket::InputError>("unknown stream", [&] { session.step({{token_row(99, 1)}}); });
  throws<rocket::InputError>("token over the vocabulary",
                             [&] { session.step({{token_row(a, 1), token_row(a, kVocab)}}); });
  throws<rocket::InputError>("negative token", [&] { session.step({{token_row(a, -1)}}); });
  throws<rocket::InputError>("rows apart",
                             [&] { session.step({{token_row(a, 1), token_row(b, 1), token_row(a, 1)}}); });
  throws<rocket::PlanError>("too many rows",
                            [&] { session.step({std::vector<rocket::Row>(13, token_row(a, 1))}); });
  throws<rocket::InputError>("wrong position", [&] {
    rocket::Row row = token_row(a, 1);
    row.position = 5;
    session.step({{row}});
  });
  throws<rocket::InputError>("embedding that is not finite", [&] {
    rocket::Row row = token_row(a, 1);
    const float bad[kHidden] = {0, NAN, 0};
    row.embedding = bad;
    session.step({{row}});
  });
  throws<rocket::InputError>("commit without checkpoints", [&] { session.commit(a, 0); });
  throws<rocket::InputError>("truncate beyond the end", [&] { session.truncate(a, 2); });
  throws<rocket::InputError>("unknown snapshot", [&] { session.restore("nothing"); });
  throws<rocket::InputError>("unknown state", [&] { session.state(a, "nothing"); });
  throws<rocket::Error>("snapshot into a folder that is not there", [&] {
    session.snapshot(a, "x");
    session.save_snapshot("x", "/nonexistent-folder/x.safetensors");
  });
  check::expect(matches(session, a, {1}) && matches(session, b, {2}), "refused calls changed nothing");

  session.step({{token_row(a, 3, true), token_row(a, 4), token_row(a, 5, true)}});
  throws<rocket::InputError>("commit of a row without checkpoint", [&] { session.commit(a, 2); });
  session.commit(a, 1);
  check::expect(matches(session, a, {1, 3}), "commit of the first of three rows");
  throws<rocket::InputError>("second commit", [&] { session.commit(a, 1); });

  walk.model->fail_next = true;
  throws<rocket::DeviceError>("a failing step", [&] { session.step({{token_row(a, 7)}}); });
  throws<rocket::InputError>("a stream whose step failed is not used",
                             [&] { session.step({{token_row(a, 7)}}); });
  session.truncate(a, 2);
  check::expect(matches(session, a, {1, 3}), "truncate brings a broken stream back");

  for (int i = 0; i < 4; ++i) session.open();
  throws<rocket::PlanError>("too many streams", [&] { session.open(); });
}

void draws() {
  rocket::Session session(std::make_unique<FakeModel>(), {100, 12, 4, 1 << 20});
  const auto a = session.open(), b = session.open(), c = session.open();
  const std::vector<rocket::SamplingParams> two(2);
  rocket::Step step{{token_row(a, 7), token_row(b, 11), token_row(c, 3)}};
  step.rows[0].wants_logits = step.rows[2].wants_logits = true;
  throws<rocket::InputError>("fewer ways to draw than rows",
                             [&] { session.step_and_sample(step, {rocket::SamplingParams{}}); });
  check::expect(session.position(a) == 0, "nothing was fed");
  const std::vector<int32_t> tokens = session.step_and_sample(step, two);
  check::expect(tokens == std::vector<int32_t>{7, 3}, "a token for each row that wants logits");
  check::expect(session.sample({{1, {}, 1}, {0, {}, 1}}) == std::vector<int32_t>{3, 7},
                "drawn again, in any order");
}

void budget() {
  auto model = std::make_unique<FakeModel>();
  rocket::Session session(std::move(model), {1000, 12, 4, 700});
  const auto a = session.open();
  int fed = 0;
  throws<rocket::PlanError>("state over its budget", [&] {
    for (; fed < 1000; ++fed) session.step({{token_row(a, fed % kVocab)}});
  });
  Tokens tokens;
  for (int i = 0; i < fed; ++i) tokens.push_back(i % kVocab);
  check::expect(fed > 0 && matches(session, a, tokens), "a refused step leaves the stream as it was");
}

}  // namespace

int main() {
  random_walk();
  refusals();
  draws();
  budget();
  return check::finish("session");
}
