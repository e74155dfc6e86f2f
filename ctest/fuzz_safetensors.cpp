// Fuzzing of safetensors headers: whatever the bytes, a header is refused with a FuelError of one line, or
// accepted and then holds what it promises.
//
// LLVMFuzzerTestOneInput is the usual entry. The main below needs no libFuzzer: it mutates valid and nearly
// valid headers from a seed for a number of seconds.   fuzz_safetensors [seconds, 10] [seed, 1]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "fuel/safetensors.h"

using rocket::FuelError;
using rocket::TensorInfo;

namespace {

uint64_t accepted = 0, refused = 0;

[[noreturn]] void violated(const std::string& what, std::string_view json, uint64_t data_bytes) {
  std::printf("VIOLATED: %s\ndata bytes %llu, header:\n%.*s\n", what.c_str(),
              static_cast<unsigned long long>(data_bytes), static_cast<int>(json.size()), json.data());
  std::exit(1);
}

// Sizes are recomputed in 128 bits, so that no overflow can hide here.
void check_accepted(const std::vector<TensorInfo>& tensors, std::string_view json, uint64_t header_bytes,
                    uint64_t data_bytes) {
  uint64_t next = header_bytes;
  std::set<std::string> names;
  for (const TensorInfo& tensor : tensors) {
    if (tensor.offset != next) violated("offsets are not contiguous at " + tensor.name, json, data_bytes);
    unsigned __int128 bytes = rocket::dtype_size(tensor.dtype);
    bool zero = false;
    for (const int64_t dim : tensor.shape) {
      if (dim < 0) violated("a dimension below 0 in " + tensor.name, json, data_bytes);
      zero = zero || dim == 0;
      bytes *= static_cast<uint64_t>(dim);
      if (bytes > std::numeric_limits<uint64_t>::max())
        violated("a size that overflows in " + tensor.name, json, data_bytes);
    }
    if ((zero ? 0 : bytes) != tensor.bytes)
      violated("size and shape disagree in " + tensor.name, json, data_bytes);
    if (static_cast<uint64_t>(tensor.elements()) * rocket::dtype_size(tensor.dtype) != tensor.bytes) {
      violated("elements() disagrees in " + tensor.name, json, data_bytes);
    }
    if (!names.insert(tensor.name).second) violated("a name twice: " + tensor.name, json, data_bytes);
    next += tensor.bytes;
  }
  if (next != header_bytes + data_bytes) violated("the data is not covered", json, data_bytes);
}

void run_one(std::string_view json, uint64_t data_bytes) {
  const uint64_t header_bytes = 8 + json.size();
  try {
    const auto tensors = rocket::parse_safetensors_header(json, header_bytes, data_bytes, "fuzz.safetensors");
    ++accepted;
    check_accepted(tensors, json, header_bytes, data_bytes);
  } catch (const FuelError& error) {
    ++refused;
    const std::string message = error.what();
    const bool one_line =
        message.find_first_of("\r\n") == std::string::npos && message.find('\0') == std::string::npos;
    if (!one_line || message.rfind("fuzz.safetensors: ", 0) != 0)
      violated("a message of another form: " + message, json, data_bytes);
  }
}

struct Seed {
  std::string json;
  uint64_t data_bytes;
};

const std::vector<Seed>& seeds() {
  static const std::vector<Seed> all = {
      {R"({})", 0},
      {R"({"__metadata__":{"format":"pt","x":"\u20ac"}})", 0},
      {R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})", 3},
      {R"({"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},"b":{"dtype":"F32","shape":[],"data_offsets":[12,16]}}   )",
       16},
      {R"({"b":{"dtype":"F8_E4M3","shape":[4,0],"data_offsets":[4,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"c":{"dtype":"I64","shape":[1,1],"data_offsets":[4,12]}})",
       12},
      {R"({"model.layers.0.mlp.experts.0.up_proj.weight":{"dtype":"U8","shape":[4,8],"data_offsets":[0,32]},"model.layers.0.mlp.experts.0.up_proj.weight_scale":{"dtype":"F8_E4M3","shape":[4,1],"data_offsets":[32,36]},"model.layers.0.mlp.experts.0.up_proj.weight_scale_2":{"dtype":"F32","shape":[1],"data_offsets":[36,40]},"__metadata__":{}})",
       40},
      {R"({"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0},
      {R"({"a":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}})", 0},
      {R"({"a":{"dtype":"U8","shape":[0,9223372036854775807,9223372036854775807],"data_offsets":[0,0]}})", 0},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[18446744073709551614,18446744073709551615]}})", 1},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
       3},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
       3},
      // An overlap and a gap of one size: the sizes add up all the same.
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},"c":{"dtype":"U8","shape":[1],"data_offsets":[4,5]}})",
       5},
      {R"({"a":{"dtype":"F4","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[-1],"data_offsets":[1,0]}})",
       1},
      {R"({"a":[[[[[[[[{"b":{"c":[1.5e300,-0,true,null,"\ud83d\ude80"]}}]]]]]]]]})", 0},
  };
  return all;
}

