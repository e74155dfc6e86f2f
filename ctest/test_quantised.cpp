// Weights in every spelling: told apart by what lies there, mapped and loaded byte for byte, and refused with
// both sides.
#include <algorithm>
#include <cmath>
#include <functional>
#include <tuple>

#include "fuel/nvfp4.h"
#include "fuel/quantised.h"
#include "fuel_files.h"

using fuel_files::pattern;
using fuel_files::TempDir;
using fuel_files::tensor;
using fuel_files::Tensor;
using fuel_files::throws;
using rocket::Checkpoint;
using rocket::FuelError;
using rocket::Weight;
using rocket::WeightFormat;
using rocket::WeightLoader;
using rocket::WeightSource;

namespace {

Tensor f32(const std::string& name, std::vector<int64_t> shape, float value) {
  int64_t count = 1;
  for (const int64_t dim : shape) count *= dim;
  return tensor(name, "F32", std::move(shape), std::vector<float>(static_cast<size_t>(count), value));
}

Tensor raw(const std::string& name, const std::string& dtype, std::vector<int64_t> shape, int seed) {
  int64_t bytes = static_cast<int64_t>(rocket::dtype_size(*rocket::dtype_parse(dtype)));
  for (const int64_t dim : shape) bytes *= dim;
  return {name, dtype, std::move(shape), pattern(static_cast<size_t>(bytes), seed)};
}

// Calls `body` with a checkpoint of these tensors.
void with(const std::vector<Tensor>& tensors, const std::function<void(const Checkpoint&)>& body) {
  const TempDir dir;
  fuel_files::write_safetensors(dir / "model.safetensors", tensors);
  body(Checkpoint(dir.path()));
}

bool same(const void* found, const std::string& expected) {
  return found != nullptr && std::memcmp(found, expected.data(), expected.size()) == 0;
}

// Loads one weight into an arena of just the size that was announced.
struct Loaded {
  Loaded(const Checkpoint& checkpoint, const std::string& name, int64_t out, int64_t in)
      : loader(checkpoint) {
    const int handle = loader.add(name, out, in);
    arena = rocket::Arena(static_cast<size_t>(loader.arena_bytes()), "test weights");
    loader.load(arena);
    weight = loader.weight(handle);
    check::expect(static_cast<int64_t>(arena.used()) == loader.arena_bytes(),
                  name + ": arena bytes as announced");
  }
  WeightLoader loader;
  rocket::Arena arena;
  Weight weight;
};

void check_both(const Checkpoint& checkpoint, const std::string& name, WeightFormat format, int64_t out,
                int64_t in, const std::string& data, const std::string& scale, float global) {
  const WeightSource source = describe_weight(checkpoint, name, out, in);
  const Weight mapped = map_weight(checkpoint, source);
  const Loaded loaded(checkpoint, name, out, in);
  for (const Weight& weight : {mapped, loaded.weight}) {
    check::expect(weight.format == format && weight.out == out && weight.in == in,
                  name + ": format and shape");
    check::expect(same(weight.data, data), name + ": data");
    check::expect(scale.empty() ? weight.block_scale == nullptr : same(weight.block_scale, scale),
                  name + ": block scale");
    check::expect(weight.global_scale == global, name + ": global scale");
  }
  check::expect(source.memory_bytes == static_cast<int64_t>(data.size() + scale.size()),
                name + ": bytes in memory");
  check::expect(source.in_place && mapped.data == source.data->data(), name + ": used where it lies");
}

void plain_formats() {
  const Tensor a = raw("a.weight", "F32", {3, 5}, 1), b = raw("b.weight", "BF16", {4, 7}, 2),
               bare = raw("hc_fn", "BF16", {2, 3}, 3);
  with({a, b, bare}, [&](const Checkpoint& checkpoint) {
    check_both(checkpoint, "a", WeightFormat::kF32, 3, 5, a.bytes, "", 1.0f);
    check_both(checkpoint, "b", WeightFormat::kBF16, 4, 7, b.bytes, "", 1.0f);
    check_both(checkpoint, "hc_fn", WeightFormat::kBF16, 2, 3, bare.bytes, "", 1.0f);
    check::expect(
        has_weight(checkpoint, "a") && has_weight(checkpoint, "hc_fn") && !has_weight(checkpoint, "c"),
        "has_weight");
  });
  const std::vector<uint16_t> half = {0x3C00, 0xC000, 0x0001, 0x7BFF, 0x8000, 0x3555};
  std::vector<float> expected;
  for (const uint16_t bits : half) expected.push_back(rocket::f16_to_f32(bits));
  with({tensor("h.weight", "F16", {2, 3}, half)}, [&](const Checkpoint& checkpoint) {
    const WeightSource source = describe_weight(checkpoint, "h", 2, 3);
    check::expect(source.format == WeightFormat::kF32 && !source.in_place && source.memory_bytes == 24 &&
                      source.disk_bytes == 12,
                  "F16");
    const Loaded loaded(checkpoint, "h", 2, 3);
    check::expect(loaded.weight.format == WeightFormat::kF32, "F16 becomes F32");
    check::same_bits("F16 values", static_cast<const float*>(loaded.weight.data), expected.data(), 6);
    throws<FuelError>("F16 in place", [&] { map_weight(checkpoint, source); },
                      {"h.weight", "where it lies", "F16 [2, 3]"});
  });
}

void nvfp4_formats() {
  const Tensor p = raw("m.weight", "U8", {3, 16}, 1), s = raw("m.weight_scale", "F8_E4M3", {3, 2}, 2);
  const Tensor cp = raw("c.weight_packed", "U8", {3, 16}, 3),
               cs = raw("c.weight_scale", "F8_E4M3", {3, 2}, 4);
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{}, std::vector<int64_t>{1}}) {
    with({p, s, f32("m.weight_scale_2", shape, 0.375f), f32("m.input_scale", shape, 9.0f), cp, cs,
          f32("c.weight_global_scale", shape, 4.0f)},
         [&](const Checkpoint& checkpoint) {
           check_both(checkpoint, "m", WeightFormat::kNVFP4, 3, 32, p.bytes, s.bytes, 0.375f);
           check_both(checkpoint, "c", WeightFormat::kNVFP4, 3, 32, cp.bytes, cs.bytes, 0.25f);
           const WeightSource m = describe_weight(checkpoint, "m", 3, 32),
                              c = describe_weight(checkpoint, "c", 3, 32);
           check::expect(m.input_scale != nullptr && c.input_scale == nullptr,
                         "input_scale is kept, and may be missing");
           check::expect(!m.global_divides && c.global_divides && has_weight(checkpoint, "c"),
                         "the two spellings");
           check::expect(m.disk_bytes == 48 + 6 + 4 && m.memory_bytes == 48 + 6, "bytes of NVFP4");
         });
  }
  // ModelOpt multiplies, compressed-tensors divides; a zero in either is a weight of zeros.
  const auto global = [&](const Tensor& data, const Tensor& scale, const std::string& suffix, float stored) {
    float value = -1;
    const std::string name = data.name.substr(0, 1);
    with({data, scale, f32(name + suffix, {}, stored)}, [&](const Checkpoint& checkpoint) {
      value = map_weight(checkpoint, describe_weight(checkpoint, name, 3, 32)).global_scale;
    });
    return value;
  };
  check::expect(global(p, s, ".weight_scale_2", 0.0f) == 0.0f, "ModelOpt: multiplier 0");
  check::expect(global(cp, cs, ".weight_global_scale", 0.0f) == 0.0f,
                "compressed-tensors: divisor 0 is not infinity");
  check::expect(global(cp, cs, ".weight_global_scale", -0.0f) == 0.0f, "compressed-tensors: divisor -0");
  for (const float bad : {NAN, INFINITY, -1.0f}) {
    throws<FuelError>("bad multiplier", [&] { global(p, s, ".weight_scale_2", bad); },
                      {"m.weight_scale_2", "finite", std::to_string(bad)});
    throws<FuelError>("bad divisor", [&] { global(cp, cs, ".weight_global_scale", bad); },
                      {"c.weight_global_scale", "finite"});
  }
  throws<FuelError>("divisor whose inverse overflows",
                    [&] { global(cp, cs, ".weight_global_scale", 1e-45f); }, {"finite"});
}

