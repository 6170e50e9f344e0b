// Accesses to memory that other blocks of the same launch write and read.
#pragma once

#include "types.cuh"

namespace safeops::cuda {

// Strong accesses are seen by every SM. Relaxed ordering suffices, since one word is the whole message: no other write
// must become visible with it, and a later value at an address is never followed by an earlier one.
__device__ inline uint64 load_relaxed(const uint64* p) {
  uint64 value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(p)) : "memory");
  return value;
}
__device__ inline void store_relaxed(uint64* p, uint64 value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(value) : "memory");
}

}  // namespace safeops::cuda
