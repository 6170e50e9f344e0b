// How the last block of a launch to finish learns that it is: it folds what the others have left, in the same launch.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <map>
#include <mutex>
#include <utility>

#include "launch.cuh"
#include "strong.cuh"
#include "tensors.h"

namespace safeops::cuda {

// For all threads of a block, which has `blocks` beside it, itself included: whether all others were here before. What
// their thread 0 stored is then seen by load_relaxed(). The counter is 0 before, and after.
__device__ inline bool is_last_block(unsigned* counter, int64_t blocks) {
  unsigned* flag = reinterpret_cast<unsigned*>(shared_memory());
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const bool last = atomicAdd(counter, 1u) + 1 == blocks;
    __threadfence();
    if (last) *counter = 0;  // as the next launch on this stream expects it
    *flag = last;
  }
  __syncthreads();
  const bool last = *flag;
  __syncthreads();
  return last;
}

// ---- host

// A counter that is 0. Zeroing one in each call would be a second launch: one for each device and stream is enough, for
// the kernels of a stream run one after another. A captured graph may be replayed on any stream, and has its own, which
// a node of it zeroes.
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
  static auto& known = *new std::map<std::pair<int, cudaStream_t>, Tensor>;  // not freed: CUDA may have ended before
  const std::lock_guard<std::mutex> guard(mutex);
  const std::pair<int, cudaStream_t> key(like.get_device_index(), stream);
  auto found = known.find(key);
  if (found == known.end()) found = known.emplace(key, make()).first;
  return found->second;
}

}  // namespace safeops::cuda
