// CUDA swiglu, expert_ffn and expert_sum against the CPU's, and the bits of exact rows against themselves.
#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>

#include "gpu_check.h"
#include "stored_weight.h"

namespace {

using namespace rocket;
using check::StoredWeight;

constexpr float kInf = std::numeric_limits<float>::infinity();

void swiglu_case(check::Gpu& gpu, int32_t rows, int32_t dim, float limit) {
  if (!gpu.takes_case()) return;
  const std::string what = "swiglu rows " + std::to_string(rows) + " dim " + std::to_string(dim) + " limit " +
                           std::to_string(limit);
  const int64_t ld = dim + 3, ldy = dim + 1;
  std::vector<float> gate = check::normal(rows * ld, 6.0), up = check::normal(rows * ld, 8.0);
  const float special[] = {-200.0f, 200.0f, -0.0f, -88.0f, -104.0f, 1e-30f, 1e30f, NAN};
  for (int i = 0; i < 8 && i < dim; ++i) gate[i] = special[i], up[(rows - 1) * ld + i] = special[7 - i];
  check::DeviceArray<float> dg(gpu, gate), du(gpu, up), y(gpu, rows * ldy);
  gpu.ops.swiglu({dg.data(), du.data(), ld, rows, dim, limit, y.data(), ldy}, gpu.exec);
  const std::vector<float> found = y.get();
  y.check(what);
  std::vector<float> expected(static_cast<size_t>(rows * ldy), NAN);
  cpu_ops().swiglu({gate.data(), up.data(), ld, rows, dim, limit, expected.data(), ldy}, gpu.cpu.exec);
  // exp to two units in the last place, then an addition, a division and a product, on both sides.
  check::close(what, found.data(), expected.data(), rows * ldy, 8 * std::ldexp(1.0, -24));

  gpu.ops.swiglu({dg.data(), du.data(), ld, rows, dim, limit, dg.data(), ld}, gpu.exec);
  const std::vector<float> in_place = dg.get();
  dg.check(what + " in place");
  for (int32_t r = 0; r < rows; ++r)
    check::same_bits(what + " in place", in_place.data() + r * ld, found.data() + r * ldy, dim);
}

void sum_case(check::Gpu& gpu, int32_t rows, int32_t topk, int32_t hidden, bool with_shared) {
  if (!gpu.takes_case()) return;
  const std::string what = "expert_sum rows " + std::to_string(rows) + " top " + std::to_string(topk) +
                           " hidden " + std::to_string(hidden) + (with_shared ? " shared" : "");
  const std::vector<float> out = check::normal(int64_t{rows} * topk * hidden),
                           shared = check::normal(rows * hidden);
  check::DeviceArray<float> d_out(gpu, out), d_shared(gpu, shared), y(gpu, rows * hidden);
  ExpertSumParams p{d_out.data(), with_shared ? d_shared.data() : nullptr, rows, topk, hidden, y.data()};
  gpu.ops.expert_sum(p, gpu.exec);
  const std::vector<float> found = y.get();
  y.check(what);
  std::vector<float> expected(static_cast<size_t>(rows * hidden), NAN);
  cpu_ops().expert_sum(
      {out.data(), with_shared ? shared.data() : nullptr, rows, topk, hidden, expected.data()}, gpu.cpu.exec);
  check::same_bits(what, found.data(), expected.data(), rows * hidden);
  if (!with_shared) return;
  p.y = d_shared.data();
  gpu.ops.expert_sum(p, gpu.exec);
  d_shared.check(what + " in place");
  check::same_bits(what + " in place", d_shared.get().data(), expected.data(), rows * hidden);
}

// Experts on the host and on the device. `shift` bytes past an aligned address there.
struct Model {
  int32_t hidden, inner, experts;
  std::vector<StoredWeight> stored;  // gate, up, down of each expert
  std::vector<ExpertWeights> table;
  std::vector<std::unique_ptr<check::DeviceArray<uint8_t>>> parts;
  std::unique_ptr<check::DeviceArray<ExpertWeights>> device;

