#include "ops/cublas_lt.h"
#include "ops/cuda.cuh"

#ifdef ROCKET_CUBLASLT_FOLDER
#include <cublasLt.h>
#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <tuple>
#include <utility>

namespace rocket {

class CublasLt {
 public:
  ~CublasLt() {
    for (auto& [shape, plan] : plans_) {
      for (cublasLtMatrixLayout_t layout : {plan.w, plan.x, plan.y}) layout_destroy(layout);
    }
    if (product_) desc_destroy(product_);
    if (handle_) destroy(handle_);
    if (library_) dlclose(library_);
  }

  bool open(std::string* why) {
    const char* off = std::getenv("ROCKET_NO_CUBLASLT");
    if (off && *off && *off != '0') {
      *why = "ROCKET_NO_CUBLASLT is set";
      return false;
    }
    const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
    for (const std::string& path : {std::string(ROCKET_CUBLASLT_FOLDER) + "/" + name, name}) {
      library_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (library_) break;
    }
    if (!library_) {
      *why = name + " was not found (pip install nvidia-cublas, or add its folder to LD_LIBRARY_PATH)";
      return false;
    }
    if (!load() || create(&handle_) != CUBLAS_STATUS_SUCCESS) {
      *why = name + " cannot be used";
      return false;
    }
    // BF16 products with float32 sums; float32 products never come here, so that TF32 is never used.
    const cublasOperation_t transposed = CUBLAS_OP_T;
    if (desc_create(&product_, CUBLAS_COMPUTE_32F, CUDA_R_32F) != CUBLAS_STATUS_SUCCESS ||
        desc_set(product_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed) !=
            CUBLAS_STATUS_SUCCESS) {
      *why = name + " cannot multiply BF16 matrices";
      return false;
    }
    return true;
  }

  // False: it has no way for this shape. Throws DeviceError where it has one that fails: going on with kernels of our own
  // would change bits, and hide what failed.
  // In cuBLAS's column-major terms: y [out, rows] = w [in, out]^T x [in, rows].
  bool run(const LibraryProduct& p, void* workspace, cudaStream_t stream) {
    Plan& plan = plan_for({p.out, p.in, p.rows, p.ldx, p.ldy, alignment_of(p.y)});
    if (!plan.usable) return false;
    const float one = 1, before = p.add ? 1 : 0;
    const cublasStatus_t status =
        matmul(handle_, product_, &one, p.w, plan.w, p.x, plan.x, &before, p.y, plan.y, p.y, plan.y,
               &plan.algorithm, workspace, kCublasWorkspaceBytes, stream);
    if (status == CUBLAS_STATUS_SUCCESS) return true;
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_ARCH_MISMATCH ||
        status == CUBLAS_STATUS_INVALID_VALUE) {
      plan.usable = false;  // from now on, as if it had no way
      return false;
    }
    throw DeviceError(
        "linear: cuBLASLt status " + std::to_string(static_cast<int>(status)) + " for " +
            std::to_string(p.rows) + " rows of [" + std::to_string(p.out) + ", " + std::to_string(p.in) + "]",
        "ROCKET_NO_CUBLASLT=1 does without it; ROCKET_CUDA_SYNC=1 tells whether an op before failed");
  }

 private:
  struct Plan {
    bool usable = false;
    cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
    cublasLtMatmulAlgo_t algorithm{};
  };
  // out, in, rows, ldx, ldy, alignment of y
  using Shape = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, uint32_t>;

