// Accesses to memory that other blocks of the same launch write and read.
#pragma once

#include "types.cuh"

namespace safeops::cuda {

// A strong store is seen by strong loads on every SM. Relaxed ordering is enough, since the word is the whole message:
// the reader needs no other write of the same thread, and never sees an older value at an address after a newer one.
__device__ inline uint64 load_relaxed(const uint64* p) {
  uint64 value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(p)) : "memory");
  return value;
}
__device__ inline void store_relaxed(uint64* p, uint64 value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(value) : "memory");
}

}  // namespace safeops::cuda
