// What a launch over a list of tensors is given: a table of them, passed by value, and where their elements lie.
#pragma once

#include "cuda/engine/bits.cuh"

namespace safeops::cuda {

constexpr int kMembers = 96;  // of a launch: its parameters stay below 4 KiB

struct Member {
  char* base;
  int64_t numel;
  uint32_t first;  // its first warp in the launch
  Type type;
};

struct Batch {
  int members = 0;
  uint32_t warps = 0;
  int64_t tile;        // bytes of a warp
  int first = 0;       // number of its first member in the list
  int64_t before = 0;  // warps of the launches before it
  Member member[kMembers];
};

// A tensor walked in the order of its memory: dims innermost first.
struct Walk {
  int ndim = 0;  // 0: its elements lie in row-major order, without gaps
  int64_t size[kLoopDims];
  int64_t stride[kLoopDims];  // bytes
  int64_t place[kLoopDims];   // steps in row-major order

  // Where the walk's element i is, by either of the steps.
  __device__ int64_t at(int64_t i, const int64_t* steps) const {
    int64_t sum = 0;
    for (int d = 0; d < ndim; ++d) {
      sum += i % size[d] * steps[d];
      i /= size[d];
    }
    return sum;
  }
};

// Its walk, and whether there are no gaps in it. ndim 0 where the order is also that of the elements.
inline bool make_walk(const safeops::View& view, Walk& walk) {
  const Shape shape = view.shape();
  int64_t steps[safeops::kMaxDims];
  contiguous_strides(shape, steps);
  const int64_t width = safeops::size_of(view.dtype);
  int order[safeops::kMaxDims], dims = 0;
  for (int d = shape.ndim - 1; d >= 0; --d) {
    if (shape.size[d] == 1) continue;
    int at = dims++;
    for (; at > 0 && view.strides[order[at - 1]] > view.strides[d]; --at) order[at] = order[at - 1];
    order[at] = d;
  }
  walk.ndim = 0;
  bool dense = true, plain = true;
  int64_t inner = 1;
  for (int k = 0; k < dims; ++k) {
    const int d = order[k], last = walk.ndim - 1;
    dense = dense && view.strides[d] == inner;
    plain = plain && steps[d] == inner;
    inner *= shape.size[d];
    if (last >= 0 && view.strides[d] * width == walk.stride[last] * walk.size[last] &&
        steps[d] == walk.place[last] * walk.size[last]) {
      walk.size[last] *= shape.size[d];
      continue;
    }
    STD_TORCH_CHECK(walk.ndim < kLoopDims, "safeops: more than ", kLoopDims, " dimensions that do not merge");
    walk.size[walk.ndim] = shape.size[d];
    walk.stride[walk.ndim] = view.strides[d] * width;
    walk.place[walk.ndim++] = steps[d];
  }
  if (dense && plain) walk.ndim = 0;
  return dense;
}

}  // namespace safeops::cuda
