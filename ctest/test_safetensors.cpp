// The safetensors reader: well-formed files byte by byte, and every way in which a file can lie.
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "fuel/safetensors.h"
#include "fuel_files.h"

using fuel_files::frame;
using fuel_files::pattern;
using fuel_files::Tensor;
using fuel_files::throws;
using rocket::DType;
using rocket::FuelError;
using rocket::SafetensorsFile;
using rocket::TensorInfo;

namespace {

void well_formed(const fuel_files::TempDir& dir) {
  const std::vector<Tensor> tensors = {
      {"scalar", "F32", {}, pattern(4, 1)},         {"empty", "BF16", {0, 7}, ""},
      {"matrix", "BF16", {3, 5}, pattern(30, 2)},   {"packed", "U8", {1, 3}, pattern(3, 3)},
      {"scales", "F8_E4M3", {2, 2}, pattern(4, 4)}, {"e8m0", "F8_E8M0", {3}, pattern(3, 5)},
      {"long", "I64", {1, 1, 2}, pattern(16, 6)},   {"half", "F16", {2}, pattern(4, 7)},
      {"double", "F64", {1}, pattern(8, 8)},        {"last \xC3\xA9", "BOOL", {1}, pattern(1, 9)},
      {"nothing at the end", "F32", {2, 0, 3}, ""},
  };
  const std::string path = dir / "model.safetensors";
  fuel_files::write_safetensors(path, tensors);
  for (const bool map : {true, false}) {
    const SafetensorsFile file(path, map);
    check::expect(file.path() == path && !file.sparse(), "path, not sparse");
    check::expect(file.tensors().size() == tensors.size(), "every tensor");
    check::expect(file.file_bytes() == std::filesystem::file_size(path), "file size");
    for (size_t i = 0; i < tensors.size(); ++i) {
      const TensorInfo& info = file.tensors()[i];
      check::expect(info.name == tensors[i].name && info.shape == tensors[i].shape &&
                        rocket::dtype_name(info.dtype) == tensors[i].dtype &&
                        info.bytes == tensors[i].bytes.size(),
                    tensors[i].name + ": name, dtype, shape, size");
      std::string copy(info.bytes, '\0');
      file.read(info.offset, info.bytes, copy.data());
      check::expect(copy == tensors[i].bytes, tensors[i].name + ": bytes by read");
      if (map && info.bytes > 0) {
        check::expect(std::memcmp(file.data(info), tensors[i].bytes.data(), info.bytes) == 0,
                      tensors[i].name + ": bytes by map");
      }
    }
    check::expect(file.tensors()[0].elements() == 1 && file.tensors()[1].elements() == 0, "elements");
    check::expect(file.tensors()[2].describe() == "BF16 [3, 5]" && file.tensors()[0].describe() == "F32 []",
                  "describe");
    throws<FuelError>("read past the end",
                      [&] {
                        char byte[2];
                        file.read(file.file_bytes() - 1, 2, byte);
                      },
                      {path, "truncated", "expected 2 bytes", "found 1"});
  }
}

void accepted_variants(const fuel_files::TempDir& dir) {
  const std::string path = dir / "variant.safetensors";
  const auto opens = [&](const std::string& what, const std::string& header, const std::string& data,
                         size_t tensors) {
    fuel_files::write_file(path, frame(header, data));
    try {
      check::expect(SafetensorsFile(path).tensors().size() == tensors, what);
    } catch (const std::exception& error) {
      check::expect(false, what + ": " + error.what());
    }
  };
  opens("no tensors at all", "{}", "", 0);
  opens("metadata only", R"({"__metadata__":{"a":"b"}})", "", 0);
  opens("padded with spaces", R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}      )", "x", 1);
  opens(
      "not in file order",
      R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
      "xy", 2);
  opens("fields in another order", R"({"a":{"data_offsets":[0,1],"shape":[1],"dtype":"U8"}})", "x", 1);
  opens(
      "several tensors without elements",
      R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[1,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"c":{"dtype":"F64","shape":[4,0],"data_offsets":[0,0]}})",
      "x", 3);
}

