// What the tests of CUDA ops share: a device, arrays on it between guard regions, comparison with the CPU op.
//
// A test draws inputs, runs the CUDA op on poisoned outputs, then the CPU op, and compares. Where there is no device the
// program says SKIP and why, and returns 77, which ctest counts as skipped.
#pragma once

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "runtime/backend.h"
#include "runtime/device.h"

namespace check {

constexpr int kSkipped = 77;

class Gpu {
 public:
  explicit Gpu(int32_t max_rows = 1024, size_t scratch_bytes = 256 << 20)
      : backend(rocket::make_cuda_backend(2, {max_rows, 64})),
        scratch(scratch_bytes, "test scratch", backend->memory()),
        exec(backend->exec()),
        ops(backend->ops()),
        cpu(4, 256 << 20) {
    exec.scratch = &scratch;
  }
  rocket::MemorySpace& memory() { return backend->memory(); }
  // ROCKET_TEST_SMALL: for tools that slow everything down.
  static bool small() {
    static const bool small = std::getenv("ROCKET_TEST_SMALL") != nullptr;
    return small;
  }
  // Whether the next case is run: all are, or of a small run one in eight.
  bool takes_case() { return !small() || case_++ % 8 == 0; }

  std::unique_ptr<rocket::Backend> backend;
  rocket::Arena scratch;
  rocket::Exec exec;
  const rocket::OpTable& ops;
  Bench cpu;  // .exec runs the CPU op that is the oracle

 private:
  int64_t case_ = 0;
};

// n elements on the device, from host values or poisoned (0xFF: a NaN for floats), between guard regions.
template <typename T>
class DeviceArray {
 public:
  DeviceArray(Gpu& gpu, int64_t n) : gpu_(gpu), n_(n) {
    std::vector<uint8_t> bytes(total(), 0xA5);
    std::memset(bytes.data() + kGuard, 0xFF, size());
    base_ = static_cast<uint8_t*>(gpu.memory().allocate(total(), "test array"));
    gpu.memory().write(base_, bytes.data(), total());
  }
  DeviceArray(Gpu& gpu, const std::vector<T>& values)
      : DeviceArray(gpu, static_cast<int64_t>(values.size())) {
    set(values);
  }
  ~DeviceArray() { gpu_.memory().release(base_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return reinterpret_cast<T*>(base_ + kGuard); }
  int64_t count() const { return n_; }
  void set(const std::vector<T>& values) {
    if (!values.empty()) gpu_.memory().write(data(), values.data(), values.size() * sizeof(T));
  }
  std::vector<T> get() const {
    std::vector<T> values(static_cast<size_t>(n_));
    if (n_ > 0) gpu_.memory().read(values.data(), data(), size());
    return values;
  }
  void check(const std::string& what) const {
    std::vector<uint8_t> bytes(total());
    gpu_.memory().read(bytes.data(), base_, total());
    bool ok = true;
    for (size_t i = 0; i < kGuard; ++i) ok = ok && bytes[i] == 0xA5 && bytes[bytes.size() - 1 - i] == 0xA5;
    expect(ok, what + ": wrote outside its output");
  }

 private:
  static constexpr size_t kGuard = 256;
  size_t size() const { return static_cast<size_t>(n_) * sizeof(T); }
  size_t total() const { return 2 * kGuard + size(); }

  Gpu& gpu_;
  int64_t n_;
  uint8_t* base_ = nullptr;
};

// Where a host array of pointers into device memory is needed on the device.
template <typename T>
DeviceArray<T*> pointers(Gpu& gpu, const std::vector<T*>& values) {
  return DeviceArray<T*>(gpu, values);
}

// Runs the tests if there is a device.
template <typename F>
int run_on_gpu(const char* name, F tests) {
  std::string why;
  if (rocket::cuda_devices(&why).empty()) {
    std::printf("SKIP  %s: %s\n", name, why.c_str());
    return kSkipped;
  }
  try {
    Gpu gpu;
    tests(gpu);
  } catch (const std::exception& e) {
    expect(false, std::string("unexpected exception: ") + e.what());
  }
  return finish(name);
}

}  // namespace check