void fp8_rows() {
  // 8,200 rows of 1,030 columns are more than one piece of the loader's.
  for (const auto& [out, in] : {std::pair<int64_t, int64_t>{3, 5}, {2, 1}, {8200, 1030}}) {
    const Tensor w = raw("r.weight", "F8_E4M3", {out, in}, 3);
    std::vector<float> scale(static_cast<size_t>(out)), expected(static_cast<size_t>(out * in));
    std::vector<uint16_t> half, brief;
    for (size_t i = 0; i < scale.size(); ++i) {
      half.push_back(static_cast<uint16_t>(0x3000 + 64 * (i % 15)));  // numbers that BF16 holds as well
      scale[i] = rocket::f16_to_f32(half[i]);
      brief.push_back(rocket::f32_to_bf16(scale[i]));
    }
    for (size_t i = 0; i < expected.size(); ++i) {
      expected[i] =
          rocket::e4m3_to_f32(static_cast<uint8_t>(w.bytes[i])) * scale[i / static_cast<size_t>(in)];
    }
    for (const Tensor& rows :
         {tensor("r.weight_scale", "F32", {out, 1}, scale), tensor("r.weight_scale", "BF16", {out, 1}, brief),
          tensor("r.weight_scale", "F16", {out}, half)}) {
      with({w, rows}, [&](const Checkpoint& checkpoint) {
        const WeightSource source = describe_weight(checkpoint, "r", out, in);
        check::expect(source.format == WeightFormat::kF32 && !source.in_place, "FP8 with rows becomes F32");
        check::expect(source.memory_bytes == 4 * out * in && source.block_scale == nullptr,
                      "bytes in memory");
        check::expect(source.disk_bytes == out * in + static_cast<int64_t>(rows.bytes.size()),
                      "bytes on disk");
        const Loaded loaded(checkpoint, "r", out, in);
        check::same_bits("FP8 with rows", static_cast<const float*>(loaded.weight.data), expected.data(),
                         out * in);
        check::expect(loaded.weight.block_scale == nullptr, "no scales beside F32");
      });
    }
  }
}

