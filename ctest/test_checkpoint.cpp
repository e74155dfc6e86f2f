// Checkpoint directories: with an index, without, with symlinks, and everything that can be wrong with one.
#include <cmath>

#include "fuel/checkpoint.h"
#include "fuel_files.h"

using fuel_files::pattern;
using fuel_files::TempDir;
using fuel_files::tensor;
using fuel_files::Tensor;
using fuel_files::throws;
using fuel_files::write_file;
using fuel_files::write_safetensors;
using rocket::Checkpoint;
using rocket::FuelError;

namespace {

const Tensor kA = {"a", "U8", {5}, pattern(5, 1)};
const Tensor kB = {"b", "F32", {2}, pattern(8, 2)};

std::string hint_of(const std::string& dir) {
  try {
    Checkpoint checkpoint(dir);
  } catch (const FuelError& error) {
    return error.hint();
  }
  return "no error";
}

void one_file() {
  const TempDir dir;
  write_safetensors(dir / "model.safetensors", {kA, kB});
  write_file(dir / "._model.safetensors", "left behind by an archiver");
  write_file(dir / "notes.txt", "no tensor here");
  const Checkpoint checkpoint(dir.path());
  check::expect(checkpoint.size() == 2 && checkpoint.files().size() == 1 && checkpoint.dir() == dir.path(),
                "two tensors");
  const Checkpoint::Entry* const b = checkpoint.find("b");
  check::expect(b != nullptr && std::memcmp(b->data(), kB.bytes.data(), 8) == 0, "mapped bytes");
  std::string copy(8, '\0');
  checkpoint.read_bytes(*b, copy.data());
  check::expect(copy == kB.bytes, "copied bytes");
  check::expect(checkpoint.find("c") == nullptr, "absent");
  check::expect(&checkpoint.get("b", {2}) == b, "get with its shape");
  throws<FuelError>("get absent", [&] { checkpoint.get("c", {3, 4}); },
                    {dir.path(), "\"c\"", "expected [3, 4]", "found none"});
  throws<FuelError>("get with another shape", [&] { checkpoint.get("b", {3}); },
                    {"model.safetensors", "\"b\"", "expected [3]", "found F32 [2]"});
}

void with_index() {
  const TempDir dir;
  write_safetensors(dir / "x.safetensors", {kA});
  write_safetensors(dir / "y.safetensors", {kB});
  write_safetensors(dir / "consolidated.safetensors", {kA, kB});  // not named by the index, so not opened
  const std::string index = dir / "model.safetensors.index.json";
  write_file(index,
             R"({"metadata":{"total_size":13},"weight_map":{"a":"x.safetensors","b":"y.safetensors"}})");
  {
    const Checkpoint checkpoint(dir.path(), false);
    check::expect(checkpoint.size() == 2 && checkpoint.files().size() == 2, "shards of the index only");
    check::expect(checkpoint.find("b")->file->path() == (dir / "y.safetensors"), "b lies in y");
  }
  const auto refused = [&](const std::string& text, std::initializer_list<std::string> parts) {
    write_file(index, text);
    throws<FuelError>(text, [&] { Checkpoint checkpoint(dir.path()); }, parts);
  };
  refused(R"({"weight_map":{"a":"x.safetensors","b":"z.safetensors","c":"q.safetensors"}})",
          {dir / "q.safetensors", "missing", "expected 3 shards", "found 1"});
  check::expect(hint_of(dir.path()).find("download") != std::string::npos, "missing shard: hint");
  refused(R"({"weight_map":{"a":"y.safetensors","b":"y.safetensors"}})",
          {index, "\"a\"", "expected in " + (dir / "y.safetensors"), "in no shard"});
  refused(R"({"weight_map":{"a":"y.safetensors","b":"x.safetensors"}})",
          {index, "\"a\"", "expected in " + (dir / "y.safetensors"), "found in " + (dir / "x.safetensors")});
  refused(R"({"weight_map":{"a":"x.safetensors","b":"consolidated.safetensors"}})",
          {"\"a\"", "expected in one shard"});
  refused(R"({"weight_map":{"a":"../x.safetensors"}})", {index, "in this directory", "../x.safetensors"});
  refused(R"({"weight_map":{"a":"/etc/passwd"}})", {index, "in this directory", "/etc/passwd"});
  refused(R"({"weight_map":{"a":"x.safetensors\u0000"}})", {index, "in this directory"});
  refused(R"({"weight_map":{"a":""}})", {index, "in this directory"});
  refused(R"({"weight_map":{"a":1}})", {index, "\"a\"", "expected a file name", "a number"});
  refused(R"({"weight_map":{}})", {index, "expected tensors", "none"});
  refused(R"({"weight_map":[]})", {index, "weight_map", "an array"});
  refused(R"({"metadata":{}})", {index, "weight_map", "found none"});
  refused("[]", {index, "expected an object", "an array"});
  refused("{\n \"weight_map\": {\n  \"a\": }\n}", {index, "line 3, column 8", "expected a value"});
  refused("", {index, "empty"});
  refused("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", {index, "Git LFS pointer"});
  std::filesystem::remove(index);
  std::filesystem::create_directory(index);
  throws<FuelError>("index is a directory", [&] { Checkpoint checkpoint(dir.path()); },
                    {index, "regular file"});
  std::filesystem::remove(index);
  std::filesystem::create_symlink("gone", index);
  throws<FuelError>("index is a dangling link", [&] { Checkpoint checkpoint(dir.path()); },
                    {index, "cannot open"});
}

void broken_shards() {
  const TempDir dir;
  write_safetensors(dir / "model-00001-of-00002.safetensors", {kA});
  const std::string second = dir / "model-00002-of-00002.safetensors";
  throws<FuelError>("a shard missing, no index", [&] { Checkpoint checkpoint(dir.path()); },
                    {second, "missing", "expected 2 shards", "found 1"});
  write_safetensors(second, {kB});
  check::expect(Checkpoint(dir.path()).size() == 2, "both shards, no index");
  write_file(
      dir / "model.safetensors.index.json",
      R"({"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}})");
  check::expect(Checkpoint(dir.path()).size() == 2, "both shards, index");
  for (const bool index : {true, false}) {
    if (!index) std::filesystem::remove(dir / "model.safetensors.index.json");
    const std::string whole = fuel_files::safetensors({kB});
    write_file(second, whole.substr(0, whole.size() - 1));
    throws<FuelError>("truncated shard", [&] { Checkpoint checkpoint(dir.path()); },
                      {second, "truncated", "expected " + std::to_string(whole.size()),
                       "found " + std::to_string(whole.size() - 1)});
    check::expect(hint_of(dir.path()).find("download") != std::string::npos, "truncated shard: hint");
    write_file(second, "");
    throws<FuelError>("empty shard", [&] { Checkpoint checkpoint(dir.path()); }, {second, "empty"});
    write_file(second, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n");
    throws<FuelError>("LFS shard", [&] { Checkpoint checkpoint(dir.path()); }, {second, "Git LFS pointer"});
    check::expect(hint_of(dir.path()).find("git lfs pull") != std::string::npos, "LFS shard: hint");
    write_safetensors(second, {kB, kA});
    throws<FuelError>("tensor twice", [&] { Checkpoint checkpoint(dir.path()); },
                      {second, "\"a\"", "expected in one shard", dir / "model-00001-of-00002.safetensors"});
  }
}

