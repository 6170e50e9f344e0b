// Each block of a launch stores its sum. The last block to finish merges the sums of each group (an image or a plane),
// and those of all groups.
#pragma once

#include "cuda/engine/last_block.cuh"

namespace safeops::cuda {
namespace {

constexpr int kGroupThreads = 256;  // threads of a block, in all kernels that use merge_groups

struct Groups {
  char* parts;  // a sum for each block
  unsigned* counter;
  int64_t count;    // groups
  uint32_t blocks;  // blocks of a group, which are consecutive
  int lanes;        // lanes of a warp that merge one group together
};

// Merges the blocks' sums. sum: this block's, in thread 0. finish_group(number, sum) gets each group's sum, and returns
// the group's term of the total. finish_all(sum) gets the total. One thread makes each of these calls.
template <class Sum, class FinishGroup, class FinishAll>
__device__ void merge_groups(const Groups& groups, Sum sum, const FinishGroup& finish_group,
                             const FinishAll& finish_all) {
  const bool single = groups.blocks == 1;
  if (threadIdx.x == 0) {
    if (single) sum = finish_group(int64_t(blockIdx.x), sum);
    store_part(groups.parts, blockIdx.x, sum);
  }
  if (!is_last_block(groups.counter, gridDim.x)) return;
  // One group is merged by all threads, and so are groups of one block. Else each group is merged by `lanes` lanes.
  const bool one_group = single || groups.count == 1;
  const int64_t count = one_group ? 1 : groups.count, blocks = one_group ? gridDim.x : groups.blocks;
  const int lanes = one_group ? kGroupThreads : groups.lanes, lane = int(threadIdx.x) % lanes;
  Sum all{};
  // All threads take the same number of steps, even beyond the last group, since the lanes of a warp merge together.
#pragma unroll 1
  for (int64_t group = threadIdx.x / lanes; group - threadIdx.x / lanes < count; group += kGroupThreads / lanes) {
    const bool exists = group < count;
    sum = merge_parts<Sum>(groups.parts, group * blocks + lane, exists ? (group + 1) * blocks : 0, lanes);
    if (!one_group) sum = warp_reduce(sum, merged<Sum>, lanes);
    if (one_group) all = sum;
    else if (exists && lane == 0) all.merge(finish_group(group, sum));
  }
  all = block_reduce<kGroupThreads>(all, reinterpret_cast<Sum*>(shared_memory()), merged<Sum>);
  if (threadIdx.x == 0) finish_all(one_group && !single ? finish_group(0, all) : all);
}

// ---- host

// Workspace of merge_groups. It must live until the kernel is launched.
template <class Sum>
struct MergeBuffers {
  Tensor parts, counter;
  Groups groups;

  MergeBuffers(int64_t count, int64_t blocks, const Tensor& like, cudaStream_t stream)
      : parts(vector(count * blocks * int64_t(sizeof(Sum) / sizeof(double)), like)),
        counter(zero_counter(like, stream)),
        groups{static_cast<char*>(parts.data_ptr()), static_cast<unsigned*>(counter.data_ptr()), count,
               uint32_t(blocks), 32} {
    while (groups.lanes > 1 && count * groups.lanes > kGroupThreads) groups.lanes /= 2;
  }

  static Tensor vector(int64_t n, const Tensor& like) { return safeops::empty(Shape(1, &n), DType::kDouble, like); }
};

// Writes the results of a launch that would have no blocks. value is NaN (all bits set) or 0, result_slope is 0.
inline void fill_empty(const Tensor& value, const Tensor& result_slope, bool nan, cudaStream_t stream) {
  cudaMemsetAsync(value.data_ptr(), nan ? 0xFF : 0, value.numel() * size_of(Type(dtype_of(value))), stream);
  cudaMemsetAsync(result_slope.data_ptr(), 0, result_slope.numel() * sizeof(double), stream);
}

}  // namespace
}  // namespace safeops::cuda
