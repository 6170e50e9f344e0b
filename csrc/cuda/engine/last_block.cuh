// Each block of a launch stores its sum. The last block to finish merges them, so that no second launch is needed.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <map>
#include <mutex>
#include <utility>

#include "launch.cuh"
#include "strong.cuh"
#include "tensors.h"

namespace safeops::cuda {

// All threads of all `blocks` blocks call this. Returns true in the last block to call it. That block then sees, by
// load_relaxed(), everything that thread 0 of the other blocks stored. *counter is 0 before and after the launch.
__device__ inline bool is_last_block(unsigned* counter, int64_t blocks) {
  unsigned* flag = reinterpret_cast<unsigned*>(shared_memory());
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const bool last = atomicAdd(counter, 1u) + 1 == blocks;
    __threadfence();
    if (last) *counter = 0;  // for the next launch on this stream
    *flag = last;
  }
  __syncthreads();
  const bool last = *flag;
  __syncthreads();
  return last;
}

// Stores a block's sum as number `at` of `parts`, from which the last block reads it. Thread 0 calls this. Sum consists
// of doubles.
template <class Sum>
__device__ inline void store_part(char* parts, int64_t at, const Sum& sum) {
  constexpr int n = sizeof(Sum) / sizeof(double);
  double word[n];
  std::memcpy(word, &sum, sizeof(Sum));
#pragma unroll
  for (int k = 0; k < n; ++k) store(parts + (at * n + k) * int64_t(sizeof(double)), word[k]);
}

template <class Sum>
__device__ inline Sum merged(Sum a, const Sum& b) {
  a.merge(b);
  return a;
}

// Merges parts first, first + step, ... below `end`, in this order. A Sum with all bits 0 must be the sum of nothing.
template <class Sum>
__device__ inline Sum merge_parts(const char* parts, int64_t first, int64_t end, int64_t step) {
  constexpr int n = sizeof(Sum) / sizeof(double), kInFlight = 8;
  Sum sum{};
#pragma unroll 1
  for (int64_t i = first; i < end; i += step * kInFlight) {
    uint64 word[kInFlight][n] = {};  // beyond the end: empty sums
#pragma unroll
    for (int u = 0; u < kInFlight; ++u)
#pragma unroll
      for (int k = 0; k < n; ++k)
        if (i + u * step < end)
          word[u][k] = load_relaxed(reinterpret_cast<const uint64*>(parts) + (i + u * step) * n + k);
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      Sum part;
      std::memcpy(&part, word[u], sizeof(Sum));
      sum.merge(part);
    }
  }
  return sum;
}

// Merges the first `count` parts in a fixed order, by all threads of a block. Each thread returns the result.
template <int kThreads, class Sum>
__device__ inline Sum merge_parts(const char* parts, int64_t count) {
  const Sum sum = merge_parts<Sum>(parts, threadIdx.x, count, kThreads);
  return block_reduce<kThreads>(sum, reinterpret_cast<Sum*>(shared_memory()), merged<Sum>);
}

// ---- host

// Returns a counter that is 0. All launches on one device and stream share it: they run one after another, and each
// leaves it at 0. A new counter in each call would need a second launch to zero it. A captured graph may be replayed on
// any stream, so it gets a counter of its own, which a node of the graph zeroes.
inline Tensor zero_counter(const Tensor& like, cudaStream_t stream) {
  const auto make = [&like] {
    const int64_t one = 1;
    Tensor counter = safeops::empty(Shape(1, &one), DType::kLong, like);
    return torch::stable::zero_(counter);
  };
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream, &status);
  if (status != cudaStreamCaptureStatusNone) return make();
  static std::mutex mutex;
  static auto& counters = *new std::map<std::pair<int, cudaStream_t>, Tensor>;  // not freed: CUDA may have ended before
  const std::lock_guard<std::mutex> guard(mutex);
  const std::pair<int, cudaStream_t> key(like.get_device_index(), stream);
  auto entry = counters.find(key);
  if (entry == counters.end()) entry = counters.emplace(key, make()).first;
  return entry->second;
}

}  // namespace safeops::cuda
