// A block moves elements 16 bytes at a time, wherever they begin: unaligned elements go through shared memory.
#pragma once

#include <algorithm>

#include "cuda/engine/bits.cuh"
#include "cuda/engine/packets.cuh"

namespace safeops::cuda {

constexpr int kBlock = 256;  // threads of a block
template <class T>
constexpr int kPacket = 16 / sizeof(T);  // elements of a packet

// A request is an asynchronous copy of 16 bytes to shared memory. await_requests() waits for the thread's own requests.
// Requests share no scoreboard with loads to registers: waiting for a load does not wait for earlier requests.
__device__ inline void request(uint4* to, const uint4* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(unsigned(__cvta_generic_to_shared(to))),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}
__device__ inline void await_requests() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// A run is n elements, in shared memory (`room`) from element `skip` on, and in an array at `base` from element `first`
// on. skip_of chooses `skip` so that aligned packets of the array are aligned in `room`, too.
template <class T>
__device__ inline int skip_of(const char* base, int64_t first) {
  return int(uintptr_t(base) / sizeof(T) + uint64(first)) & (kPacket<T> - 1);
}
template <class T>
__device__ inline void request_run(T* room, const char* base, int64_t first, int n, int skip) {
  const char* from = base + (first - skip) * int64_t(sizeof(T));
#pragma unroll 8
  for (int p = threadIdx.x; n > 0 && p * kPacket<T> < skip + n; p += kBlock)
    request(reinterpret_cast<uint4*>(room) + p, reinterpret_cast<const uint4*>(from) + p);
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

// How an operand's elements lie in memory, in the order of the plan: with arbitrary strides, contiguous, or contiguous
// and aligned to 16 bytes.
enum Layout { kStrided, kDense, kPacked };

// Copies elements [first, first + n) of an operand to `room`, one by one. A thread has U elements in flight.
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

// request_packets requests kCount elements of an operand, from element `first` on. receive_packets waits for them, and
// loads packet u * kBlock + threadIdx.x of `room` into packet[u], with zeros after the last element.
template <class T, int kCount, int N>
__device__ inline void request_packets(T* room, const Plan<N>& plan, int operand, Layout layout, int64_t first) {
  const int n = int(std::min<int64_t>(kCount, plan.numel - first));
  const char* base = plan.base[operand];
  if (layout) request_run(room, base, first, n, skip_of<T>(base, first));
  else gather<2>(room, plan, operand, first, n);
}
template <class T, int K, int N>
__device__ inline void receive_packets(uint4 (&packet)[K], const T* room, const Plan<N>& plan, int operand,
                                       Layout layout, int64_t first) {
  constexpr int E = kPacket<T>;
  const int n = int(std::min<int64_t>(K * kBlock * E, plan.numel - first));
  const int skip = layout ? skip_of<T>(plan.base[operand], first) : 0;
  const bool whole = skip == 0 && n == K * kBlock * E;
  await_requests();
  __syncthreads();
#pragma unroll
  for (int u = 0; u < K; ++u) {
    const int p = u * kBlock + threadIdx.x;
    if (whole) {
      packet[u] = reinterpret_cast<const uint4*>(room)[p];
      continue;
    }
    T raw[E];
#pragma unroll
    for (int e = 0; e < E; ++e) raw[e] = p * E + e < n ? room[skip + p * E + e] : T{};
    packet[u] = packet_of(raw);
  }
  __syncthreads();
}

// Reads kCount elements from `first` on into packets. Aligned packets of a full tile go directly to registers, others
// through `room`.
template <class T, int kCount, int K, int N>
__device__ inline void read_packets(uint4 (&packet)[K], T* room, const Plan<N>& plan, int operand, Layout layout,
                                    int64_t first) {
  if (layout != kPacked || first + kCount > plan.numel) {
    request_packets<T, kCount>(room, plan, operand, layout, first);
    return receive_packets<T>(packet, room, plan, operand, layout, first);
  }
#pragma unroll
  for (int u = 0; u < K; ++u) {
    const int p = u * kBlock + threadIdx.x;
    if (K * kBlock == kCount / kPacket<T> || p < kCount / kPacket<T>)
      packet[u] = load<uint4>(plan.base[operand] + first * int64_t(sizeof(T)) + p * 16);
  }
}

}  // namespace safeops::cuda
