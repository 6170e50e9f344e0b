// Moves of 16 bytes by a block, for elements that begin anywhere: unaligned ones go through shared memory.
#pragma once

#include <algorithm>

#include "cuda/engine/bits.cuh"
#include "cuda/engine/packets.cuh"

namespace safeops::cuda {

constexpr int kBlock = 256;  // threads
template <class T>
constexpr int kPacket = 16 / sizeof(T);  // elements

// n elements lie in shared memory (`room`) from `skip` on, so that packets there coincide with packets of the array
// that they come from or go to, where they begin at element `first`.
template <class T>
__device__ inline int skip_of(const char* base, int64_t first) {
  return int(uintptr_t(base) / sizeof(T) + uint64(first)) & (kPacket<T> - 1);
}
template <int U, class T>  // U packets are in flight
__device__ inline void read_run(T* room, const char* base, int64_t first, int n, int skip) {
  const char* from = base + (first - skip) * int64_t(sizeof(T));
#pragma unroll U
  for (int p = threadIdx.x; n > 0 && p * kPacket<T> < skip + n; p += kBlock)
    reinterpret_cast<uint4*>(room)[p] = load<uint4>(from + p * 16);
}
template <class T>
__device__ inline void write_run(const T* room, char* base, int64_t first, int n, int skip) {
  char* to = base + (first - skip) * int64_t(sizeof(T));
  for (int p = threadIdx.x; p * kPacket<T> < skip + n; p += kBlock) {
    const int begin = p * kPacket<T>;
    if (begin >= skip && begin + kPacket<T> <= skip + n) {
      store(to + p * 16, reinterpret_cast<const uint4*>(room)[p]);
      continue;
    }
    for (int i = begin; i < begin + kPacket<T>; ++i)
      if (i >= skip && i < skip + n) store(to + i * int(sizeof(T)), room[i]);
  }
}

// Memory order of an operand's elements, relative to the order of the plan: arbitrary, contiguous, or contiguous and
// aligned to packets of 16 bytes.
enum Layout { kStrided, kDense, kPacked };

// n elements of an operand from `first`, one by one, with U in flight.
template <int U, class T, int N>
__device__ inline void gather(T* room, const Plan<N>& plan, int operand, int64_t first, int n) {
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += kBlock * U) {
    T value[U];
#pragma unroll
    for (int u = 0; u < U; ++u) value[u] = load<T>(at(plan, operand, first + std::min(i + u * kBlock, n - 1)));
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (i + u * kBlock < n) room[i + u * kBlock] = value[u];
  }
}

// `kCount` elements of an operand from `first` as packets u * kBlock + threadIdx.x; zeros after the last element.
template <class T, int kCount, int K, int N>
__device__ inline void read_packets(uint4 (&packet)[K], T* room, const Plan<N>& plan, int operand, Layout layout,
                                    int64_t first) {
  constexpr int E = kPacket<T>;
  const char* base = plan.base[operand];
  if (layout == kPacked && first + kCount <= plan.numel) {
#pragma unroll
    for (int u = 0; u < K; ++u) {
      const int p = u * kBlock + threadIdx.x;
      if (K * kBlock == kCount / E || p < kCount / E)
        packet[u] = load<uint4>(base + first * int64_t(sizeof(T)) + p * 16);
    }
    return;
  }
  const int n = int(std::min<int64_t>(kCount, plan.numel - first)), skip = layout ? skip_of<T>(base, first) : 0;
  if (layout) read_run<8>(room, base, first, n, skip);
  else gather<2>(room, plan, operand, first, n);
  __syncthreads();
#pragma unroll
  for (int u = 0; u < K; ++u) {
    T raw[E];
#pragma unroll
    for (int e = 0; e < E; ++e) {
      const int i = (u * kBlock + threadIdx.x) * E + e;
      raw[e] = i < n ? room[skip + i] : T{};
    }
    packet[u] = packet_of(raw);
  }
  __syncthreads();
}

}  // namespace safeops::cuda
