// Parameters of a launch over a list of tensors: Batch is a table of its tensors (members), passed by value; Walk is
// the order of a tensor's elements.
#pragma once

#include "cuda/engine/bits.cuh"

namespace safeops::cuda {

// Most members of a launch: with kFew its parameters fit into 4 KiB; with kMany into the 32,764 bytes that CUDA 12.1
// and its driver allow.
constexpr int kFew = 96, kMany = CUDART_VERSION >= 12010 ? 1024 : kFew;

struct Member {
  char* base;
  int64_t numel;
  uint32_t first;  // the launch's first warp that works on this tensor
  Type type;
};

struct Head {
  int members = 0;
  uint32_t warps = 0;
  int64_t tile;        // bytes that a warp processes
  int first = 0;       // index of the launch's first member in the list
  int64_t before = 0;  // number of blocks of earlier launches
};

template <int kMost>
struct Batch : Head {
  Member member[kMost];
};

inline int most_members() {
  int driver = 0;
  return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12010 ? kMany : kFew;
}

// Walks a tensor in the order of its memory. Operand 0 is the tensor. Operand 1 is never accessed: its address minus
// its base is an element's row-major index. ndim is 0 if both orders are the same and there are no gaps.
using Walk = Plan<2>;

// Sets `walk`. Returns true if there are no gaps between the tensor's elements.
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