void directories() {
  const TempDir dir;
  throws<FuelError>("empty directory", [&] { Checkpoint checkpoint(dir.path()); },
                    {dir.path(), "*.safetensors", "none"});
  throws<FuelError>("no directory", [&] { Checkpoint checkpoint(dir / "gone"); },
                    {dir / "gone", "expected a directory", "nothing"});
  write_file(dir / "file", "x");
  throws<FuelError>("a file", [&] { Checkpoint checkpoint(dir / "file"); },
                    {dir / "file", "expected a directory", "a file"});

  // As in a Hugging Face cache: names are links into a store of blobs.
  std::filesystem::create_directories(dir / "blobs");
  std::filesystem::create_directories(dir / "snapshots/1");
  write_safetensors(dir / "blobs/0123", {kA, kB});
  std::filesystem::create_symlink("../../blobs/0123", dir / "snapshots/1/model.safetensors");
  check::expect(Checkpoint(dir / "snapshots/1").size() == 2, "a shard that is a link");
  write_file(dir / "blobs/4567", R"({"weight_map":{"a":"model.safetensors","b":"model.safetensors"}})");
  std::filesystem::create_symlink("../../blobs/4567", dir / "snapshots/1/model.safetensors.index.json");
  check::expect(Checkpoint(dir / "snapshots/1").size() == 2, "an index that is a link");
  std::filesystem::remove(dir / "blobs/0123");
  throws<FuelError>("a dangling link", [&] { Checkpoint checkpoint(dir / "snapshots/1"); },
                    {dir / "snapshots/1/model.safetensors", "missing"});
}