void fp8_formats() {
  const Tensor w = raw("b.weight", "F8_E4M3", {130, 257}, 1);
  std::vector<float> scales(2 * 3);
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = 0.5f + static_cast<float>(i);
  const Tensor blocks = tensor("b.weight_scale_inv", "F32", {2, 3}, scales);
  with({w, blocks}, [&](const Checkpoint& checkpoint) {
    check_both(checkpoint, "b", WeightFormat::kFP8Block, 130, 257, w.bytes, blocks.bytes, 1.0f);
  });
  std::vector<uint16_t> rounded;
  for (const float value : scales) rounded.push_back(rocket::f32_to_bf16(value));
  with({w, tensor("b.weight_scale_inv", "BF16", {2, 3}, rounded)}, [&](const Checkpoint& checkpoint) {
    check::expect(!describe_weight(checkpoint, "b", 130, 257).in_place, "BF16 block scales are expanded");
    const Loaded loaded(checkpoint, "b", 130, 257);
    check::same_bits("BF16 block scales", static_cast<const float*>(loaded.weight.block_scale), scales.data(),
                     6);
    check::expect(same(loaded.weight.data, w.bytes), "FP8 data beside BF16 scales");
  });
  // compressed-tensors calls the blocks' multipliers by the other name; so does ModelOpt, in another shape.
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{2, 3}, std::vector<int64_t>{2, 1, 3, 1}}) {
    const Tensor named = tensor("b.weight_scale", "F32", shape, scales);
    with({w, named}, [&](const Checkpoint& checkpoint) {
      check_both(checkpoint, "b", WeightFormat::kFP8Block, 130, 257, w.bytes, named.bytes, 1.0f);
    });
  }
  with({w, tensor("b.weight_scale", "BF16", {2, 3}, rounded)}, [&](const Checkpoint& checkpoint) {
    const Loaded loaded(checkpoint, "b", 130, 257);
    check::same_bits("BF16 block scales by the other name",
                     static_cast<const float*>(loaded.weight.block_scale), scales.data(), 6);
  });
  for (const std::string dtype : {"F32", "BF16"}) {
    const Tensor scalar = dtype == "F32"
                              ? f32("b.weight_scale", {}, 0.75f)
                              : tensor("b.weight_scale", "BF16", {1}, std::vector<uint16_t>{0x3F40});
    with({w, scalar}, [&](const Checkpoint& checkpoint) {
      const Loaded loaded(checkpoint, "b", 130, 257);
      check::expect(loaded.weight.format == WeightFormat::kFP8Block && same(loaded.weight.data, w.bytes),
                    "FP8 with one scale");
      const std::vector<float> expected(6, 0.75f);
      check::same_bits("one scale for every block", static_cast<const float*>(loaded.weight.block_scale),
                       expected.data(), 6);
      const WeightSource source = describe_weight(checkpoint, "b", 130, 257);
      throws<FuelError>("FP8 with one scale in place", [&] { map_weight(checkpoint, source); },
                        {"b.weight", "where it lies"});
    });
  }
  // A weight of one block: its scalar is as long as its table.
  const Tensor small = raw("s.weight", "F8_E4M3", {2, 3}, 5);
  with({small, f32("s.weight_scale", {1}, 0.25f)}, [&](const Checkpoint& checkpoint) {
    const Loaded loaded(checkpoint, "s", 2, 3);
    check::expect(*static_cast<const float*>(loaded.weight.block_scale) == 0.25f,
                  "FP8 with one scale, one block");
  });
  for (const std::string dtype : {"U8", "F8_E8M0"}) {
    for (const std::string scale : {"x.weight_scale", "x.weight_scale_inv"}) {
      const Tensor mx = raw("x.weight", "F8_E4M3", {3, 64}, 6), exponent = raw(scale, dtype, {3, 2}, 7);
      with({mx, exponent}, [&](const Checkpoint& checkpoint) {
        check_both(checkpoint, "x", WeightFormat::kMXFP8, 3, 64, mx.bytes, exponent.bytes, 1.0f);
      });
    }
  }
}

