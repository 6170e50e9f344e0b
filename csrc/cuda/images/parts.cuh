// What the blocks of a launch leave for the last of them: their sums, of images or planes, which it adds up.
#pragma once

#include "cuda/engine/last_block.cuh"

namespace safeops::cuda {
namespace {

constexpr int kGroupThreads = 256;  // of a block, in all kernels of images

struct Groups {
  char* parts;  // a sum for each block
  unsigned* counter;
  int64_t count;
  uint32_t blocks;  // of a group, which follow each other
  int lanes;        // of a warp, that add up a group
};

// sum: a block's own. of_group(number, sum) sees each group's, and gives what it has in that of all, which of_all(sum)
// sees: each in one thread.
template <class Sum, class OfGroup, class OfAll>
__device__ void merge_groups(const Groups& groups, Sum sum, const OfGroup& of_group, const OfAll& of_all) {
  const bool single = groups.blocks == 1;
  if (threadIdx.x == 0) {
    if (single) sum = of_group(int64_t(blockIdx.x), sum);
    leave_part(groups.parts, blockIdx.x, sum);
  }
  if (!is_last_block(groups.counter, gridDim.x)) return;
  // one group, by all threads; or several at once, by a few lanes each
  const bool whole = single || groups.count == 1;
  const int64_t count = whole ? 1 : groups.count, blocks = whole ? gridDim.x : groups.blocks;
  const int lanes = whole ? kGroupThreads : groups.lanes, lane = int(threadIdx.x) % lanes;
  Sum all{};
  // All threads take as many steps, beyond the last group too: the lanes of a warp add up together.
#pragma unroll 1
  for (int64_t group = threadIdx.x / lanes; group - threadIdx.x / lanes < count; group += kGroupThreads / lanes) {
    const bool there = group < count;
    sum = merge_parts<Sum>(groups.parts, group * blocks + lane, there ? (group + 1) * blocks : 0, lanes);
    if (!whole) sum = warp_reduce(sum, merged<Sum>, lanes);
    if (whole) all = sum;
    else if (there && lane == 0) all.merge(of_group(group, sum));
  }
  all = block_reduce<kGroupThreads>(all, reinterpret_cast<Sum*>(shared_memory()), merged<Sum>);
  if (threadIdx.x == 0) of_all(whole && !single ? of_group(0, all) : all);
}

// ---- host

// The memory that it takes, until the kernel is launched.
template <class Sum>
struct Merging {
  Tensor parts, counter;
  Groups groups;

  Merging(int64_t count, int64_t blocks, const Tensor& like, cudaStream_t stream)
      : parts(vector(count * blocks * int64_t(sizeof(Sum) / sizeof(double)), like)),
        counter(zero_counter(like, stream)),
        groups{static_cast<char*>(parts.data_ptr()), static_cast<unsigned*>(counter.data_ptr()), count,
               uint32_t(blocks), 32} {
    while (groups.lanes > 1 && count * groups.lanes > kGroupThreads) groups.lanes /= 2;
  }

  static Tensor vector(int64_t n, const Tensor& like) { return safeops::empty(Shape(1, &n), DType::kDouble, like); }
};

// Of no blocks at all (a NaN has all bits set).
inline void fill_nothing(const Tensor& value, const Tensor& share, bool nan, cudaStream_t stream) {
  cudaMemsetAsync(value.data_ptr(), nan ? 0xFF : 0, value.numel() * size_of(Type(dtype_of(value))), stream);
  cudaMemsetAsync(share.data_ptr(), 0, share.numel() * sizeof(double), stream);
}

}  // namespace
}  // namespace safeops::cuda
