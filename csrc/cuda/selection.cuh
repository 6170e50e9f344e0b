// What the selection ops share on CUDA: elements by their bit patterns, and the rank of each kept element in three
// launches (counts of tiles, their sums, then whoever needs the ranks). Nothing waits and no launch depends on data: a
// CUDA graph can hold them. Every warp works by itself, in the order of the elements: two runs give the same bits.
#pragma once

#include "../common/elements.h"
#include "elementwise.cuh"
#include "tensors.h"

namespace safeops::cuda {

constexpr int kTile = 1024;  // elements whose kept ones a warp counts

// A view that may have been given a further dim: elements of 16 bytes are two of 8.
struct Bits {
  Shape shape;
  int64_t stride[safeops::kMaxDims];
  char* data;
  int64_t width;  // bytes

  explicit Bits(const Tensor& t) : shape(View(t).shape()), data(View(t).data), width(element_bytes(t)) {
    for (int d = 0; d < shape.ndim; ++d) stride[d] = View(t).strides[d];
  }

  void push(int64_t n, int64_t step) {
    STD_TORCH_CHECK(shape.ndim < safeops::kMaxDims, "safeops: too many dimensions");
    shape.size[shape.ndim] = n;
    stride[shape.ndim++] = step;
  }

  void split() {
    if (width != 16) return;
    for (int d = 0; d < shape.ndim; ++d) stride[d] *= 2;
    push(2, 1);
    width = 8;
  }

  Type type() const { return width == 1 ? kBool : width == 2 ? kF16 : width == 4 ? kF32 : kF64; }

  Operand dims(int from, int to) const { return {data, type(), to - from, shape.size + from, stride + from}; }
  Operand all() const { return dims(0, shape.ndim); }
};

// A mask beside elements that may have been split in two.
inline Bits flags_of(const Tensor& mask, const Tensor& input, const char* op) {
  STD_TORCH_CHECK(dtype_of(mask) == DType::kBool, op, ": mask must be bool");
  check_device(mask, input, op, "mask");
  Bits bits(mask);
  if (element_bytes(input) == 16) bits.push(2, 0);
  return bits;
}

// Operands walked in the order of the shape's elements, whatever their own layouts: operand 0 only says that order.
template <int N>
Plan<N + 1> plan_in_order(const Shape& shape, const std::array<Operand, N>& operands) {
  int64_t strides[safeops::kMaxDims];
  contiguous_strides(shape, strides);
  std::array<Operand, N + 1> all{Operand{operands[0].data, kBool, shape.ndim, shape.size, strides}};
  for (int i = 0; i < N; ++i) all[i + 1] = operands[i];
  return make_plan<N + 1>(shape, all);
}

// Where operand o has element i.
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

template <class F>
void by_width(int64_t width, const F& f) {
  switch (width) {
    case 1: return f(uint8_t());
    case 2: return f(uint16_t());
    case 4: return f(uint32_t());
    default: return f(uint64());
  }
}

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