void refusals() {
  const Tensor p = raw("a.weight", "U8", {3, 16}, 1), s = raw("a.weight_scale", "F8_E4M3", {3, 2}, 2),
               g = f32("a.weight_scale_2", {}, 1);
  const Tensor e = raw("a.weight", "F8_E4M3", {3, 32}, 3);
  const auto refused = [](const std::string& what, const std::vector<Tensor>& tensors, int64_t out,
                          int64_t in, std::initializer_list<std::string> parts) {
    with(tensors, [&](const Checkpoint& checkpoint) {
      throws<FuelError>(what, [&] { describe_weight(checkpoint, "a", out, in); }, parts);
      throws<FuelError>(what, [&] { describe_weight(checkpoint, "a", out, in); }, {checkpoint.dir()});
    });
  };
  refused("absent", {raw("b.weight", "F32", {1}, 1)}, 3, 4,
          {"\"a.weight\"", "expected [3, 4]", "found none"});
  refused("BF16 of another shape", {raw("a.weight", "BF16", {4, 3}, 1)}, 3, 4,
          {"model.safetensors", "\"a.weight\"", "expected F32 or BF16 or F16 [3, 4]", "found BF16 [4, 3]"});
  refused("an integer weight", {raw("a.weight", "I32", {3, 4}, 1)}, 3, 4,
          {"\"a.weight\"", "found I32 [3, 4]"});
  refused("NVFP4 of another shape", {raw("a.weight", "U8", {3, 32}, 1), s, g}, 3, 32,
          {"expected U8 [3, 16]", "found U8 [3, 32]"});
  refused("NVFP4, columns not in blocks", {raw("a.weight", "U8", {3, 12}, 1), s, g}, 3, 24,
          {"\"a.weight\"", "16 divides", "found 24"});
  refused("NVFP4 without block scale", {p, g}, 3, 32,
          {"\"a.weight\"", "\"a.weight_scale\" F8_E4M3 [3, 2]", "none"});
  refused("NVFP4 without global scale", {p, s}, 3, 32, {"\"a.weight_scale_2\"", "none"});
  refused("NVFP4 with the other spelling's global", {p, s, f32("a.weight_global_scale", {}, 1)}, 3, 32,
          {"\"a.weight_scale_2\"", "none"});
  refused("NVFP4, block scale of another dtype", {p, raw("a.weight_scale", "U8", {3, 2}, 2), g}, 3, 32,
          {"\"a.weight_scale\"", "F8_E4M3 [3, 2]", "found U8 [3, 2]"});
  refused("NVFP4, block scale of another shape", {p, raw("a.weight_scale", "F8_E4M3", {3, 1}, 2), g}, 3, 32,
          {"F8_E4M3 [3, 2]", "found F8_E4M3 [3, 1]"});
  refused("NVFP4, a vector for a global", {p, s, f32("a.weight_scale_2", {3}, 1)}, 3, 32,
          {"\"a.weight_scale_2\"", "[]", "found F32 [3]"});
  refused("packed integers",
          {raw("a.weight_packed", "I32", {3, 4}, 1), raw("a.weight_scale", "BF16", {3, 1}, 1)}, 3, 32,
          {"\"a.weight_packed\"", "expected U8 [3, 16]", "found I32 [3, 4]"});
  refused("both spellings", {p, s, g, raw("a.weight_packed", "U8", {3, 16}, 1)}, 3, 32,
          {"\"a.weight\"", "\"a.weight_packed\"", "found both"});
  refused("FP8 without scale", {e}, 3, 32,
          {"\"a.weight\"", "\"a.weight_scale\"", "\"a.weight_scale_inv\"", "none"});
  refused("FP8 of another shape", {e, f32("a.weight_scale_inv", {1, 1}, 1)}, 3, 64,
          {"expected F8_E4M3 [3, 64]", "found F8_E4M3 [3, 32]"});
  refused("FP8 with a scale too many", {e, f32("a.weight_scale_inv", {1, 2}, 1)}, 3, 32,
          {"\"a.weight_scale_inv\"", "[1, 1]", "found F32 [1, 2]"});
  refused("FP8 with a scale for each row but one", {e, f32("a.weight_scale", {2, 1}, 1)}, 3, 32,
          {"\"a.weight_scale\"", "[]", "found F32 [2, 1]"});
  refused("FP8 with rows by the name of blocks", {e, f32("a.weight_scale_inv", {3, 1}, 1)}, 3, 32,
          {"\"a.weight_scale_inv\"", "[1, 1]", "found F32 [3, 1]"});
  refused("FP8 with a block too many by the other name", {e, f32("a.weight_scale", {1, 2}, 1)}, 3, 32,
          {"\"a.weight_scale\"", "[]", "found F32 [1, 2]"});
  refused("MXFP8, columns not in blocks",
          {raw("a.weight", "F8_E4M3", {3, 48}, 1), raw("a.weight_scale", "U8", {3, 2}, 1)}, 3, 48,
          {"32 divides", "found 48"});
  refused("MXFP8, scale of another shape", {e, raw("a.weight_scale", "U8", {3, 2}, 1)}, 3, 32,
          {"\"a.weight_scale\"", "[3, 1]", "found U8 [3, 2]"});
}

