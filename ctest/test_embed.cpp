// Embedding: rows of the table or ready-made rows, copied into all streams. Exact.
#include "ops_check.h"

namespace {

using namespace rocket;
using check::expect;

// `shift` bytes put the table at an odd address, as in a mapped checkpoint.
void run(const OpTable& ops, const std::string& isa, bool bf16, int32_t rows, int32_t streams, int64_t hidden,
         int shift, int ready) {
  constexpr int32_t kVocab = 37;
  const std::string what = isa + (bf16 ? "bf16" : "f32") + " rows " + std::to_string(rows) + " streams " +
                           std::to_string(streams) + " hidden " + std::to_string(hidden);
  std::vector<float> table = check::normal(kVocab * hidden);
  std::vector<uint16_t> half(table.size());
  for (size_t i = 0; i < table.size(); ++i) {
    half[i] = f32_to_bf16(table[i]);
    if (bf16) table[i] = bf16_to_f32(half[i]);
  }
  const size_t bytes = table.size() * (bf16 ? 2 : 4);
  std::vector<uint8_t> stored(bytes + 8);
  std::memcpy(stored.data() + shift, bf16 ? static_cast<void*>(half.data()) : table.data(), bytes);

  // ready: 0 = no pointers at all, 1 = none set, 2 = every other row, whose token is then out of range
  const std::vector<float> own = check::normal(rows * hidden);
  std::vector<const float*> pointer(rows, nullptr);
  std::vector<int32_t> token(rows);
  for (int32_t r = 0; r < rows; ++r) {
    token[r] = static_cast<int32_t>(check::uniform_int(0, kVocab - 1));
    if (ready == 2 && r % 2 == 0) {
      pointer[r] = own.data() + r * hidden;
      token[r] = -1;
    }
  }
  check::Guarded<float> x(rows * streams * hidden);
  EmbedParams p;
  p.table = Weight{bf16 ? WeightFormat::kBF16 : WeightFormat::kF32, kVocab, hidden, stored.data() + shift};
  p.token = token.data();
  p.embedding = ready ? pointer.data() : nullptr;
  p.rows = rows;
  p.streams = streams;
  p.x = x.data();
  check::Bench bench(1 + rows % 3);
  ops.embed(p, bench.exec);

  std::vector<float> expected;
  for (int32_t r = 0; r < rows; ++r) {
    const float* from = pointer[r] ? pointer[r] : table.data() + token[r] * hidden;
    for (int32_t n = 0; n < streams; ++n) expected.insert(expected.end(), from, from + hidden);
  }
  check::same_bits(what, x.data(), expected.data(), x.size());
  x.check(what);
}

void refuses_other_formats(const OpTable& ops) {
  EmbedParams p;
  p.table.format = WeightFormat::kNVFP4;
  p.rows = 1;
  check::Bench bench(1);
  bool refused = false;
  try {
    ops.embed(p, bench.exec);
  } catch (const std::exception&) {
    refused = true;
  }
  expect(refused, "embed takes no NVFP4 table");
}

}  // namespace

int main() {
  check::on_each_isa([](const OpTable& ops, const std::string& isa) {
    for (const bool bf16 : {false, true}) {
      run(ops, isa, bf16, 1, 4, 256, 0, 0);
      run(ops, isa, bf16, 3, 4, 1024, 1, 1);
      run(ops, isa, bf16, 64, 4, 77, 3, 2);
      run(ops, isa, bf16, 17, 1, 16, 0, 2);
      run(ops, isa, bf16, 2, 8, 1, 1, 0);
      run(ops, isa, bf16, 5, 3, 4096, 2, 0);
    }
    refuses_other_formats(ops);
  });
  return check::finish("embed");
}