  static constexpr uint32_t kAlignment = 16;  // that the callers promise for x and w
  static uint32_t alignment_of(const void* p) {
    const auto address = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p) % kAlignment);
    return address == 0 ? kAlignment : address & (~address + 1);
  }
  // cuBLASLt takes it that all matrices begin at multiples of 256 bytes. Where one does not, as in our arenas, a way that
  // asks for it fails when it is called, and what then does the product gives other bits: they would depend on addresses.
  bool set_alignments(cublasLtMatmulPreference_t preference, uint32_t y) {
    const std::pair<cublasLtMatmulPreferenceAttributes_t, uint32_t> each[] = {
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, kAlignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, kAlignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, y},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, y}};
    for (const auto& [attribute, bytes] : each) {
      if (preference_set(preference, attribute, &bytes, sizeof bytes) != CUBLAS_STATUS_SUCCESS) return false;
    }
    return true;
  }

  Plan& plan_for(const Shape& shape) {
    const auto [found, fresh] = plans_.try_emplace(shape);
    Plan& plan = found->second;
    if (!fresh) return plan;
    const auto [out, in, rows, ldx, ldy, y_alignment] = shape;
    cublasLtMatmulPreference_t preference = nullptr;
    const size_t workspace = kCublasWorkspaceBytes;
    cublasLtMatmulHeuristicResult_t best{};
    int results = 0;
    const auto ok = [](cublasStatus_t status) { return status == CUBLAS_STATUS_SUCCESS; };
    plan.usable =
        ok(layout_create(&plan.w, CUDA_R_16BF, static_cast<uint64_t>(in), static_cast<uint64_t>(out), in)) &&
        ok(layout_create(&plan.x, CUDA_R_16BF, static_cast<uint64_t>(in), static_cast<uint64_t>(rows),
                         ldx)) &&
        ok(layout_create(&plan.y, CUDA_R_32F, static_cast<uint64_t>(out), static_cast<uint64_t>(rows),
                         ldy)) &&
        ok(preference_create(&preference)) &&
        ok(preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                          sizeof workspace)) &&
        set_alignments(preference, y_alignment) &&
        ok(heuristic(handle_, product_, plan.w, plan.x, plan.y, plan.y, preference, 1, &best, &results)) &&
        results > 0;
    plan.algorithm = best.algo;
    if (preference) preference_destroy(preference);
    return plan;
  }

  template <typename F>
  bool find(F& function, const char* name) {
    function = reinterpret_cast<F>(dlsym(library_, name));
    return function != nullptr;
  }
  bool load() {
    return find(create, "cublasLtCreate") && find(destroy, "cublasLtDestroy") &&
           find(desc_create, "cublasLtMatmulDescCreate") && find(desc_destroy, "cublasLtMatmulDescDestroy") &&
           find(desc_set, "cublasLtMatmulDescSetAttribute") &&
           find(layout_create, "cublasLtMatrixLayoutCreate") &&
           find(layout_destroy, "cublasLtMatrixLayoutDestroy") &&
           find(preference_create, "cublasLtMatmulPreferenceCreate") &&
           find(preference_destroy, "cublasLtMatmulPreferenceDestroy") &&
           find(preference_set, "cublasLtMatmulPreferenceSetAttribute") &&
           find(heuristic, "cublasLtMatmulAlgoGetHeuristic") && find(matmul, "cublasLtMatmul");
  }

  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtDestroy) destroy = nullptr;
  decltype(&cublasLtMatmulDescCreate) desc_create = nullptr;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;

  void* library_ = nullptr;
  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulDesc_t product_ = nullptr;
  std::map<Shape, Plan> plans_;
};

CublasLtHandle open_cublas_lt(std::string* why) {
  CublasLtHandle lt(new CublasLt);
  return lt->open(why) ? std::move(lt) : nullptr;
}

bool cublas_lt_product(const LibraryProduct& p, void* workspace, Exec& exec) {
  if (!exec.cuda->cublas || !exec.cuda->cublas->run(p, workspace, exec.cuda->stream)) return false;
  after_op("linear", exec);
  return true;
}

}  // namespace rocket

#else

namespace rocket {

class CublasLt {};

CublasLtHandle open_cublas_lt(std::string* why) {
  *why =
      "cublasLt.h was not found when this was built (it is in the CUDA toolkit and in pip's nvidia-cublas)";
  return nullptr;
}

bool cublas_lt_product(const LibraryProduct&, void*, Exec&) {
  return false;
}

}  // namespace rocket
#endif

namespace rocket {

void CublasLtDeleter::operator()(CublasLt* lt) const {
  delete lt;
}

}  // namespace rocket
