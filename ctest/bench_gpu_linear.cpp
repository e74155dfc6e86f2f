// Speed of CUDA linear and head_linear at the shapes of GLM-5.3-Flash on cold weights, beside the device's streaming
// read rate.
//
//   bench_gpu_linear [name]     name: a part of a case's name
#include <algorithm>
#include <memory>

#include "gpu_bench.h"
#include "stored_weight.h"

namespace {

using namespace rocket;
using check::DeviceArray;

constexpr int64_t kCold =
    int64_t{1} << 30;  // bytes of weights that the launches go through, many times the L2 cache

struct Case {
  const char* name;
  std::vector<int64_t> out;
  int64_t in;
  WeightFormat format = WeightFormat::kBF16;
};

const Case kCases[] = {
    {"KDA q k v f g b", {8192, 8192, 8192, 128, 128, 64}, 4096},
    {"KDA f_b", {8192}, 128},
    {"KDA o", {4096}, 8192},
    {"MLA q_a kv_a", {1536, 512}, 4096},
    {"MLA q_b", {16384}, 1536},
    {"MLA o", {4096}, 16384},
    {"indexer k gate weights", {128, 128, 32}, 4096},
    {"indexer q_b", {4096}, 1536},
    {"MLP gate up", {12288, 12288}, 4096},
    {"MLP down", {4096}, 12288},
    {"router BF16", {288}, 4096},
    {"router F32", {288}, 4096, WeightFormat::kF32},
    {"shared gate up", {2048, 2048}, 4096},
    {"shared down", {4096}, 2048},
    {"lm_head", {154880}, 4096},
    {"MLP gate up NVFP4", {12288, 12288}, 4096, WeightFormat::kNVFP4},
    {"MLP down NVFP4", {4096}, 12288, WeightFormat::kNVFP4},
    {"MLP gate up FP8 block", {12288, 12288}, 4096, WeightFormat::kFP8Block},
    {"MLP down MXFP8", {4096}, 12288, WeightFormat::kMXFP8},
};

// Random finite values in every format: BF16 and F32 of size about 1/32, codes of any value but NaN.
DeviceArray<uint8_t> random_bytes(check::Gpu& gpu, WeightFormat format, int64_t bytes) {
  std::vector<uint8_t> v(static_cast<size_t>(bytes + 8));
  uint64_t state = 88172645463325252u;
  for (int64_t i = 0; i < bytes; i += 8) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    uint64_t word = state;
    if (format == WeightFormat::kBF16) word = (word & 0x80ff80ff80ff80ffu) | 0x3c003c003c003c00u;
    if (format == WeightFormat::kF32) word = (word & 0x80ffffff80ffffffu) | 0x3c0000003c000000u;
    if (format == WeightFormat::kFP8Block || format == WeightFormat::kMXFP8) word &= 0xbfbfbfbfbfbfbfbfu;
    std::memcpy(v.data() + i, &word, 8);
  }
  v.resize(static_cast<size_t>(bytes));
  return DeviceArray<uint8_t>(gpu, v);
}

// Scale bytes near 1 in the format's own code.
DeviceArray<uint8_t> scales(check::Gpu& gpu, WeightFormat format, int64_t out, int64_t in) {
  if (format == WeightFormat::kFP8Block) {
    const std::vector<float> v(static_cast<size_t>((out + 127) / 128 * ((in + 127) / 128)), 0.01f);
    std::vector<uint8_t> bytes(v.size() * 4);
    std::memcpy(bytes.data(), v.data(), bytes.size());
    return DeviceArray<uint8_t>(gpu, bytes);
  }
  if (format == WeightFormat::kNVFP4)
    return DeviceArray<uint8_t>(gpu, std::vector<uint8_t>(static_cast<size_t>(out * in / 16), 0x38));
  if (format == WeightFormat::kMXFP8)
    return DeviceArray<uint8_t>(gpu, std::vector<uint8_t>(static_cast<size_t>(out * in / 32), 122));
  return DeviceArray<uint8_t>(gpu, 1);
}

