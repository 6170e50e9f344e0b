#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "common/tensor.h"
#include "cpu/engine/simd.h"

namespace safeops::cpu {

namespace {

Isa detect() {
#ifdef SAFEOPS_X86
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::kBaseline;
  // F16C is not checked: every processor with AVX2 has it, and gcc 12 has no name for it here.
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return wide ? Isa::kAvx512 : Isa::kAvx2;
#else
  return Isa::kBaseline;
#endif
}

Isa limit() {
  const char* wanted = std::getenv("SAFEOPS_CPU_ISA");
  if (!wanted || !*wanted || std::strcmp(wanted, "avx512") == 0) return Isa::kAvx512;
  if (std::strcmp(wanted, "avx2") == 0) return Isa::kAvx2;
  // An unknown name is an error, since it would silently test the wrong path.
  STD_TORCH_CHECK(std::strcmp(wanted, "default") == 0, "SAFEOPS_CPU_ISA: expected avx512, avx2 or default, got '",
                  wanted, "'");
  return Isa::kBaseline;
}

}  // namespace

Isa isa() {
  static const Isa chosen = std::min(detect(), limit());
  return chosen;
}

}  // namespace safeops::cpu
