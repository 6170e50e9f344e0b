// The parameter of a launch over a list of tensors: a table of them, passed by value, and the order of their elements.
#pragma once

#include "cuda/engine/bits.cuh"

namespace safeops::cuda {

// Members of a launch: its parameters fit into 4 KiB, or into the 32,764 bytes that CUDA 12.1 and its driver allow.
constexpr int kFew = 96, kMany = CUDART_VERSION >= 12010 ? 1024 : kFew;

struct Member {
  char* base;
  int64_t numel;
  uint32_t first;  // its first warp in the launch
  Type type;
};

struct Head {
  int members = 0;
  uint32_t warps = 0;
  int64_t tile;        // bytes of a warp
  int first = 0;       // index of its first member in the list
  int64_t before = 0;  // blocks of earlier launches
};

template <int kMost>
struct Batch : Head {
  Member member[kMost];
};

inline int most_members() {
  int driver = 0;
  return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12010 ? kMany : kFew;
}

// A tensor walked in the order of its memory. Operand 0 has its elements, operand 1 their indices in row-major order
// (as addresses, whose distance from the base counts). ndim 0: both orders are the same, and there are no gaps.
using Walk = Plan<2>;

// Returns true if there are no gaps between the elements.
inline bool make_walk(const safeops::View& view, Walk& walk) {
  const Shape shape = view.shape();
  int64_t index_strides[safeops::kMaxDims];
  contiguous_strides(shape, index_strides);
  walk = make_plan<2>(shape, {Operand{view.data, Type(view.dtype), shape.ndim, shape.size, view.strides},
                              Operand{view.data, kBool, shape.ndim, shape.size, index_strides}});
  bool dense = true, plain = true;
  int64_t inner = 1;
  for (int d = 0; d < walk.ndim; ++d) {
    dense = dense && walk.stride[0][d] == inner * size_of(walk.type[0]);
    plain = plain && walk.stride[1][d] == inner;
    inner *= walk.size[d];
  }
  if (dense && plain) walk.ndim = 0;
  return dense;
}

}  // namespace safeops::cuda
