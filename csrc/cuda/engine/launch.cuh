// How every kernel is launched, where its operands have an element, and what a warp or a block does together.
#pragma once

#include <cuda_runtime.h>

#include <cstring>

#include "plan.h"

namespace safeops::cuda {

constexpr int kThreads = 128;
constexpr unsigned kWarp = 0xffffffffu;

#ifdef __CUDACC__  // tests/kernels/emulate runs the threads on the host
template <class Kernel, class... Arguments>
void start(Kernel kernel, unsigned blocks, cudaStream_t stream, const Arguments&... arguments) {
  kernel<<<blocks, kThreads, 0, stream>>>(arguments...);
}

// The same for blocks of another size, each with `shared` bytes of shared_memory(), of which a GPU has 99 KiB at least.
template <class Kernel, class... Arguments>
void start_blocks(Kernel kernel, unsigned blocks, int threads, int shared, cudaStream_t stream,
                  const Arguments&... arguments) {
  // What is refused here, check_launch() finds. Up to 48 KiB would need no asking.
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  kernel<<<blocks, threads, shared, stream>>>(arguments...);
}

__device__ inline char* shared_memory() {
  extern __shared__ uint4 memory[];
  return reinterpret_cast<char*>(memory);
}
#endif

inline unsigned blocks_for(int64_t numel, int64_t per_block) { return unsigned((numel + per_block - 1) / per_block); }

// Where each operand has element `index`, in bytes from its base, by the plan's dividers. kUnit: the innermost dim is
// divided into packets of so many elements, and `index` counts those.
template <int kUnit, int N>
__device__ inline void offsets_at(const Plan<N>& plan, uint32_t index, int64_t (&offset)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) offset[i] = 0;
  for (int dim = 0; dim < plan.ndim; ++dim) {
    const Divider& by = plan.by[dim];
    const uint32_t next = (__umulhi(index, by.multiplier) + index) >> by.shift;
    const int64_t at = int64_t(index - next * by.divisor) * (dim ? 1 : kUnit);
    index = next;
#pragma unroll
    for (int i = 0; i < N; ++i) offset[i] += at * plan.stride[i][dim];
  }
}

// Where operand o has element i, of plans of any size: by divisions of 64 bits.
template <int N>
__device__ inline const char* at(const Plan<N>& plan, int o, int64_t i) {
  const char* p = plan.base[o];
  int d = 0;
  for (; d + 1 < plan.ndim; ++d) {
    p += i % plan.size[d] * plan.stride[o][d];
    i /= plan.size[d];
  }
  return p + i * plan.stride[o][d];
}

// The values of 32 lanes, or of fewer that follow each other, combined pairwise, in a fixed order: every lane has the
// result. T is made of 32-bit words.
template <class T, class Combine>
__device__ inline T warp_reduce(T value, const Combine& combine, int lanes = 32) {
  static_assert(sizeof(T) % sizeof(unsigned) == 0);
  constexpr int n = sizeof(T) / sizeof(unsigned);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2) {
    unsigned word[n];
    std::memcpy(word, &value, sizeof(T));
#pragma unroll
    for (int i = 0; i < n; ++i) word[i] = __shfl_sync(kWarp, word[i], lane ^ step);
    T other;
    std::memcpy(&other, word, sizeof(T));
    value = combine(value, other);
  }
  return value;
}

// The values of all threads of a block combined, in a fixed order: every thread has the result. scratch: room for a
// value of each warp, in shared memory; it may be written anew after the next __syncthreads().
template <int kThreads, class T, class Combine>
__device__ inline T block_reduce(T value, T* scratch, const Combine& combine) {
  value = warp_reduce(value, combine);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = scratch[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / 32; ++warp) value = combine(value, scratch[warp]);
  return value;
}

}  // namespace safeops::cuda