void header_lies(const fuel_files::TempDir& dir) {
  const std::string path = dir / "lies.safetensors";
  const auto refused = [&](const std::string& header, const std::string& data,
                           std::initializer_list<std::string> parts) {
    fuel_files::write_file(path, frame(header, data));
    throws<FuelError>(header.substr(0, 120), [&] { SafetensorsFile file(path); }, parts);
    throws<FuelError>(header.substr(0, 120), [&] { SafetensorsFile file(path); }, {path});
  };
  const auto tensor = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return "{\"a\":{\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}}";
  };
  refused("", "", {"expected '{'"});
  refused("[]", "", {"expected '{'"});
  refused(" {}", "", {"expected '{'"});
  refused("{", "", {"header: byte 1"});
  refused("{} x", "", {"header: byte 3"});
  refused(R"({"a":1})", "", {"\"a\"", "expected an object", "found 1"});
  refused(R"({"__metadata__":[]})", "", {"__metadata__", "expected an object of strings", "an array"});
  refused(R"({"__metadata__":{"k":1}})", "", {"__metadata__", "\"k\"", "expected a string", "found 1"});
  refused(R"({"a":{"shape":[1],"data_offsets":[0,1]}})", "x", {"\"a\"", "dtype", "found none"});
  refused(R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", "x", {"\"a\"", "shape", "found none"});
  refused(R"({"a":{"dtype":"U8","shape":[1]}})", "x", {"\"a\"", "data_offsets", "found none"});
  const std::string one = tensor("\"U8\"", "[1]", "[0,1]");
  refused(one.substr(0, one.size() - 1) + "," + one.substr(1), "x", {"duplicate key \"a\""});
  refused(tensor("\"F4\"", "[2]", "[0,1]"), "x", {"\"a\"", "unknown dtype \"F4\""});
  refused(tensor("\"bf16\"", "[1]", "[0,2]"), "xy", {"unknown dtype \"bf16\""});
  refused(tensor("8", "[1]", "[0,1]"), "x", {"dtype", "expected a string", "found 8"});
  refused(tensor("\"U8\"", "[-1]", "[0,1]"), "x", {"shape", "at least 0", "found -1"});
  refused(tensor("\"U8\"", "[1.0]", "[0,1]"), "x", {"shape", "whole numbers"});
  refused(tensor("\"U8\"", "[\"1\"]", "[0,1]"), "x", {"shape", "whole numbers", "found \"1\""});
  refused(tensor("\"U8\"", "1", "[0,1]"), "x", {"shape", "expected an array"});
  refused(tensor("\"U8\"", "[9223372036854775808]", "[0,1]"), "x", {"shape", "whole numbers"});
  refused(tensor("\"F32\"", "[4611686018427387904]", "[0,1]"), "x",
          {"overflows", "F32 [4611686018427387904]"});
  refused(tensor("\"U8\"", "[4294967296,4294967296]", "[0,0]"), "", {"overflows"});
  refused(tensor("\"U8\"", "[4294967296,4294967296,0]", "[0,0]"), "", {"overflows"});
  refused(tensor("\"U8\"", "[1]", "[0]"), "x", {"data_offsets", "expected [begin, end]"});
  refused(tensor("\"U8\"", "[1]", "[0,1,2]"), "x", {"data_offsets", "expected [begin, end]"});
  refused(tensor("\"U8\"", "[1]", "[0,-1]"), "x", {"data_offsets", "found -1"});
  refused(tensor("\"U8\"", "[1]", "[1,0]"), "x", {"data_offsets", "before the begin"});
  refused(tensor("\"BF16\"", "[2,3]", "[0,10]"), pattern(10, 0),
          {"expected 12 bytes for BF16 [2, 3]", "found 10"});
  refused(tensor("\"U8\"", "[1]", "[1,2]"), "xy", {"leaves a gap", "expected data offset 0", "found 1"});
  refused(tensor("\"U8\"", "[1]", "[18446744073709551614,18446744073709551615]"), "x", {"truncated"});
  refused(
      R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
      "xyz", {"\"b\"", "overlaps", "expected data offset 2", "found 1"});
  refused(
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
      "xyz", {"\"b\"", "gap", "expected data offset 1", "found 2"});
  refused(
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"z":{"dtype":"U8","shape":[0],"data_offsets":[3,3]}})",
      "xyz", {"\"z\"", "gap"});
  const std::string whole = std::to_string(8 + one.size() + 1);
  refused(one, "", {"truncated", "expected " + whole + " bytes", "found " + std::to_string(8 + one.size())});
  refused(one, "xy",
          {"expected " + whole + " bytes as the header says", "found " + std::to_string(8 + one.size() + 2)});
  refused("{\"a\\n\\u001b\":1}", "", {"a\\x0a\\x1b"});
}

