// What the blocks of a launch leave to the next one: a row of parts, and their sum.
#pragma once

#include "cuda/engine/launch.cuh"
#include "cuda/engine/types.cuh"

namespace safeops::cuda {
namespace {

struct Parts {
  const char* parts;
  char* out;
  int64_t count;
};

// A row for each block, added up in a fixed order.
__global__ void merge_kernel(const __grid_constant__ Parts parts) {
  constexpr int kAtOnce = 8;
  const char* row = parts.parts + blockIdx.x * parts.count * int64_t(sizeof(double));
  double sum = 0;
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < parts.count; i += kThreads * kAtOnce) {
    double part[kAtOnce] = {};
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (i + u * kThreads < parts.count) part[u] = load<double>(row + (i + u * kThreads) * int64_t(sizeof(double)));
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) sum += part[u];
  }
  double* scratch = reinterpret_cast<double*>(shared_memory());
  sum = block_reduce<kThreads>(sum, scratch, [](double a, double b) { return a + b; });
  if (threadIdx.x == 0) store(parts.out + blockIdx.x * sizeof(double), sum);
}

inline void merge_parts(const Parts& parts, int64_t rows, cudaStream_t stream) {
  start_blocks(merge_kernel, unsigned(rows), kThreads, kThreads / 32 * int(sizeof(double)), stream, parts);
}

}  // namespace
}  // namespace safeops::cuda
