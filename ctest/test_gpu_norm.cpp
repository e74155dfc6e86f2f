// CUDA RMSNorm and LayerNorm against the CPU's.
#include "gpu_check.h"

namespace {

using namespace rocket;

void compare(check::Gpu& gpu, int32_t rows, int32_t dim, bool layer, int64_t extra) {
  if (!gpu.takes_case()) return;
  const std::string what = std::string(layer ? "LayerNorm" : "RMSNorm") + " rows " + std::to_string(rows) +
                           " dim " + std::to_string(dim) + " ld +" + std::to_string(extra);
  const int64_t ld = dim + extra;
  const std::vector<float> x = check::normal(rows * ld), w = check::normal(dim), b = check::normal(dim);
  check::DeviceArray<float> dx(gpu, x), dw(gpu, w), db(gpu, b), y(gpu, rows * ld);
  NormParams params;
  NormPart& p = params.part[0];
  params.rows = rows;
  p.ldx = p.ldy = ld;
  p.dim = dim;
  p.eps = 1e-5f;
  p.x = dx.data();
  p.weight = dw.data();
  p.bias = layer ? db.data() : nullptr;
  p.y = y.data();
  gpu.ops.norm(params, gpu.exec);
  const std::vector<float> found = y.get();
  y.check(what);

  // Beside the other kind of norm, of fewer columns.
  const check::DeviceArray<float> again(gpu, rows * ld), other(gpu, rows * ld);
  NormParams both = params;
  both.part_count = 2;
  both.part[1] = p;
  both.part[0].y = again.data();
  both.part[1].y = other.data();
  both.part[1].bias = layer ? nullptr : db.data();
  both.part[1].dim = (dim + 1) / 2;
  gpu.ops.norm(both, gpu.exec);
  check::same_bits(what + ", beside another", again.get().data(), found.data(), rows * ld);

  std::vector<float> expected(static_cast<size_t>(rows * ld), NAN);
  p.x = x.data();
  p.weight = w.data();
  p.bias = layer ? b.data() : nullptr;
  p.y = expected.data();
  cpu_ops().norm(params, gpu.cpu.exec);
  check::close(what, found.data(), expected.data(), rows * ld, 2e-6);  // tens of roundings of 6e-8 each
}

void all(check::Gpu& gpu) {
  for (const bool layer : {false, true}) {
    for (const int32_t rows : {1, 2, 7, 64}) {
      for (const int32_t dim : {1, 5, 64, 129, 512, 4096}) compare(gpu, rows, dim, layer, dim % 3);
    }
  }
}

}  // namespace

int main() {
  return check::run_on_gpu("gpu_norm", all);
}