// Many weights over two shards, registered in another order than they lie in; larger than a chunk and a
// progress step.
void loader() {
  const TempDir dir;
  const Tensor big =
      raw("z.weight", "F16", {3000, 2111}, 1);  // several chunks when expanded, not a multiple of one
  const Tensor bf16 = raw("y.weight", "BF16", {2500, 2500}, 2);
  const Tensor packed = raw("x.weight", "U8", {5, 16}, 3),
               scale = raw("x.weight_scale", "F8_E4M3", {5, 2}, 4);
  fuel_files::write_safetensors(dir / "a.safetensors", {big, scale, f32("x.weight_scale_2", {1}, 2.0f)});
  fuel_files::write_safetensors(dir / "b.safetensors", {packed, bf16});
  const Checkpoint checkpoint(dir.path(), false);
  WeightLoader loader(checkpoint);
  const int y = loader.add("y", 2500, 2500), x = loader.add("x", 5, 32), z = loader.add("z", 3000, 2111);
  check::expect(loader.add("y", 2500, 2500) == y && loader.size() == 3,
                "the same name gives the same handle");
  throws<FuelError>("the same name with another shape", [&] { loader.add("y", 2500, 1250); },
                    {"y.weight", "[2500, 1250]", "found BF16 [2500, 2500]"});
  const int64_t disk =
      static_cast<int64_t>(big.bytes.size() + bf16.bytes.size() + packed.bytes.size() + scale.bytes.size()) +
      4;
  check::expect(loader.disk_bytes() == disk, "bytes to read");
  check::expect(loader.arena_bytes() >= 3000 * 2111 * 4 + 2500 * 2500 * 2 + 90 &&
                    loader.arena_bytes() < 3000 * 2111 * 4 + 2500 * 2500 * 2 + 90 + 4 * 64,
                "bytes to take");
  rocket::Arena arena(static_cast<size_t>(loader.arena_bytes()), "test weights");
  std::vector<int64_t> seen;
  loader.load(arena, [&](int64_t done, int64_t total) {
    check::expect(total == disk && done <= total && (seen.empty() || done > seen.back()),
                  "progress grows up to the total");
    seen.push_back(done);
  });
  check::expect(seen.size() >= 3 && seen.size() < 12 && !seen.empty() && seen.back() == disk,
                "progress every few MiB, and at the end");
  check::expect(same(loader.weight(y).data, bf16.bytes), "BF16 data");
  check::expect(same(loader.weight(x).data, packed.bytes) &&
                    same(loader.weight(x).block_scale, scale.bytes) && loader.weight(x).global_scale == 2.0f,
                "NVFP4 over two shards");
  const float* const expanded = static_cast<const float*>(loader.weight(z).data);
  bool all = true;
  for (int64_t i = 0; i < 3000 * 2111; ++i) {
    uint16_t bits;
    std::memcpy(&bits, big.bytes.data() + 2 * i, 2);
    const float expected = rocket::f16_to_f32(bits);
    all = all && (expanded[i] == expected || (std::isnan(expanded[i]) && std::isnan(expected)));
  }
  check::expect(all, "F16 data expanded over chunks");
  struct Stop {};
  bool stopped = false;
  try {
    rocket::Arena again(static_cast<size_t>(loader.arena_bytes()), "test weights");
    loader.load(again, [](int64_t, int64_t) { throw Stop(); });
  } catch (const Stop&) {
    stopped = true;
  }
  check::expect(stopped, "progress can stop the load");
  rocket::Arena small(4 << 20, "test weights");
  throws<rocket::PlanError>("an arena that is too small", [&] { loader.load(small); }, {"test weights"});
}

