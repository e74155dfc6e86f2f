// CUDA hyper-connections against the CPU's: mix logits, Sinkhorn, collapse, expand, head; a row's bits whatever the
// number of rows.
#include <algorithm>

#include "gpu_check.h"
#include "ops_check.h"

namespace {

using namespace rocket;
using Floats = std::vector<float>;

struct Case {
  int32_t rows, streams, hidden;
  bool bf16 = false;
  int shift = 0;         // bytes that fn lies off its alignment
  float comb_scale = 1;  // large: logits that Sinkhorn balances slowly
};

std::string name(const char* op, const Case& c) {
  return std::string(op) + " rows " + std::to_string(c.rows) + " N " + std::to_string(c.streams) + " H " +
         std::to_string(c.hidden) + (c.bf16 ? " bf16" : "");
}

struct PreInputs {
  explicit PreInputs(const Case& c)
      : c(c), flat(static_cast<int64_t>(c.streams) * c.hidden), outputs(c.streams * (c.streams + 2)) {
    x = check::normal(c.rows * flat, 3.0);
    const Floats fn = check::normal(outputs * flat, 1 / std::sqrt(static_cast<double>(flat)));
    base = check::normal(outputs, 0.5);
    scale = {0.7f, 1.3f, c.comb_scale};
    norm_weight = check::normal(c.hidden);
    stored.resize(fn.size() * 4 + 16);
    for (size_t i = 0; i < fn.size(); ++i) {
      const uint16_t half = f32_to_bf16(fn[i]);
      if (c.bf16) {
        std::memcpy(stored.data() + c.shift + 2 * i, &half, 2);
      } else {
        std::memcpy(stored.data() + c.shift + 4 * i, &fn[i], 4);
      }
    }
  }
  HyperPreParams params() const {
    HyperPreParams p;
    p.rows = c.rows;
    p.streams = c.streams;
    p.hidden = c.hidden;
    p.x = x.data();
    p.fn = Weight{c.bf16 ? WeightFormat::kBF16 : WeightFormat::kF32, outputs, flat, stored.data() + c.shift};
    p.base = base.data();
    p.scale = scale.data();
    p.norm_weight = norm_weight.data();
    return p;
  }
  Case c;
  int64_t flat, outputs;
  Floats x, base, scale, norm_weight;
  std::vector<uint8_t> stored;
};

struct PreOutputs {
  Floats y, post, comb, mix;
};

// The inputs on the device.
struct PreDevice {
  PreDevice(check::Gpu& gpu, const PreInputs& in)
      : gpu(gpu),
        in(in),
        x(gpu, in.x),
        base(gpu, in.base),
        scale(gpu, in.scale),
        weight(gpu, in.norm_weight),
        stored(gpu, in.stored) {}

  // Rows [first, first + rows) as one call.
  PreOutputs run(int32_t first, int32_t rows, bool with_mix, const std::string& what) {
    const int64_t n = in.c.streams;
    const check::DeviceArray<float> y(gpu, rows * in.c.hidden), post(gpu, rows * n), comb(gpu, rows * n * n),
        mix(gpu, rows * in.outputs);
    HyperPreParams p = in.params();
    p.rows = rows;
    p.x = x.data() + first * in.flat;
    p.fn.data = stored.data() + in.c.shift;
    p.base = base.data();
    p.scale = scale.data();
    p.norm_weight = weight.data();
    p.y = y.data();
    p.post = post.data();
    p.comb = comb.data();
    p.mix = with_mix ? mix.data() : nullptr;
    gpu.ops.hyper_pre(p, gpu.exec);
    check::expect(gpu.scratch.used() == 0, what + ": gives its scratch back");
    y.check(what + " y");
    post.check(what + " post");
    comb.check(what + " comb");
    mix.check(what + " mix");
    return {y.get(), post.get(), comb.get(), mix.get()};
  }

