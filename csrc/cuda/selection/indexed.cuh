// Gathering by an index and adding up gradients, for safe_gather and safe_index_select.
//
// An index is a vector along one dim, or has as many dims as the input. The host never reads it, so no range is
// checked: for an index out of range, the forward writes the fill value, and the backward leaves its gradient out.
#pragma once

#include "common/index.h"
#include "cuda/engine/bits.cuh"

namespace safeops::cuda {

__device__ inline int64_t index_at(const char* p, bool narrow) {
  return narrow ? int64_t(int32_t(load<uint32_t>(p))) : int64_t(load<uint64>(p));
}

__device__ inline bool in_range(int64_t index, int64_t length) { return uint64(index) < uint64(length); }

// ---- host

inline Bits index_of(const Tensor& index, const Tensor& input, const char* op) {
  check_device(index, input, op, "index");
  is_narrow_index(index);
  Bits bits(index);
  bits.make_vector();
  return bits;
}

// Returns the index expanded to `shape`: a vector along `dim` is repeated over all other dims.
inline Bits along_lines(const Bits& index, const Shape& shape, int dim) {
  Bits all = index;
  all.shape = shape;
  if (index.shape.ndim != shape.ndim)
    for (int d = 0; d < shape.ndim; ++d) all.stride[d] = d == dim ? index.stride[0] : 0;
  return all;
}

// out[i] = x[j], where j is i with index[i] in place of its component `dim`; `fill` if index[i] is out of range. `out`
// is contiguous, of `shape`; x has as many dims (a 0-dim tensor as a vector), and may be smaller only in `dim`.
void look_up(const Shape& shape, const Bits& x, int dim, const Bits& index, uint64_t fill, char* out,
             cudaStream_t stream);

// Writes dx, of shape `size` and contiguous: each element is the sum of grad over the index entries that name it. Sums
// are at least as accurate as in fp32, or in fp64 if grad or dx is fp64. Their bits do not depend on timing. The sign
// of a zero may be lost.
void add_up(const Bits& grad, Type type, int dim, const Bits& index, const Shape& size, Type dx_type, const Tensor& dx,
            cudaStream_t stream);

}  // namespace safeops::cuda