// Parts of a weight, read on their own, hold the numbers that the whole has there; they read no more than they are of.
struct Cuttable {
  const char* what;
  std::vector<Tensor> tensors;
  int64_t out, in;
  std::vector<std::pair<int32_t, bool>> cuts;     // parts, columns: those that can be
  std::vector<std::pair<int32_t, bool>> refused;  // and those that cannot
};

std::vector<float> numbers(const Weight& weight) {
  std::vector<float> values(static_cast<size_t>(weight.out * weight.in));
  dequantise_rows(weight, 0, weight.out, values.data());
  return values;
}

void check_part(const Checkpoint& checkpoint, const Cuttable& c, const std::vector<float>& whole,
                int32_t parts, bool columns, int64_t* disk) {
  for (int32_t part = 0; part < parts; ++part) {
    WeightLoader loader(checkpoint);
    const int handle = loader.add("w", c.out, c.in, {part, parts, columns});
    rocket::Arena arena(static_cast<size_t>(loader.arena_bytes()), "test weights");
    int64_t read = 0;
    loader.load(arena, [&](int64_t done, int64_t) { read = done; });
    const Weight& w = loader.weight(handle);
    check::expect(read == loader.disk_bytes(), std::string(c.what) + ": bytes read as announced");
    check::expect(static_cast<int64_t>(arena.used()) == loader.arena_bytes(),
                  std::string(c.what) + ": arena bytes as announced");
    *disk += loader.disk_bytes();
    const int64_t rows = columns ? c.out : c.out / parts, wide = columns ? c.in / parts : c.in;
    check::expect(w.out == rows && w.in == wide, std::string(c.what) + ": shape of a part");
    const int64_t row = columns ? 0 : part * rows, column = columns ? part * wide : 0;
    std::vector<float> expected;
    for (int64_t i = 0; i < rows * wide; ++i)
      expected.push_back(whole[static_cast<size_t>((row + i / wide) * c.in + column + i % wide)]);
    check::same_bits(c.what, numbers(w).data(), expected.data(), rows * wide);
  }
}

