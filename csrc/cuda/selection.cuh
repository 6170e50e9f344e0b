// What the masked selection ops share on CUDA: the rank of each kept element, in three
// launches (counts of tiles, their sums, then whoever needs the ranks). Nothing waits and no launch depends on data: a
// CUDA graph can hold them. Every warp works by itself, in the order of the elements: two runs give the same bits.
#pragma once

#include "bits.cuh"

namespace safeops::cuda {

constexpr int kTile = 1024;  // elements whose kept ones a warp counts

// ---- ranks

struct Ranks {
  int64_t* first;  // of each tile: how many are kept before it
  int64_t* count;  // in all
  int64_t tiles;
};

// body(i, kept, rank) for the elements of this thread's warp's tile; operand kMask of the plan is the mask. All lanes
// take part to the end.
template <int kMask, int N, class Body>
__device__ inline void each_of_tile(const Plan<N>& plan, int64_t tile, int64_t rank, const Body& body) {
  const int lane = threadIdx.x % 32;
  for (int64_t start = tile * kTile; start < plan.numel && start < (tile + 1) * kTile; start += 32) {
    const int64_t i = start + lane;
    const bool kept = i < plan.numel && load<uint8_t>(at(plan, kMask, i)) != 0;
    const unsigned bits = __ballot_sync(kWarp, kept);
    if (i < plan.numel) body(i, kept, rank + __popc(bits & ((1u << lane) - 1)));
    rank += __popc(bits);
  }
}

__device__ inline int64_t warp_number() { return int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; }

static __global__ void __launch_bounds__(kThreads) count_kernel(const __grid_constant__ Plan<2> mask, Ranks ranks) {
  const int64_t tile = warp_number();
  if (tile >= ranks.tiles) return;
  int64_t kept = 0;
  each_of_tile<1>(mask, tile, 0, [&](int64_t, bool keep, int64_t rank) { kept = rank + keep; });
  // the tile's last element saw them all, and the lane that has it says so
  const int64_t last = mask.numel < (tile + 1) * kTile ? mask.numel : (tile + 1) * kTile;
  if (threadIdx.x % 32 == (last - 1) % 32) ranks.first[tile] = kept;
}

// One warp adds up the counts of all tiles: 64M elements have 64 Ki of them.
static __global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ Plan<2>, Ranks ranks) {
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  int64_t total = 0;
  for (int64_t start = 0; start < ranks.tiles; start += 32) {
    const bool mine = start + lane < ranks.tiles;
    const unsigned kept = mine ? unsigned(ranks.first[start + lane]) : 0;
    unsigned sum = kept;
    for (int step = 1; step < 32; step *= 2) {
      const unsigned below = __shfl_sync(kWarp, sum, lane < step ? lane : lane - step);
      if (lane >= step) sum += below;
    }
    if (mine) ranks.first[start + lane] = total + sum - kept;
    total += __shfl_sync(kWarp, sum, 31);
  }
  if (lane == 0) *ranks.count = total;
}

// `first` is allocated here and must live until the last launch that reads it.
inline Ranks launch_ranks(const Shape& shape, const Bits& mask, const Tensor& like, Tensor& first, Tensor& count,
                          cudaStream_t stream) {
  const int64_t tiles = (shape.numel() + kTile - 1) / kTile;
  first = safeops::empty(Shape(1, &tiles), DType::kLong, like);
  count = safeops::empty(Shape(), DType::kLong, like);
  const Ranks ranks{static_cast<int64_t*>(first.data_ptr()), static_cast<int64_t*>(count.data_ptr()), tiles};
  const Plan<2> plan = plan_in_order<1>(shape, {mask.all()});
  if (tiles) start(count_kernel, blocks_for(tiles, kThreads / 32), stream, plan, ranks);
  start(sum_kernel, 1, stream, plan, ranks);
  return ranks;
}

}  // namespace safeops::cuda