  check::Gpu& gpu;
  const PreInputs& in;
  check::DeviceArray<float> x, base, scale, weight;
  check::DeviceArray<uint8_t> stored;
};

PreOutputs on_cpu(check::Gpu& gpu, const PreInputs& in) {
  const size_t rows = static_cast<size_t>(in.c.rows), n = static_cast<size_t>(in.c.streams);
  PreOutputs out{Floats(rows * static_cast<size_t>(in.c.hidden)), Floats(rows * n), Floats(rows * n * n),
                 Floats(rows * static_cast<size_t>(in.outputs))};
  HyperPreParams p = in.params();
  p.y = out.y.data();
  p.post = out.post.data();
  p.comb = out.comb.data();
  p.mix = out.mix.data();
  cpu_ops().hyper_pre(p, gpu.cpu.exec);
  return out;
}

void compare_pre(const PreInputs& in, const PreOutputs& found, const PreOutputs& expected,
                 const std::string& what) {
  const auto size = [](const Floats& v) { return static_cast<int64_t>(v.size()); };
  // A sum over the flattened axis on each side: the CPU's in at most 16 blocks, of 2048 or more, over 16 lanes; the
  // device's chains are shorter.
  const int64_t block = std::max<int64_t>(std::min<int64_t>(in.flat, 2048), in.flat / 16);
  check::close(what + ": mix", found.mix.data(), expected.mix.data(), size(found.mix),
               2 * check::rounding(check::lane_steps(block) + 16));
  // What the logits differ by, and the largest argument of sigmoid or exp, go into post and comb: the balanced matrix is
  // exp(z_ij + u_i + v_j), and z, u and v each move by no more than the logits do, the latter two from both sides. An
  // argument z is off by z kUnit; sigmoid, softmax and Sinkhorn add their own roundings on each side.
  double apart = 0, largest = 0;
  for (size_t i = 0; i < found.mix.size(); ++i) {
    const int64_t o = static_cast<int64_t>(i) % in.outputs, n = in.c.streams;
    const double s = in.scale[o < n ? 0 : o < 2 * n ? 1 : 2];
    apart = std::max(apart, s * std::fabs(static_cast<double>(found.mix[i]) - expected.mix[i]));
    largest = std::max(largest, std::fabs(s * expected.mix[i] + in.base[static_cast<size_t>(o)]));
  }
  const double argument = 4 * apart + 2 * largest * check::kUnit;
  const double late = argument + 2 * check::rounding(in.c.streams + 8);
  check::close(what + ": post", found.post.data(), expected.post.data(), size(found.post), late);
  check::close(what + ": comb", found.comb.data(), expected.comb.data(), size(found.comb), late);
  check::close(what + ": y", found.y.data(), expected.y.data(), size(found.y),
               argument + 2 * check::rounding(check::lane_steps(in.c.hidden) / 4 + in.c.streams + 12));
}

void check_pre(check::Gpu& gpu, const Case& c) {
  if (!gpu.takes_case()) return;
  const std::string what = name("pre", c);
  const PreInputs in(c);
  PreDevice device(gpu, in);
  const PreOutputs expected = on_cpu(gpu, in);
  compare_pre(in, device.run(0, c.rows, true, what), expected, what);
  gpu.exec.tensor_cores = true;  // other slices of the sum
  compare_pre(in, device.run(0, c.rows, true, what), expected, what + " prefill");
  gpu.exec.tensor_cores = false;
}

void check_pre_bits(check::Gpu& gpu, const Case& c) {
  if (!gpu.takes_case()) return;
  const std::string what = name("pre", c) + ", rows alone";
  const PreInputs in(c);
  PreDevice device(gpu, in);
  const PreOutputs whole = device.run(0, c.rows, true, what);
  const int64_t n = c.streams, H = c.hidden;
  for (const int32_t chunk : {1, 3, 16}) {
    for (int32_t r = 0; r < c.rows; r += chunk) {
      const int32_t rows = std::min(chunk, c.rows - r);
      const PreOutputs part = device.run(r, rows, false, what);
      check::same_bits(what + ": y", part.y.data(), whole.y.data() + r * H, rows * H);
      check::same_bits(what + ": post", part.post.data(), whole.post.data() + r * n, rows * n);
      check::same_bits(what + ": comb", part.comb.data(), whole.comb.data() + r * n * n, rows * n * n);
    }
  }
}

void check_post(check::Gpu& gpu, const Case& c) {
  if (!gpu.takes_case()) return;
  const std::string what = name("post", c);
  const int64_t n = c.streams, H = c.hidden, flat = n * H;
  const Floats old = check::normal(c.rows * flat), block = check::normal(c.rows * H);
  const Floats post = check::normal(c.rows * n), comb = check::normal(c.rows * n * n);
  check::DeviceArray<float> x(gpu, old), dblock(gpu, block), dpost(gpu, post), dcomb(gpu, comb);
  const auto run = [&](int64_t first, int64_t rows) {
    HyperPostParams p;
    p.rows = static_cast<int32_t>(rows);
    p.streams = c.streams;
    p.hidden = c.hidden;
    p.x = p.y = x.data() + first * flat;
    p.block = dblock.data() + first * H;
    p.post = dpost.data() + first * n;
    p.comb = dcomb.data() + first * n * n;
    gpu.ops.hyper_post(p, gpu.exec);
  };
  run(0, c.rows);
  const Floats found = x.get();
  x.check(what);
  Floats expected = old;
  HyperPostParams p;
  p.rows = c.rows;
  p.streams = c.streams;
  p.hidden = c.hidden;
  p.x = p.y = expected.data();
  p.block = block.data();
  p.post = post.data();
  p.comb = comb.data();
  cpu_ops().hyper_post(p, gpu.cpu.exec);
  check::close(what, found.data(), expected.data(), c.rows * flat,
               2 * check::rounding(n + 1));  // one rounding a term on each side
  x.set(old);
  for (int64_t r = 0; r < c.rows; ++r) run(r, 1);
  const Floats alone = x.get();
  check::same_bits(what + ", row by row", alone.data(), found.data(), c.rows * flat);
}

// hyper_pre with the block before, against one after the other.
void check_both(check::Gpu& gpu, const Case& c) {
  if (!gpu.takes_case()) return;
  const PreInputs in(c);
  PreDevice device(gpu, in);
  const int64_t n = c.streams;
  const Floats block = check::normal(c.rows * c.hidden), post = check::normal(c.rows * n),
               comb = check::normal(c.rows * n * n);
  const check::DeviceArray<float> dblock(gpu, block);
  for (const bool tensor_cores : {false, true}) {
    const std::string what = name("post and pre", c) + (tensor_cores ? " prefill" : "");
    gpu.exec.tensor_cores = tensor_cores;
    struct Outputs {
      Outputs(check::Gpu& gpu, const PreInputs& in, int64_t rows)
          : next(gpu, rows * in.flat),
            y(gpu, rows * in.c.hidden),
            post(gpu, rows * in.c.streams),
            comb(gpu, rows * in.c.streams * in.c.streams) {}
      check::DeviceArray<float> next, y, post, comb;
    };
    const auto run = [&](Outputs& out, bool together, int64_t first, int64_t rows) {
      out.post.set({post.begin() + first * n, post.begin() + (first + rows) * n});
      out.comb.set({comb.begin() + first * n * n, comb.begin() + (first + rows) * n * n});
      HyperPreParams p = in.params();
      p.rows = static_cast<int32_t>(rows);
      p.x = device.x.data() + first * in.flat;
      p.fn.data = device.stored.data() + c.shift;
      p.base = device.base.data();
      p.scale = device.scale.data();
      p.norm_weight = device.weight.data();
      p.y = out.y.data();
      p.post = out.post.data();
      p.comb = out.comb.data();
      p.block = dblock.data() + first * c.hidden;
      p.next = out.next.data();
      if (!together) {
        gpu.ops.hyper_post(post_before(p), gpu.exec);
        p.x = p.next;
        p.block = nullptr;
      }
      gpu.ops.hyper_pre(p, gpu.exec);
      out.next.check(what + " next");
      out.y.check(what + " y");
      out.post.check(what + " post");
      out.comb.check(what + " comb");
    };
    const auto same = [&](const Outputs& a, const Outputs& b, int64_t first, int64_t rows) {
      const auto compare = [&](const char* part, const check::DeviceArray<float>& of_a,
                               const check::DeviceArray<float>& of_b, int64_t width) {
        check::same_bits(what + ": " + part, of_a.get().data(), of_b.get().data() + first * width,
                         rows * width);
      };
      compare("x'", a.next, b.next, in.flat);
      compare("y", a.y, b.y, c.hidden);
      compare("post", a.post, b.post, n);
      compare("comb", a.comb, b.comb, n * n);
    };
    Outputs apart(gpu, in, c.rows), together(gpu, in, c.rows), alone(gpu, in, 1);
    run(apart, false, 0, c.rows);
    run(together, true, 0, c.rows);
    same(together, apart, 0, c.rows);
    if (tensor_cores) continue;  // a row's bits are its own only elsewhere
    run(alone, true, c.rows / 2, 1);
    same(alone, apart, c.rows / 2, 1);
  }
  gpu.exec.tensor_cores = false;
}

void check_head(check::Gpu& gpu, const Case& c) {
  if (!gpu.takes_case()) return;
  const std::string what = name("head", c);
  const int64_t H = c.hidden, flat = c.streams * H;
  const Floats x = check::normal(c.rows * flat), w = check::normal(H);
  std::vector<int32_t> index;
  for (int32_t r = c.rows - 1; r >= 0; r -= 2) index.push_back(r);
  const auto rows = static_cast<int32_t>(index.size());
  const check::DeviceArray<float> dx(gpu, x), dw(gpu, w), y(gpu, rows * H);
  const check::DeviceArray<int32_t> dindex(gpu, index);
  HyperHeadParams p;
  p.rows = rows;
  p.streams = c.streams;
  p.hidden = c.hidden;
  p.x = dx.data();
  p.row_index = dindex.data();
  p.norm_weight = dw.data();
  p.y = y.data();
  gpu.ops.hyper_head(p, gpu.exec);
  const Floats found = y.get();
  y.check(what);
  Floats expected(static_cast<size_t>(rows * H), NAN);
  p.x = x.data();
  p.row_index = index.data();
  p.norm_weight = w.data();
  p.y = expected.data();
  cpu_ops().hyper_head(p, gpu.cpu.exec);
  check::close(what, found.data(), expected.data(), rows * H,
               2 * check::rounding(check::lane_steps(H) / 4 + 2 * c.streams + 5));
  for (int32_t r = 0; r < rows; ++r) {
    const check::DeviceArray<float> one(gpu, H);
    p.rows = 1;
    p.x = dx.data();
    p.row_index = dindex.data() + r;
    p.norm_weight = dw.data();
    p.y = one.data();
    gpu.ops.hyper_head(p, gpu.exec);
    check::same_bits(what + ", row by row", one.get().data(), found.data() + r * H, H);
  }
}

void nan_stays_in_its_row(check::Gpu& gpu) {
  PreInputs in(Case{6, 4, 64});
  in.x[3 * 256 + 100] = NAN;
  PreDevice device(gpu, in);
  const PreOutputs out = device.run(0, 6, true, "NaN");
  for (size_t i = 0; i < out.y.size(); ++i)
    check::expect(std::isnan(out.y[i]) == (i / 64 == 3), "a NaN spoils its own row and no other");
  for (size_t i = 0; i < out.comb.size(); ++i)
    check::expect(std::isnan(out.comb[i]) == (i / 16 == 3), "NaN in comb");
}

void all(check::Gpu& gpu) {
  for (const Case& c :
       {Case{1, 4, 1024}, Case{3, 4, 256, true, 1}, Case{64, 4, 100, false, 3}, Case{5, 4, 4096, true},
        Case{8, 4, 4096}, Case{19, 3, 37, true}, Case{2, 8, 640}, Case{4, 2, 7}, Case{1, 1, 48},
        Case{33, 4, 64, false, 0, 8}, Case{70, 4, 512, false, 0, 0.3f}, Case{16, 8, 128, true, 0, 0.3f},
        Case{6, 5, 130}, Case{100, 4, 1030, true}, Case{2, 4, 16000, true}}) {
    check_pre(gpu, c);
  }
  for (const Case& c : {Case{16, 4, 4096, true}, Case{16, 4, 4096}, Case{80, 4, 100, true}, Case{20, 3, 37},
                        Case{9, 8, 300}}) {
    check_pre_bits(gpu, c);
  }
  for (const Case& c :
       {Case{1, 4, 4096}, Case{16, 4, 4096}, Case{64, 4, 100}, Case{40, 4, 1024}, Case{7, 3, 37},
        Case{2, 8, 1030}, Case{3, 1, 5}, Case{2, 4, 16000}, Case{9, 4, 384, true}}) {
    check_post(gpu, c);
    check_both(gpu, c);
    check_head(gpu, c);
  }
  nan_stays_in_its_row(gpu);
}

}  // namespace

int main() {
  return check::run_on_gpu("gpu_hyper_connection", all);
}