void parts() {
  const auto scale16 = [](int64_t count) {
    return std::vector<uint16_t>(static_cast<size_t>(count), 0x3c00);
  };
  std::vector<float> blocks;
  for (int i = 0; i < 6; ++i) blocks.push_back(0.5f + static_cast<float>(i));
  std::vector<float> of_rows;
  for (int i = 0; i < 12; ++i) of_rows.push_back(0.25f * static_cast<float>(i + 1));
  const std::vector<Cuttable> all = {
      {"BF16",
       {raw("w.weight", "BF16", {12, 6}, 1)},
       12,
       6,
       {{2, false}, {3, true}, {4, false}},
       {{5, false}}},
      {"F16", {tensor("w.weight", "F16", {12, 6}, scale16(72))}, 12, 6, {{3, false}, {2, true}}, {{4, true}}},
      {"NVFP4",
       {raw("w.weight", "U8", {6, 32}, 2), raw("w.weight_scale", "F8_E4M3", {6, 4}, 3),
        f32("w.weight_scale_2", {}, 0.5f)},
       6,
       64,
       {{2, false}, {3, false}, {2, true}, {4, true}},
       {{8, true}}},
      {"MXFP8",
       {raw("w.weight", "F8_E4M3", {6, 64}, 4),
        tensor("w.weight_scale", "U8", {6, 2}, std::vector<uint8_t>(12, 126))},
       6,
       64,
       {{3, false}, {2, true}},
       {{4, true}}},
      {"FP8 in blocks",
       {raw("w.weight", "F8_E4M3", {256, 264}, 5), tensor("w.weight_scale_inv", "F32", {2, 3}, blocks)},
       256,
       264,
       {{2, false}, {4, false}},  // whole blocks of rows, and parts that lie within one
       {{2, true}, {3, true}}},
      {"FP8 with one scale",
       {raw("w.weight", "F8_E4M3", {12, 150}, 6), f32("w.weight_scale", {}, 0.5f)},
       12,
       150,
       {{3, false}, {3, true}},
       {{7, false}}},
      {"FP8 with rows",
       {raw("w.weight", "F8_E4M3", {12, 10}, 7), tensor("w.weight_scale", "F32", {12, 1}, of_rows)},
       12,
       10,
       {{3, false}, {2, true}},
       {{5, false}}},
  };
  for (const Cuttable& c : all) {
    with(c.tensors, [&](const Checkpoint& checkpoint) {
      const WeightSource source = describe_weight(checkpoint, "w", c.out, c.in);
      const std::vector<float> whole = numbers(Loaded(checkpoint, "w", c.out, c.in).weight);
      for (const auto& [parts, columns] : c.cuts) {
        check::expect(can_cut(source, parts, columns), std::string(c.what) + " can be cut");
        int64_t disk = 0;
        check_part(checkpoint, c, whole, parts, columns, &disk);
        // Scales that several parts need are read by each.
        check::expect(disk >= source.disk_bytes && disk <= source.disk_bytes + parts * 64,
                      std::string(c.what) + ": all parts together read the whole once");
      }
      for (const auto& [parts, columns] : c.refused) {
        check::expect(!can_cut(source, parts, columns), std::string(c.what) + " cannot be cut");
        const rocket::WeightCut cut{0, parts, columns};
        throws<FuelError>(c.what, [&] { cut_weight(source, cut); },
                          {"w.weight", "in " + std::to_string(parts) + " parts of whole blocks of"});
      }
    });
  }
}

// A view of some rows is a weight of its own.
void rows_in_place() {
  with({raw("w.weight", "U8", {6, 32}, 2), raw("w.weight_scale", "F8_E4M3", {6, 4}, 3),
        f32("w.weight_scale_2", {}, 0.5f), raw("b.weight", "BF16", {6, 5}, 1),
        raw("f.weight", "F8_E4M3", {384, 130}, 5),
        tensor("f.weight_scale_inv", "F32", {3, 2}, std::vector<float>{1, 2, 3, 4, 5, 6})},
       [&](const Checkpoint& checkpoint) {
         for (const auto& [name, out, in] :
              {std::tuple<const char*, int64_t, int64_t>{"w", 6, 64}, {"b", 6, 5}, {"f", 384, 130}}) {
           const Loaded loaded(checkpoint, name, out, in);
           const std::vector<float> whole = numbers(loaded.weight);
           const int64_t count = out / 3;
           const Weight part = rows_of(loaded.weight, count, count);
           check::same_bits("rows in place", numbers(part).data(), whole.data() + count * in, count * in);
         }
       });
}

}  // namespace

int main() {
  parts();
  rows_in_place();
  plain_formats();
  nvfp4_formats();
  fp8_formats();
  fp8_rows();
  refusals();
  loader();
  return check::finish("quantised");
}