void float_vectors() {
  const TempDir dir;
  const std::vector<float> values = {1.5f, -2.0f, 0.0f, 1e-3f, 65504.0f, -INFINITY};
  std::vector<uint16_t> bf16;
  for (const float value : values) bf16.push_back(rocket::f32_to_bf16(value));
  const std::vector<uint16_t> f16 = {0x3E00, 0xC000, 0x0000, 0x0001, 0x7BFF, 0xFC00};
  const std::vector<double> f64(values.begin(), values.end());
  write_safetensors(
      dir / "model.safetensors",
      {tensor("f64", "F64", {6}, f64), tensor("f32", "F32", {2, 3}, values),
       tensor("bf16", "BF16", {6}, bf16), tensor("f16", "F16", {6}, f16),
       tensor("scalar", "F32", {}, std::vector<float>{3.0f}), tensor("conv", "F32", {3, 1, 2}, values),
       Tensor{"ints", "I32", {1}, pattern(4, 1)}, Tensor{"none", "F32", {0}, ""}});
  const Checkpoint checkpoint(dir.path(), false);
  const auto read = [&](const char* name) { return checkpoint.read_f32(*checkpoint.find(name)); };
  check::same_bits("F32", read("f32").data(), values.data(), 6);
  check::same_bits("F64", read("f64").data(), values.data(), 6);
  std::vector<float> rounded;
  for (const uint16_t bits : bf16) rounded.push_back(rocket::bf16_to_f32(bits));
  check::same_bits("BF16", read("bf16").data(), rounded.data(), 6);
  const std::vector<float> half = {1.5f, -2.0f, 0.0f, std::ldexp(1.0f, -24), 65504.0f, -INFINITY};
  check::same_bits("F16", read("f16").data(), half.data(), 6);
  check::expect(read("scalar") == std::vector<float>{3.0f} && read("none").empty(), "scalar, nothing");
  throws<FuelError>("integers", [&] { read("ints"); },
                    {"\"ints\"", "expected F32, BF16, F16 or F64", "found I32 [1]"});
  check::expect(checkpoint.get("scalar", {1}).info->name == "scalar", "[] for [1]");
  check::expect(checkpoint.get("conv", {3, 2}).info->name == "conv", "[C, 1, K] for [C, K]");
  check::expect(checkpoint.get("f32", {2, 1, 3}).info->name == "f32", "[C, K] for [C, 1, K]");
  throws<FuelError>("transposed", [&] { checkpoint.get("conv", {2, 3}); },
                    {"expected [2, 3]", "found F32 [3, 1, 2]"});
  throws<FuelError>("flattened", [&] { checkpoint.get("f32", {6}); }, {"expected [6]", "found F32 [2, 3]"});
}

}  // namespace

int main() {
  one_file();
  with_index();
  broken_shards();
  directories();
  float_vectors();
  return check::finish("checkpoint");
}
