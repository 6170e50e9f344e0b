// Gathering by an index and adding up gradients, for safe_gather and safe_index_select.
//
// An index is a vector along one dim, or has every dim. The host never reads it: an index out of range reads the fill
// value, and is left out of a sum.
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

// The index of entries of `shape`: a vector is the same for all lines along `dim`.
inline Bits along_lines(const Bits& index, const Shape& shape, int dim) {
  Bits all = index;
  all.shape = shape;
  if (index.shape.ndim != shape.ndim)
    for (int d = 0; d < shape.ndim; ++d) all.stride[d] = d == dim ? index.stride[0] : 0;
  return all;
}

// out[i] = x[i with index[i] at `dim`], `fill` where that is out of range. `out` is contiguous, of `shape`; x has as
// many dims (a 0-dim tensor as a vector), and may be smaller only in `dim`.
void look_up(const Shape& shape, const Bits& x, int dim, const Bits& index, uint64_t fill, char* out,
             cudaStream_t stream);

// dx of shape `size`, contiguous: for each destination the sum of grad over the index entries that name it, at least as
// accurate as in fp32, or in fp64 if grad or dx is fp64. Its bits do not depend on timing. A zero's sign may be lost.
void add_up(const Bits& grad, Type type, int dim, const Bits& index, const Shape& size, Type dx_type, const Tensor& dx,
            cudaStream_t stream);

}  // namespace safeops::cuda