  // Formats in turn, a weight at a time with `mix`, an expert at a time otherwise.
  Model(check::Gpu& gpu, int32_t hidden_size, int32_t inner_size, int32_t count,
        const std::vector<WeightFormat>& formats, bool mix = false, int shift = 0)
      : hidden(hidden_size), inner(inner_size), experts(count) {
    std::vector<ExpertWeights> on_device;
    for (int32_t e = 0; e < experts; ++e) {
      for (int i = 0; i < 3; ++i) {
        const WeightFormat f = formats[static_cast<size_t>(mix ? e * 3 + i + e / 5 : e) % formats.size()];
        stored.push_back(i < 2 ? check::random_weight(f, inner, hidden, 0.1 * (1 + i))
                               : check::random_weight(f, hidden, inner, 0.1));
      }
      const size_t at = stored.size() - 3;
      on_device.push_back(
          {move(gpu, stored[at], shift), move(gpu, stored[at + 1], shift), move(gpu, stored[at + 2], shift)});
    }
    for (size_t e = 0; e < stored.size(); e += 3)
      table.push_back({stored[e].w, stored[e + 1].w, stored[e + 2].w});
    device = std::make_unique<check::DeviceArray<ExpertWeights>>(gpu, on_device);
  }

 private:
  const uint8_t* part(check::Gpu& gpu, const uint8_t* from, size_t bytes, int shift) {
    std::vector<uint8_t> shifted(static_cast<size_t>(shift), 0xA5);
    shifted.insert(shifted.end(), from, from + bytes);
    parts.push_back(std::make_unique<check::DeviceArray<uint8_t>>(gpu, shifted));
    return parts.back()->data() + shift;
  }
  Weight move(check::Gpu& gpu, StoredWeight& s, int shift) {
    Weight w = s.w;
    w.data = part(gpu, s.bytes(), s.data.size() - 1, shift);
    if (w.block_scale) w.block_scale = part(gpu, s.scales(), s.scale.size() - 1, shift);
    return w;
  }
};

struct Step {
  int64_t rows = 0, ldx = 0;
  int32_t topk = 0;
  float limit = 10.0f;
  std::vector<float> x, weight;
  std::vector<int32_t> id;
};

// Ascending distinct experts a row; with `holes` some are -1 (held elsewhere).
Step random_step(const Model& m, int64_t rows, int32_t topk, float limit, bool holes, int64_t extra) {
  Step s;
  s.rows = rows;
  s.ldx = m.hidden + extra;
  s.topk = topk;
  s.limit = limit;
  s.x = check::normal(rows * s.ldx);
  s.weight = check::normal(rows * topk);
  s.id = check::routed_ids(rows, topk, m.experts, holes);
  return s;
}

Step one_row(const Step& s, int64_t r) {
  Step one = s;
  one.rows = 1;
  one.x.assign(s.x.begin() + r * s.ldx, s.x.begin() + (r + 1) * s.ldx);
  one.id.assign(s.id.begin() + r * s.topk, s.id.begin() + (r + 1) * s.topk);
  one.weight.assign(s.weight.begin() + r * s.topk, s.weight.begin() + (r + 1) * s.topk);
  return one;
}

ExpertFfnParams params(const Model& m, const Step& s) {
  ExpertFfnParams p;
  p.ldx = s.ldx;
  p.rows = static_cast<int32_t>(s.rows);
  p.topk = s.topk;
  p.experts = m.experts;
  p.hidden = m.hidden;
  p.inner = m.inner;
  p.limit = s.limit;
  return p;
}

std::vector<float> run(check::Gpu& gpu, const Model& m, const Step& s, bool tensor_cores,
                       const std::string& what) {
  check::DeviceArray<float> x(gpu, s.x), weight(gpu, s.weight), out(gpu, s.rows * s.topk * m.hidden);
  check::DeviceArray<int32_t> id(gpu, s.id);
  ExpertFfnParams p = params(m, s);
  Exec measuring = gpu.exec;
  Arena need = Arena::measuring();
  measuring.scratch = &need;
  measuring.measure = true;
  measuring.tensor_cores = tensor_cores;
  gpu.ops.expert_ffn(p, measuring);

  p.x = x.data();
  p.weight = weight.data();
  p.id = id.data();
  p.expert = m.device->data();
  p.out = out.data();
  Arena scratch(need.peak(), "scratch as measured", gpu.memory());
  Exec exec = gpu.exec;
  exec.tensor_cores = tensor_cores;
  exec.scratch = &scratch;
  gpu.ops.expert_ffn(p, exec);
  const std::vector<float> found = out.get();
  out.check(what);
  x.check(what + ": x");
  check::expect(scratch.used() == 0, what + ": scratch is given back");
  return found;
}

std::vector<float> on_cpu(check::Gpu& gpu, const Model& m, const Step& s) {
  ExpertFfnParams p = params(m, s);
  std::vector<float> out(static_cast<size_t>(s.rows * s.topk * m.hidden), NAN);
  p.x = s.x.data();
  p.weight = s.weight.data();
  p.id = s.id.data();
  p.expert = m.table.data();
  p.out = out.data();
  cpu_ops().expert_ffn(p, gpu.cpu.exec);
  return out;
}

// As for the CPU's own test: three sums in a row, SwiGLU passes errors on with a factor of about two. Here both sides
// are off by so much.
double exact_limit(const Model& m) {
  return 2 * (4 * check::sum_limit(m.hidden) + check::sum_limit(m.inner));
}
// Rounding x and the activations to eleven bits is off by 2^-12 of each at most, evenly spread: a standard deviation of
// 2^-12 / sqrt(3), which a sum of random signs keeps. x does it to gate and up, passed on with a factor of about two
// each, the activations once more: three of these together. Five standard deviations.
double rounded_limit(const Model& m) {
  return exact_limit(m) + 15 * std::ldexp(1.0, -12) / std::sqrt(3.0);
}

void check_absent(const std::string& what, const Model& m, const Step& s, const std::vector<float>& out) {
  for (size_t pair = 0; pair < s.id.size(); ++pair) {
    if (s.id[pair] >= 0) continue;
    for (int32_t o = 0; o < m.hidden; ++o) {
      const float v = out[pair * static_cast<size_t>(m.hidden) + static_cast<size_t>(o)];
      if (v != 0 || std::signbit(v)) check::expect(false, what + ": the row of an absent expert is not +0");
    }
  }
}

void ffn_case(check::Gpu& gpu, const std::string& name, const Model& m, const Step& s) {
  if (!gpu.takes_case()) return;
  const std::string what = name + " " + std::to_string(m.hidden) + "x" + std::to_string(m.inner) + " rows " +
                           std::to_string(s.rows) + " top " + std::to_string(s.topk);
  const int64_t n = s.rows * s.topk * m.hidden;
  const std::vector<float> exact = run(gpu, m, s, false, what);
  const std::vector<float> rounded = run(gpu, m, s, true, what + " rounded");
  const std::vector<float> expected = on_cpu(gpu, m, s);
  check::close(what, exact.data(), expected.data(), n, exact_limit(m));
  check::close(what + " rounded", rounded.data(), expected.data(), n, rounded_limit(m));
  check_absent(what, m, s, exact);
  check_absent(what + " rounded", m, s, rounded);
  const int64_t step = s.rows <= 16 ? 1 : 7;
  for (int64_t r = 0; r < s.rows; r += step) {
    const std::vector<float> alone = run(gpu, m, one_row(s, r), false, what + " alone");
    check::same_bits(what + ": row " + std::to_string(r) + " alone", alone.data(),
                     exact.data() + r * s.topk * m.hidden, s.topk * m.hidden);
  }
}

// The pairs of a step spread over calls, as waves of a cache do it: the first clears what is not its own, or finds it
// cleared; each further one leaves the others' rows. The last has no expert at all.
void ffn_waves(check::Gpu& gpu, const Model& m, const Step& s, int32_t waves, bool tensor_cores) {
  if (!gpu.takes_case()) return;
  const std::string what = "expert_ffn in waves, " + std::to_string(m.hidden) + "x" +
                           std::to_string(m.inner) + " rows " + std::to_string(s.rows) +
                           (tensor_cores ? " rounded" : "");
  const std::vector<float> whole = run(gpu, m, s, tensor_cores, what);
  const int64_t n = s.rows * s.topk * m.hidden;
  check::DeviceArray<float> x(gpu, s.x), weight(gpu, s.weight), out(gpu, n);
  Exec exec = gpu.exec;
  exec.tensor_cores = tensor_cores;
  for (int32_t wave = 0; wave <= waves; ++wave) {
    Step part = s;
    for (int32_t& e : part.id) e = e >= 0 && e % waves == wave ? e : -1;
    const check::DeviceArray<int32_t> id(gpu, part.id);
    ExpertFfnParams p = params(m, s);
    p.x = x.data();
    p.weight = weight.data();
    p.id = id.data();
    p.expert = m.device->data();
    p.out = out.data();
    p.keep_absent = wave > 0;
    gpu.ops.expert_ffn(p, exec);
    gpu.backend->wait();  // `id` goes
  }
  out.check(what);
  check::same_bits(what, out.get().data(), whole.data(), n);
}

void ffn_waves(check::Gpu& gpu) {
  const std::vector<WeightFormat> every(check::kFormats, check::kFormats + 5);
  const Model mixed(gpu, 288, 160, 15, every, true), fast(gpu, 512, 256, 20, {WeightFormat::kNVFP4});
  for (const Model* m : {&mixed, &fast}) {
    for (const int64_t rows : {1, 2, 7, 16, 40, 200}) {
      for (const bool tensor_cores : {false, true}) {
        ffn_waves(gpu, *m, random_step(*m, rows, 8, 10.0f, rows == 7, 0), 2, tensor_cores);
        ffn_waves(gpu, *m, random_step(*m, rows, 4, 10.0f, rows == 40, 0), 3, tensor_cores);
      }
    }
  }
}

void ffn_values(check::Gpu& gpu) {
  const std::vector<WeightFormat> every(check::kFormats, check::kFormats + 5);
  for (const WeightFormat format : check::kFormats) {
    const Model m(gpu, 96, 64, 6, {format});
    const std::string name = std::string("expert_ffn ") + check::format_name(format);
    for (const int64_t rows : {1, 2, 3, 9, 41})
      ffn_case(gpu, name, m, random_step(m, rows, 3, 10.0f, false, 5));
    ffn_case(gpu, name, m, random_step(m, 5, 4, 0.25f, true, 0));
    ffn_case(gpu, name, m, random_step(m, 16, 2, kInf, true, 4));
  }
  const Model odd(gpu, 37, 19, 5, {WeightFormat::kF32, WeightFormat::kBF16, WeightFormat::kFP8Block});
  for (const int64_t rows : {1, 23})
    ffn_case(gpu, "expert_ffn odd", odd, random_step(odd, rows, 4, 10.0f, true, 1));
  // Widths that are whole blocks of NVFP4, but not of 32 columns: the general path.
  const Model blocks(gpu, 80, 48, 5, {WeightFormat::kNVFP4});
  for (const int64_t rows : {1, 19})
    ffn_case(gpu, "expert_ffn 16s", blocks, random_step(blocks, rows, 4, 10.0f, true, 0));
  const Model shifted(gpu, 128, 96, 5, every, false, 1);
  for (const int64_t rows : {1, 11})
    ffn_case(gpu, "expert_ffn unaligned", shifted, random_step(shifted, rows, 4, 10.0f, true, 0));
  const Model mixed(gpu, 288, 160, 15, every, true);
  for (const int64_t rows : {1, 4, 64})
    ffn_case(gpu, "expert_ffn mixed", mixed, random_step(mixed, rows, 8, 10.0f, true, 3));
}

// NVFP4 in the shapes that the fast kernels are made for, and around their borders.
void ffn_fast(check::Gpu& gpu) {
  struct Shape {
    int32_t hidden, inner;
  };
  for (const Shape shape :
       {Shape{32, 32}, Shape{128, 64}, Shape{544, 1312}, Shape{1312, 544}, Shape{4096, 160}, Shape{96, 4192},
        Shape{640, 256}, Shape{6144, 96}, Shape{12800, 32}}) {
    const Model m(gpu, shape.hidden, shape.inner, 6, {WeightFormat::kNVFP4});
    for (const int64_t rows : {1, 2, 4, 13, 40})
      ffn_case(gpu, "expert_ffn NVFP4", m, random_step(m, rows, 3, 10.0f, rows == 13, rows == 4 ? 1 : 0));
  }
  // Few experts and many rows: tiles of all sizes, more than one for an expert.
  const Model m(gpu, 512, 256, 20, {WeightFormat::kNVFP4});
  for (const int64_t rows : {17, 64, 150, 515})
    ffn_case(gpu, "expert_ffn NVFP4", m, random_step(m, rows, 4, 10.0f, true, 0));
  Step same = random_step(m, 300, 1, 10.0f, false, 0);
  std::fill(same.id.begin(), same.id.end(), 17);
  ffn_case(gpu, "expert_ffn, one expert for all rows", m, same);
  std::fill(same.id.begin(), same.id.end(), -1);
  ffn_case(gpu, "expert_ffn, no expert here", m, same);
  // More experts than a block of the sort has threads.
  const Model many(gpu, 32, 32, 1100, {WeightFormat::kNVFP4});
  for (const int64_t rows : {6, 200})
    ffn_case(gpu, "expert_ffn NVFP4, many experts", many, random_step(many, rows, 6, 10.0f, true, 0));
  // Wider than one row of shared memory holds.
  const Model wide(gpu, 25664, 32, 2, {WeightFormat::kNVFP4});
  for (const int64_t rows : {1, 3})
    ffn_case(gpu, "expert_ffn NVFP4", wide, random_step(wide, rows, 2, 10.0f, false, 0));
  gpu.ops.expert_ffn(ExpertFfnParams{}, gpu.exec);
}

// Rows of all magnitudes: none may overflow or vanish in float16, and none may touch its neighbours. Without a clamp, as
// a clamp of large values would turn rounding errors into steps.
void ffn_magnitudes(check::Gpu& gpu) {
  const Model m(gpu, 256, 128, 4, {WeightFormat::kNVFP4});
  const float sizes[] = {1e-38f, 1e-15f, 1e-6f, 1.0f, 3e4f, 1e6f, 1e15f};
  const int64_t rows = 24;  // enough for rounding to be allowed to matter
  Step s = random_step(m, rows, 2, kInf, false, 0);
  for (int64_t r = 0; r < rows - 1; ++r) {
    for (int64_t i = 0; i < s.ldx; ++i) s.x[static_cast<size_t>(r * s.ldx + i)] *= sizes[r % 7];
  }
  std::fill(s.x.end() - s.ldx, s.x.end(), 0.0f);
  for (const bool tensor_cores : {false, true}) {
    const std::string what = std::string("expert_ffn magnitudes") + (tensor_cores ? " rounded" : "");
    const std::vector<float> found = run(gpu, m, s, tensor_cores, what), expected = on_cpu(gpu, m, s);
    const int64_t n = s.topk * m.hidden;
    for (int64_t r = 0; r < rows; ++r) {
      check::close(what + " row " + std::to_string(r), found.data() + r * n, expected.data() + r * n, n,
                   tensor_cores ? rounded_limit(m) : exact_limit(m));
    }
    Step broken = s;
    broken.x[static_cast<size_t>(2 * s.ldx + 3)] = NAN;
    broken.x[static_cast<size_t>(4 * s.ldx + 5)] = kInf;
    const std::vector<float> after = run(gpu, m, broken, tensor_cores, what + " NaN");
    for (int64_t r = 0; r < rows; ++r) {
      if (r != 2 && r != 4) {
        check::same_bits(what + ": beside NaN", after.data() + r * n, found.data() + r * n, n);
        continue;
      }
      const bool bad = std::any_of(after.begin() + r * n, after.begin() + (r + 1) * n,
                                   [](float v) { return !std::isfinite(v); });
      check::expect(bad, what + ": what is not finite in x shows in the output");
    }
  }
}

void all(check::Gpu& gpu) {
  for (const int32_t dim : {1, 15, 64, 333, 2048}) {
    for (const float limit : {10.0f, 0.5f, kInf}) {
      for (const int32_t rows : {1, 5, 64}) swiglu_case(gpu, rows, dim, limit);
    }
  }
  for (const int32_t topk : {1, 2, 8, 11}) {
    for (const int32_t hidden : {1, 16, 77, 4096}) {
      for (const int32_t rows : {1, 6, 64}) {
        sum_case(gpu, rows, topk, hidden, true);
        sum_case(gpu, rows, topk, hidden, false);
      }
    }
  }
  ffn_values(gpu);
  ffn_fast(gpu);
  ffn_magnitudes(gpu);
  ffn_waves(gpu);
}

}  // namespace

int main() {
  return check::run_on_gpu("gpu_experts", all);
}
