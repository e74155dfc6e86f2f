// CUDA embedding against the CPU's. Exact.
#include "gpu_check.h"

namespace {

using namespace rocket;

struct Case {
  bool bf16;
  int32_t rows, streams;
  int64_t hidden;
  int shift;  // bytes that the table lies off its alignment
  int ready;  // 0: no pointers at all, 1: none set, 2: every other row, whose token is then out of range
};

void compare(check::Gpu& gpu, const Case& c) {
  if (!gpu.takes_case()) return;
  constexpr int32_t kVocab = 37;
  const std::string what = std::string(c.bf16 ? "bf16" : "f32") + " rows " + std::to_string(c.rows) +
                           " streams " + std::to_string(c.streams) + " hidden " + std::to_string(c.hidden) +
                           " shift " + std::to_string(c.shift);
  const std::vector<float> table = check::normal(kVocab * c.hidden);
  std::vector<uint16_t> half;
  for (const float x : table) half.push_back(f32_to_bf16(x));
  std::vector<uint8_t> stored(table.size() * 4 + 16);
  if (c.bf16) {
    std::memcpy(stored.data() + c.shift, half.data(), half.size() * 2);
  } else {
    std::memcpy(stored.data() + c.shift, table.data(), table.size() * 4);
  }
  const std::vector<float> own = check::normal(c.rows * c.hidden);
  const check::DeviceArray<uint8_t> device_table(gpu, stored);
  const check::DeviceArray<float> device_own(gpu, own);
  std::vector<const float*> host_ready, device_ready;
  std::vector<int32_t> token;
  for (int32_t r = 0; r < c.rows; ++r) {
    const bool set = c.ready == 2 && r % 2 == 0;
    token.push_back(set ? -1 : static_cast<int32_t>(check::uniform_int(0, kVocab - 1)));
    host_ready.push_back(set ? own.data() + r * c.hidden : nullptr);
    device_ready.push_back(set ? device_own.data() + r * c.hidden : nullptr);
  }
  const check::DeviceArray<int32_t> device_token(gpu, token);
  const check::DeviceArray<const float*> device_pointers(gpu, device_ready);
  const int64_t n = c.rows * c.streams * c.hidden;
  const check::DeviceArray<float> x(gpu, n);
  const WeightFormat format = c.bf16 ? WeightFormat::kBF16 : WeightFormat::kF32;
  EmbedParams p;
  p.rows = c.rows;
  p.streams = c.streams;
  p.table = Weight{format, kVocab, c.hidden, device_table.data() + c.shift};
  p.token = device_token.data();
  p.embedding = c.ready ? device_pointers.data() : nullptr;
  p.x = x.data();
  gpu.ops.embed(p, gpu.exec);
  const std::vector<float> found = x.get();
  x.check(what);

  std::vector<float> expected(static_cast<size_t>(n), NAN);
  p.table.data = stored.data() + c.shift;
  p.token = token.data();
  p.embedding = c.ready ? host_ready.data() : nullptr;
  p.x = expected.data();
  cpu_ops().embed(p, gpu.cpu.exec);
  check::same_bits(what, found.data(), expected.data(), n);
}

void refuses_other_formats(check::Gpu& gpu) {
  EmbedParams p;
  p.table.format = WeightFormat::kNVFP4;
  p.rows = 1;
  bool refused = false;
  try {
    gpu.ops.embed(p, gpu.exec);
  } catch (const std::exception&) {
    refused = true;
  }
  check::expect(refused, "embed takes no NVFP4 table");
}

void all(check::Gpu& gpu) {
  for (const bool bf16 : {false, true}) {
    for (const Case& c :
         {Case{bf16, 1, 4, 256, 0, 0}, Case{bf16, 3, 4, 1024, 1, 1}, Case{bf16, 64, 4, 77, 3, 2},
          Case{bf16, 17, 1, 16, 0, 2}, Case{bf16, 2, 8, 1, 1, 0}, Case{bf16, 5, 3, 4096, 2, 0},
          Case{bf16, 9, 4, 4096, 0, 2}, Case{bf16, 7, 4, 33, 0, 2}}) {
      compare(gpu, c);
    }
  }
  refuses_other_formats(gpu);
}

}  // namespace

int main() {
  return check::run_on_gpu("gpu_embed", all);
}
