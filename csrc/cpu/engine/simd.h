// One binary for three instruction sets. A kernel's inner loop is a plain function over one chunk of contiguous values.
// pick<&loop>() returns the copy of the loop that was compiled for the best instruction set of this machine.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__)
#define SAFEOPS_X86 1
// These attributes compile a wrapper for an instruction set. `flatten` inlines the generic loop into the wrapper, where
// the compiler vectorises the loop for the wrapper's target.
#define SAFEOPS_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")))
#define SAFEOPS_AVX2 __attribute__((target("avx2,fma,f16c")))
#define SAFEOPS_FLATTEN __attribute__((flatten))
#endif

#define SAFEOPS_SIMD _Pragma("omp simd")

namespace safeops::cpu {

enum class Isa : int { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

// The instruction set to use: the best one of this machine, or a lower one that SAFEOPS_CPU_ISA=avx512|avx2|default
// asks for (the tests run all).
Isa isa();

// Elements per chunk. A few buffers of this size stay in the L1 cache together.
constexpr int64_t kChunk = 1024;
constexpr int64_t kBuffer = kChunk + 64;  // the extra 64 avoid distances of 4 KiB, at which buffers would alias

template <auto Loop, class Signature = decltype(Loop)>
struct Versions;

template <auto Loop, class Result, class... Args>
struct Versions<Loop, Result (*)(Args...)> {
#ifdef SAFEOPS_X86
  SAFEOPS_AVX512 SAFEOPS_FLATTEN static Result avx512(Args... args) { return Loop(args...); }
  SAFEOPS_AVX2 SAFEOPS_FLATTEN static Result avx2(Args... args) { return Loop(args...); }
#endif

  static Result (*pick())(Args...) {
#ifdef SAFEOPS_X86
    switch (isa()) {
      case Isa::kAvx512: return &avx512;
      case Isa::kAvx2: return &avx2;
      case Isa::kBaseline: break;
    }
#endif
    return Loop;
  }
};

template <auto Loop>
auto pick() {
  return Versions<Loop>::pick();
}

// Returns the loop for this machine's registers: Wide for 64 bytes, Middle for 32, Narrow for 16.
template <auto Wide, auto Middle, auto Narrow>
auto pick_width() {
#ifdef SAFEOPS_X86
  switch (isa()) {
    case Isa::kAvx512: return &Versions<Wide>::avx512;
    case Isa::kAvx2: return &Versions<Middle>::avx2;
    case Isa::kBaseline: break;
  }
#endif
  return Narrow;
}

}  // namespace safeops::cpu