const char* const kTokens[] = {"0",
                               "1",
                               "2",
                               "-1",
                               "4",
                               "8",
                               "12",
                               "1e3",
                               "1.0",
                               "9223372036854775807",
                               "9223372036854775808",
                               "18446744073709551615",
                               "18446744073709551616",
                               "4294967296",
                               "\"U8\"",
                               "\"BF16\"",
                               "\"F64\"",
                               "\"BOOL\"",
                               "\"F8_E8M0\"",
                               "null",
                               "true",
                               "{}",
                               "[]",
                               "[0,0]",
                               "\"\"",
                               "\"\\u0000\"",
                               "\"\\ud800\"",
                               "\xC3\xA9",
                               "\xFF",
                               "\n",
                               ",",
                               ":",
                               "{",
                               "}",
                               "[",
                               "]",
                               "\"",
                               "\\",
                               " ",
                               "\"z\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},",
                               "\"__metadata__\":{\"k\":\"v\"},"};

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : rng_(seed) {}

  Seed next() {
    Seed seed = seeds()[below(seeds().size())];
    for (uint64_t n = below(6); n > 0; --n) mutate(seed.json);
    if (below(4) == 0) seed.data_bytes += below(9) - 4;  // may wrap to almost 2^64
    return seed;
  }

 private:
  uint64_t below(uint64_t n) { return rng_() % n; }

  void mutate(std::string& json) {
    const size_t at = below(json.size() + 1), length = std::min<size_t>(below(12), json.size() - at);
    switch (below(8)) {
      case 0:
        json.erase(at, length);
        break;
      case 1:
        json.insert(at, json.substr(at, length));
        break;
      case 2:
        json.insert(at, kTokens[below(std::size(kTokens))]);
        break;
      case 3:
        if (at < json.size()) json[at] = static_cast<char>(below(256));
        break;
      case 4:
        if (at < json.size()) json[at] = static_cast<char>(json[at] ^ (1 << below(8)));
        break;
      case 5:
        replace_number(json, at);
        break;
      case 6: {
        const std::string& other = seeds()[below(seeds().size())].json;
        const size_t from = below(other.size());
        json.replace(at, length, other.substr(from, below(40)));
        break;
      }
      default:
        json.resize(at);
        break;
    }
  }

  // Numbers are where a header lies best.
  void replace_number(std::string& json, size_t at) {
    const size_t begin = json.find_first_of("0123456789", at);
    if (begin == std::string::npos) return;
    const size_t end = json.find_first_not_of("0123456789", begin);
    json.replace(begin, (end == std::string::npos ? json.size() : end) - begin,
                 below(2) == 0 ? kTokens[below(14)] : std::to_string(below(40)));
  }

  std::mt19937_64 rng_;
};

}  // namespace

// What the undefined behaviour sanitizer finds ends the run, as what the address sanitizer finds does.
extern "C" const char* __ubsan_default_options() {
  return "halt_on_error=1:print_stacktrace=1";
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // The first two bytes are the size of the data, the rest is the header.
  if (size < 2) return 0;
  const std::string_view json(reinterpret_cast<const char*>(data) + 2, size - 2);
  run_one(json, static_cast<uint64_t>(data[0]) | static_cast<uint64_t>(data[1]) << 8);
  return 0;
}

#ifndef ROCKET_LIBFUZZER
int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  for (const Seed& valid : seeds()) run_one(valid.json, valid.data_bytes);
  const auto begin = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  Mutator mutator(seed);
  uint64_t executions = seeds().size();
  while (elapsed() < seconds) {
    for (int i = 0; i < 256; ++i, ++executions) {
      const Seed input = mutator.next();
      run_one(input.json, input.data_bytes);
    }
  }
  std::printf("fuzz_safetensors: %llu executions in %.1f s, %llu accepted, %llu refused, seed %llu\n",
              static_cast<unsigned long long>(executions), elapsed(),
              static_cast<unsigned long long>(accepted), static_cast<unsigned long long>(refused),
              static_cast<unsigned long long>(seed));
  // Both paths must have been taken, or nothing was tested.
  return accepted > 0 && refused > 0 ? 0 : 1;
}
#endif
