#include "ops/table.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "base/error.h"

namespace rocket {

namespace portable {
void fill_table(OpTable& table);
}
#ifdef ROCKET_X86
namespace avx2 {
void fill_table(OpTable& table);
}
namespace avx512 {
void fill_table(OpTable& table);
}
#endif

namespace {

struct Set {
  const char* name;
  bool present;
  void (*fill)(OpTable&);
};

#ifdef ROCKET_X86
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512vbmi");
}

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}
#endif

const Set* sets(int& count) {
  static const Set all[] = {
#ifdef ROCKET_X86
      {"avx512", has_avx512(), avx512::fill_table},
      {"avx2", has_avx2(), avx2::fill_table},
#endif
      {"portable", true, portable::fill_table},
  };
  count = sizeof all / sizeof *all;
  return all;
}

const Set& choose(const char* isa) {
  int count = 0;
  const Set* all = sets(count);
  if (!isa) isa = std::getenv("ROCKET_CPU_ISA");
  std::string present;
  for (int i = 0; i < count; ++i) {
    if (!all[i].present) continue;
    if (!isa || !*isa || std::strcmp(isa, all[i].name) == 0) return all[i];
    present += (present.empty() ? "" : ", ") + std::string(all[i].name);
  }
  throw InputError("CPU instruction set: expected one of " + present + ", found " + isa,
                   "unset ROCKET_CPU_ISA to choose the best one automatically");
}

}  // namespace

const OpTable& cpu_ops(const char* isa) {
  const Set& set = choose(isa);
  static OpTable tables[3];
  int count = 0;
  const Set* all = sets(count);
  OpTable& table = tables[&set - all];
  set.fill(table);
  return table;
}

const OpTable& no_ops() {
  static const OpTable table = {
      [](const EmbedParams&, Exec&) {},        [](const HyperPreParams&, Exec&) {},
      [](const HyperPostParams&, Exec&) {},    [](const HyperHeadParams&, Exec&) {},
      [](const LinearParams&, Exec&) {},       [](const HeadLinearParams&, Exec&) {},
      [](const NormParams&, Exec&) {},         [](const KdaConvParams&, Exec&) {},
      [](const KdaGatesParams&, Exec&) {},     [](const KdaRecurrenceParams&, Exec&) {},
      [](const GatedNormParams&, Exec&) {},    [](const KdaHeadParams&, Exec&) {},
      [](const PoolUpdateParams&, Exec&) {},   [](const IndexSelectParams&, Exec&) {},
      [](const LatentAppendParams&, Exec&) {}, [](const SparseMlaParams&, Exec&) {},
      [](const RouterParams&, Exec&) {},       [](const SwigluParams&, Exec&) {},
      [](const ExpertFfnParams&, Exec&) {},    [](const ExpertSumParams&, Exec&) {},
      [](const SampleParams&, Exec&) {},       [](const FiniteParams&, Exec&) {},
  };
  return table;
}

const char* cpu_ops_isa() {
  return choose(nullptr).name;
}

}  // namespace rocket