void bench(check::Gpu& gpu, const Case& c, double rate) {
  int64_t bytes = 0, outs = 0;
  for (const int64_t out : c.out) {
    bytes += weight_bytes({c.format, out, c.in, nullptr, nullptr, 1.0f});
    outs += out;
  }
  // Copies of the weights one after the other, each part's rows together.
  const int64_t copies = std::max<int64_t>(2, std::min<int64_t>(256, kCold / bytes));
  const int64_t row_bytes = c.format == WeightFormat::kF32     ? c.in * 4
                            : c.format == WeightFormat::kBF16  ? c.in * 2
                            : c.format == WeightFormat::kNVFP4 ? c.in / 2
                                                               : c.in;
  const DeviceArray<uint8_t> data = random_bytes(gpu, c.format, copies * outs * row_bytes);
  const DeviceArray<uint8_t> scale = scales(gpu, c.format, copies * outs, c.in);
  const int64_t scale_row = c.format == WeightFormat::kNVFP4 ? c.in / 16 : c.in / 32;
  for (const int32_t rows : {1, 2, 4, 8, 16, 64, 512}) {
    if (rows == 512 && outs > 100000) continue;  // no step wants so many rows of logits
    const DeviceArray<float> x(gpu, check::normal(rows * c.in));
    const DeviceArray<float> y(gpu, rows * outs);
    for (const bool tensor : {false, true}) {
      if (tensor != (rows > 16)) continue;
      gpu.exec.tensor_cores = tensor;
      const int launches = static_cast<int>(rows > 16 ? std::min<int64_t>(copies, 8) : copies);
      const double us = check::time_us(gpu, launches, [&](int i) {
        LinearParams p;
        p.x = x.data();
        p.ldx = c.in;
        p.rows = rows;
        int64_t first = i % copies * outs;
        int64_t at = 0;
        for (const int64_t out : c.out) {
          LinearPart& part = p.part[p.part_count++];
          part.w = {c.format, out, c.in, data.data() + first * row_bytes, nullptr, 1.0f};
          if (c.format == WeightFormat::kFP8Block) part.w.block_scale = scale.data();
          if (c.format == WeightFormat::kNVFP4 || c.format == WeightFormat::kMXFP8)
            part.w.block_scale = scale.data() + first * scale_row;
          part.y = y.data() + at;
          part.ldy = outs;
          first += out, at += out;
        }
        gpu.ops.linear(p, gpu.exec);
      });
      gpu.exec.tensor_cores = false;
      const std::string name =
          std::string(c.name) + ", " + std::to_string(rows) + (rows == 1 ? " row" : " rows");
      const double counted = static_cast<double>(bytes) + 4.0 * static_cast<double>(rows * (c.in + outs));
      check::report(name.c_str(), us, counted, rate);
      if (tensor)
        std::printf("%60s %.1f TFLOP/s\n", "",
                    2e-6 * static_cast<double>(rows * outs) * static_cast<double>(c.in) / us);
    }
  }
}

void bench_heads(check::Gpu& gpu, bool transposed, double rate) {
  const int32_t heads = 64, stride = 512, per_head = 256;
  const int64_t in = 512, copies = 24;
  const DeviceArray<uint8_t> data = random_bytes(gpu, WeightFormat::kBF16, copies * heads * stride * in * 2);
  for (const int32_t rows : {1, 2, 4, 8, 16, 64, 512}) {
    HeadLinearParams p;
    p.heads = heads, p.stride_out = stride, p.rows_per_head = per_head, p.transposed = transposed,
    p.rows = rows;
    p.offset = transposed ? 0 : per_head;
    p.hx = transposed ? per_head : in, p.hy = transposed ? in : per_head;
    p.ldx = heads * p.hx, p.ldy = heads * p.hy;
    const DeviceArray<float> x(gpu, check::normal(rows * p.ldx));
    const DeviceArray<float> y(gpu, rows * p.ldy);
    p.x = x.data(), p.y = y.data();
    gpu.exec.tensor_cores = rows > 16;
    const double us = check::time_us(gpu, static_cast<int>(copies), [&](int i) {
      p.w = {WeightFormat::kBF16,
             heads * stride,
             in,
             data.data() + i * (heads * stride * in * 2),
             nullptr,
             1.0f};
      gpu.ops.head_linear(p, gpu.exec);
    });
    gpu.exec.tensor_cores = false;
    const std::string name = std::string(transposed ? "fold k_b" : "expand v_b") + ", " +
                             std::to_string(rows) + (rows == 1 ? " row" : " rows");
    const double counted =
        2.0 * heads * per_head * static_cast<double>(in) + 4.0 * static_cast<double>(rows * (p.ldx + p.ldy));
    check::report(name.c_str(), us, counted, rate);
  }
}

void all(check::Gpu& gpu, const std::string& only) {
  const double rate = check::read_rate(gpu);
  std::printf("streaming read: %.1f GB/s\n", rate * 1e-9);
  for (const Case& c : kCases) {
    if (std::string(c.name).find(only) != std::string::npos) bench(gpu, c, rate);
  }
  for (const bool transposed : {true, false}) {
    if (std::string("heads").find(only) != std::string::npos) bench_heads(gpu, transposed, rate);
  }
  check::expect(true, "ran");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string only = argc > 1 ? argv[1] : "";
  return check::run_on_gpu("bench_gpu_linear", [&](check::Gpu& gpu) { all(gpu, only); });
}
