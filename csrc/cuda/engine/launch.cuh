// Kernel launches, the offsets of operands' elements, and reductions over a warp or a block.
#pragma once

#include <cuda_runtime.h>

#include <cstring>

#include "plan.h"

namespace safeops::cuda {

constexpr int kThreads = 128;
constexpr unsigned kWarp = 0xffffffffu;

template <class Kernel, class... Arguments>
void start(Kernel kernel, unsigned blocks, cudaStream_t stream, const Arguments&... arguments) {
  kernel<<<blocks, kThreads, 0, stream>>>(arguments...);
}

// Launches blocks of `threads` threads, each with `shared` bytes of shared_memory(). Every GPU allows 99 KiB.
template <class Kernel, class... Arguments>
void start_blocks(Kernel kernel, unsigned blocks, int threads, int shared, cudaStream_t stream,
                  const Arguments&... arguments) {
  // Needed only beyond 48 KiB. check_launch() reports an error of this call, too.
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  kernel<<<blocks, threads, shared, stream>>>(arguments...);
}

__device__ inline char* shared_memory() {
  extern __shared__ uint4 memory[];
  return reinterpret_cast<char*>(memory);
}

inline unsigned blocks_for(int64_t numel, int64_t per_block) { return unsigned((numel + per_block - 1) / per_block); }

// Sets offset[i] to the offset in bytes of packet `index` in operand i. A packet has kPacketElements elements along the
// innermost dim. The plan's dividers must have been set for this number.
template <int kPacketElements, int N>
__device__ inline void offsets_at(const Plan<N>& plan, uint32_t index, int64_t (&offset)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) offset[i] = 0;
  for (int dim = 0; dim < plan.ndim; ++dim) {
    const Divider& by = plan.by[dim];
    const uint32_t next = (__umulhi(index, by.multiplier) + index) >> by.shift;
    const int64_t at = int64_t(index - next * by.divisor) * (dim ? 1 : kPacketElements);
    index = next;
#pragma unroll
    for (int i = 0; i < N; ++i) offset[i] += at * plan.stride[i][dim];
  }
}

// Returns a pointer to element i of operand o. It takes 64-bit divisions, so the plan may have any size.
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

// Combines the values of each `lanes` consecutive lanes of a warp, pairwise and in a fixed order. Every lane returns
// the result. T consists of 32-bit words.
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

// Combines the values of all threads of a block in a fixed order. Every thread returns the result. scratch: shared
// memory for one value of each warp; it may be overwritten after the next __syncthreads().
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
