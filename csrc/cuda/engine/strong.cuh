// Accesses to what other blocks of the same launch write and read.
#pragma once

#include "types.cuh"

namespace safeops::cuda {

// Strong accesses, seen by every SM. Relaxed, for the one word is the whole message: nothing else that was written must
// be seen with it, and a later word at the same place is never followed by an earlier one.
#ifdef __CUDACC__  // tests/kernels/emulate has these for the host
__device__ inline uint64 load_relaxed(const uint64* p) {
  uint64 value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(p)) : "memory");
  return value;
}
__device__ inline void store_relaxed(uint64* p, uint64 value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(value) : "memory");
}
#endif

}  // namespace safeops::cuda