void files_that_are_none(const fuel_files::TempDir& dir) {
  const std::string path = dir / "broken.safetensors";
  const auto refused = [&](const std::string& what, const std::string& content, const std::string& hint,
                           std::initializer_list<std::string> parts) {
    fuel_files::write_file(path, content);
    throws<FuelError>(what, [&] { SafetensorsFile file(path); }, parts);
    try {
      SafetensorsFile file(path, false);
    } catch (const FuelError& error) {
      check::expect(error.hint().find(hint) != std::string::npos, what + ": hint: " + error.hint());
    }
  };
  refused("zero bytes", "", "download", {path, "empty", "0 bytes"});
  refused("Git LFS pointer", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5368709120\n",
          "git lfs pull", {path, "Git LFS pointer"});
  refused("five bytes", "\x01\x02\x03\x04\x05", "download",
          {path, "truncated", "at least 8 bytes", "found 5"});
  refused("header cut", frame("{}", "").substr(0, 9), "download",
          {path, "truncated", "at least 10 bytes", "found 9"});
  refused("a web page", "<!DOCTYPE html><html></html>", "",
          {path, "not a safetensors file", "at most 100000000 bytes"});
  refused("a header of 2^64-1 bytes", std::string(8, '\xFF') + "{}", "", {path, "not a safetensors file"});
  std::string limit = frame("{}", "");
  std::memcpy(limit.data(), "\x01\xE1\xF5\x05\0\0\0\0", 8);  // 100,000,001
  refused("a header over the limit", limit, "", {"not a safetensors file", "found 100000001"});
  std::memcpy(limit.data(), "\x00\xE1\xF5\x05\0\0\0\0", 8);  // 100,000,000: the limit itself, but not there
  refused("a header at the limit", limit, "download", {"truncated", "at least 100000008 bytes", "found 10"});

  throws<FuelError>("absent", [&] { SafetensorsFile file(dir / "absent.safetensors"); },
                    {dir / "absent.safetensors", std::strerror(ENOENT)});
  throws<FuelError>("a directory", [&] { SafetensorsFile file(dir.path()); },
                    {dir.path(), "expected a regular file, found a directory"});
  const std::string pipe = dir / "pipe.safetensors";
  check::expect(::mkfifo(pipe.c_str(), 0600) == 0, "a pipe");
  throws<FuelError>("a pipe that nobody writes to", [&] { SafetensorsFile file(pipe); },
                    {pipe, "found a device or a pipe"});
}

void every_truncation(const fuel_files::TempDir& dir) {
  const std::string whole =
      fuel_files::safetensors({{"a", "U8", {5}, pattern(5, 1)}, {"b", "F32", {2}, pattern(8, 2)}});
  const std::string path = dir / "cut.safetensors";
  for (size_t length = 0; length < whole.size(); ++length) {
    fuel_files::write_file(path, whole.substr(0, length));
    throws<FuelError>("cut to " + std::to_string(length), [&] { SafetensorsFile file(path); }, {path});
  }
}

void hollow(const fuel_files::TempDir& dir) {
  const std::string path = dir / "hollow.safetensors";
  constexpr uint64_t kBytes = 1 << 20;
  const std::string header = R"({"a":{"dtype":"U8","shape":[1048576],"data_offsets":[0,1048576]}})";
  fuel_files::write_file(path, frame(header, ""));
  std::filesystem::resize_file(path, 8 + header.size() + kBytes);
  const SafetensorsFile hollow(path, false);
  check::expect(hollow.sparse() && hollow.tensors()[0].bytes == kBytes,
                "a file without data blocks is sparse");
  fuel_files::write_file(path, frame(header, pattern(kBytes, 1)));
  check::expect(!SafetensorsFile(path, false).sparse(), "a written file is not sparse");
}

}  // namespace

int main() {
  const fuel_files::TempDir dir;
  well_formed(dir);
  accepted_variants(dir);
  header_lies(dir);
  files_that_are_none(dir);
  every_truncation(dir);
  hollow(dir);
  return check::finish("safetensors");
}
