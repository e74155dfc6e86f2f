// CUDA sparse attention and the latents' pages against the CPU's.
#include <algorithm>

#include "gpu_pages.h"

namespace {

using namespace rocket;
using check::DeviceArray;
using check::expect;
using Floats = std::vector<float>;

struct Case {
  int32_t streams, rows;  // rows of each stream
  int32_t heads, width, value_dim;
  int32_t context;    // tokens before the first row
  int32_t most;       // tokens that a list has at most
  double spread = 1;  // of the queries; large: one token takes almost everything
  int64_t odd = 0;    // floats that rows of q and the part of a page are displaced by
};

constexpr int32_t kPageRows = 5;

struct Inputs {
  std::vector<Floats> latent;               // [streams][context + rows, width]
  Floats q;                                 // [streams * rows, heads, width]
  std::vector<std::vector<int32_t>> token;  // [streams * rows]
};

Inputs inputs(const Case& c) {
  Inputs in;
  const int64_t n = static_cast<int64_t>(c.streams) * c.rows;
  in.q = check::normal(n * c.heads * c.width, c.spread);
  for (int32_t s = 0; s < c.streams; ++s) {
    in.latent.push_back(check::normal(static_cast<int64_t>(c.context + c.rows) * c.width));
  }
  for (int64_t r = 0; r < n; ++r) {
    const int32_t visible = c.context + static_cast<int32_t>(r % c.rows) + 1;
    std::vector<int32_t> all(static_cast<size_t>(visible));
    for (int32_t t = 0; t < visible; ++t) all[static_cast<size_t>(t)] = t;
    std::shuffle(all.begin(), all.end(), check::rng());
    // The lists of the first rows are empty, one token, whole pieces of 64, and as long as can be.
    const int32_t limit = std::min(visible, c.most);
    const auto length = r == 1   ? 0
                        : r == 2 ? 1
                        : r == 3 ? limit / 64 * 64
                        : r == 0 ? limit
                                 : static_cast<int32_t>(check::uniform_int(1, limit));
    all.resize(static_cast<size_t>(length));
    std::sort(all.begin(), all.end());
    in.token.push_back(all);
  }
  return in;
}

// Everything of a call but where it lies.
struct Call {
  SparseMlaParams p;
  Floats q;
  std::vector<int32_t> token, count;
  std::vector<Segment> segment;
};

// Rows [first, first + count) of every stream.
Call make_call(const Case& c, const Inputs& in, int32_t first, int32_t count) {
  Call call;
  SparseMlaParams& p = call.p;
  p.rows = c.streams * count;
  p.heads = c.heads;
  p.width = c.width;
  p.value_dim = c.value_dim;
  p.ldq = int64_t{c.heads} * c.width + c.odd;
  p.ldo = int64_t{c.heads} * c.value_dim + c.odd;
  p.scale = 1 / std::sqrt(static_cast<float>(c.width));
  p.ldtoken = c.most + 3;
  call.q.assign(static_cast<size_t>(p.rows * p.ldq), NAN);
  call.token.assign(static_cast<size_t>(p.rows * p.ldtoken), -1);
  for (int32_t s = 0; s < c.streams; ++s) {
    call.segment.push_back({s * count, count, c.context + first});
    for (int32_t r = 0; r < count; ++r) {
      const int64_t row = s * count + r, from = s * c.rows + first + r, size = int64_t{c.heads} * c.width;
      std::copy_n(in.q.begin() + from * size, size, call.q.begin() + row * p.ldq);
      const std::vector<int32_t>& list = in.token[static_cast<size_t>(from)];
      std::copy(list.begin(), list.end(), call.token.begin() + row * p.ldtoken);
      call.count.push_back(static_cast<int32_t>(list.size()));
    }
  }
  return call;
}

Floats on_cpu(check::Gpu& gpu, const Case& c, const Inputs& in) {
  Call call = make_call(c, in, 0, c.rows);
  std::vector<std::unique_ptr<check::Pages>> pages;
  check::Tables views;
  for (const Floats& latent : in.latent) {
    pages.push_back(std::make_unique<check::Pages>(c.context + c.rows, kPageRows, c.width));
    pages.back()->fill(latent);
    views.push_back(pages.back()->view());
  }
  Floats o(static_cast<size_t>(call.p.rows * call.p.ldo), NAN);
  SparseMlaParams& p = call.p;
  p.q = call.q.data();
  p.token = call.token.data();
  p.count = call.count.data();
  p.segment = call.segment.data();
  p.segments = c.streams;
  p.cache = views.view();
  p.o = o.data();
  cpu_ops().sparse_mla(p, gpu.cpu.exec);
  return o;
}

using Streams = std::vector<std::unique_ptr<check::GpuPages>>;

Streams upload(check::Gpu& gpu, const Case& c, const Inputs& in, bool bf16) {
  Streams pages;
  for (const Floats& latent : in.latent) {
    pages.push_back(
        std::make_unique<check::GpuPages>(gpu, c.context + c.rows, kPageRows, c.width, bf16, c.odd));
    pages.back()->fill(latent);
  }
  return pages;
}

Floats on_gpu(check::Gpu& gpu, const Case& c, const Inputs& in, const Streams& pages, bool bf16,
              int32_t first, int32_t count, const std::string& what) {
  Call call = make_call(c, in, first, count);
  SparseMlaParams& p = call.p;
  std::vector<float* const*> tables;
  for (const auto& stream : pages) tables.push_back(stream->table());
  const check::GpuSegments segments(gpu, call.segment, tables, p.rows);
  const DeviceArray<float> q(gpu, call.q), o(gpu, p.rows * p.ldo);
  const DeviceArray<int32_t> token(gpu, call.token), counts(gpu, call.count);
  p.q = q.data();
  p.token = token.data();
  p.count = counts.data();
  p.segment = segments.data();
  p.segments = segments.count();
  p.cache = segments.pages(kPageRows, c.width, bf16, c.odd);
  p.o = o.data();
  gpu.ops.sparse_mla(p, gpu.exec);
  o.check(what);
  expect(gpu.scratch.used() == 0, what + ": gives its scratch back");
  return o.get();
}

void check_case(check::Gpu& gpu, const Case& c) {
  if (!gpu.takes_case()) return;
  const std::string what = "mla rows " + std::to_string(c.streams * c.rows) + " heads " +
                           std::to_string(c.heads) + " width " + std::to_string(c.width) + "/" +
                           std::to_string(c.value_dim) + " tokens " + std::to_string(c.most) +
                           (c.spread > 1 ? " peaked" : "");
  Inputs in = inputs(c);
  const Floats expected = on_cpu(gpu, c, in);
  // The error of a logit (a sum over the width in parts, of size up to five times its spread) is a relative error of its
  // weight; the sum over tokens adds a rounding each. Both sides have such errors.
  const double logit = 5 * c.spread * check::rounding(c.width / 8.0 + 8);
  const double limit = 2 * (logit + check::rounding(std::min(c.most, 64) + 12));
  const auto n = static_cast<int64_t>(expected.size()), ldo = int64_t{c.heads} * c.value_dim + c.odd;
  const Streams pages = upload(gpu, c, in, false);
  const Floats found = on_gpu(gpu, c, in, pages, false, 0, c.rows, what);
  check::close(what, found.data(), expected.data(), n, limit);
  if (in.token.size() > 1) {
    bool zero = true;
    for (int64_t i = 0; i < c.heads * c.value_dim; ++i)
      zero = zero && found[static_cast<size_t>(ldo + i)] == 0;
    expect(zero, what + ": an empty list gives zeros");
  }
  for (const int32_t chunk : {1, 3}) {
    for (int32_t first = 0; first < c.rows; first += chunk) {
      const int32_t count = std::min(chunk, c.rows - first);
      const Floats some = on_gpu(gpu, c, in, pages, false, first, count, what + " in chunks");
      for (int32_t s = 0; s < c.streams; ++s) {
        for (int32_t r = 0; r < count; ++r) {
          check::same_bits(what + " in chunks", some.data() + (s * count + r) * ldo,
                           found.data() + (s * c.rows + first + r) * ldo, ldo);
        }
      }
    }
  }

  // Rounded latents are the same numbers to both sides.
  Inputs rounded = in;
  for (Floats& latent : rounded.latent) latent = check::rounded_to_bf16(latent);
  const Floats expected16 = on_cpu(gpu, c, rounded);
  const Streams pages16 = upload(gpu, c, rounded, true);
  const Floats found16 = on_gpu(gpu, c, rounded, pages16, true, 0, c.rows, what + " bf16");
  check::close(what + " bf16", found16.data(), expected16.data(), n, limit);

  // Tensor cores: queries, latents and weights rounded to bfloat16, by 2^-8 of themselves at most and with a standard
  // deviation of some 2^-9. A logit's error is that of two factors, times its spread; three of these deviations change
  // its weight, and the rounding of weights and values comes on top.
  const double coarse = (5 * std::sqrt(2.0 / 3) * c.spread + 3) * 0x1p-9;
  gpu.exec.tensor_cores = true;
  const Floats tensor = on_gpu(gpu, c, in, pages, false, 0, c.rows, what + " tensor cores");
  check::close(what + " tensor cores", tensor.data(), expected.data(), n, coarse);
  const Floats tensor16 = on_gpu(gpu, c, rounded, pages16, true, 0, c.rows, what + " bf16 tensor cores");
  check::close(what + " bf16 tensor cores", tensor16.data(), expected16.data(), n, coarse);
  gpu.exec.tensor_cores = false;
}

void check_append(check::Gpu& gpu, int32_t width, int64_t extra, int64_t offset, bool bf16) {
  if (!gpu.takes_case()) return;
  const std::string what = "latent_append width " + std::to_string(width) + (bf16 ? " bf16" : "");
  const std::vector<Segment> segment = {{0, 4, 3}, {4, 1, 0}, {5, 12, 9}};
  const int64_t ld = width + extra;
  const Floats latent = check::normal(17 * ld);
  Streams pages;
  std::vector<float* const*> tables;
  for (const Segment& s : segment) {
    pages.push_back(std::make_unique<check::GpuPages>(gpu, s.position + s.rows + 1, 4, width, bf16, offset));
    tables.push_back(pages.back()->table());
  }
  const check::GpuSegments segments(gpu, segment, tables, 17);
  const DeviceArray<float> from(gpu, latent);
  LatentAppendParams p;
  p.latent = from.data();
  p.ld = ld;
  p.segment = segments.data();
  p.segments = segments.count();
  p.cache = segments.pages(4, width, bf16, offset);
  p.rows = 17;
  gpu.ops.latent_append(p, gpu.exec);
  for (size_t s = 0; s < segment.size(); ++s) {
    pages[s]->check(what);
    const Segment& g = segment[s];
    const Floats rows = pages[s]->read(g.position + g.rows + 1);
    for (int64_t t = 0; t <= g.position + g.rows; ++t) {
      const float* row = rows.data() + t * width;
      if (t < g.position || t == g.position + g.rows) {
        expect(std::isnan(row[0]) && std::isnan(row[width - 1]), what + ": touched another row");
        continue;
      }
      const float* source = latent.data() + (g.first_row + t - g.position) * ld;
      Floats expected(source, source + width);
      if (bf16) expected = check::rounded_to_bf16(expected);
      check::same_bits(what, row, expected.data(), width);
    }
  }
}

void nan_stays_in_its_head(check::Gpu& gpu) {
  const Case c{1, 4, 5, 32, 32, 20, 24};
  Inputs in = inputs(c);
  in.q[(3 * 5 + 2) * 32 + 9] = NAN;
  in.token[3] = {0, 1, 2, 7};
  const Streams pages = upload(gpu, c, in, false);
  const Floats o = on_gpu(gpu, c, in, pages, false, 0, 4, "NaN");
  for (int64_t i = 0; i < 4 * 5 * 32; ++i) {
    expect(std::isnan(o[static_cast<size_t>(i)]) == (i / 32 == 3 * 5 + 2),
           "a NaN query spoils its head of its row and no other");
  }
}

void all(check::Gpu& gpu) {
  // The model's shapes with lists that end inside, at and before borders; rotary tails; small and odd shapes, aligned or
  // not; more rows than scratch holds at once.
  for (const Case& c :
       {Case{1, 5, 64, 512, 512, 2300, 2051}, Case{2, 12, 64, 512, 512, 100, 130},
        Case{1, 2, 64, 576, 512, 300, 200}, Case{2, 32, 3, 64, 64, 10, 40}, Case{3, 5, 5, 40, 24, 60, 33},
        Case{1, 64, 4, 128, 128, 0, 64}, Case{2, 9, 6, 77, 70, 31, 32, 1, 1}, Case{1, 7, 1, 16, 16, 100, 97},
        Case{2, 4, 8, 256, 256, 300, 200, 6}, Case{1, 3, 17, 512, 511, 70, 70, 1, 3},
        Case{1, 6, 70, 512, 512, 90, 80, 1, 8}, Case{1, 20, 64, 512, 512, 2300, 2051}}) {
    check_case(gpu, c);
  }
  for (const bool bf16 : {false, true}) {
    check_append(gpu, 37, 4, 0, bf16);
    check_append(gpu, 512, 0, 4, bf16);
    check_append(gpu, 64, 4, 3, bf16);
    check_append(gpu, 8, 1, 0, bf16);
  }
  nan_stays_in_its_head(gpu);
}

}  // namespace

int main() {
  return check::run_on_gpu("gpu_mla", all);
}
