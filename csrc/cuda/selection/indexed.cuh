// What an index names, read and added up: the two directions of safe_gather and safe_index_select. Host only.
//
// An index is a vector along one dim, or has every dim. It is never looked at by the host: one out of range reads a
// stand-in, and is left out of a sum.
#pragma once

#include "common/index.h"
#include "cuda/engine/bits.cuh"

namespace safeops::cuda {

inline Bits index_of(const Tensor& index, const Tensor& input, const char* op) {
  check_device(index, input, op, "index");
  is_narrow_index(index);
  Bits bits(index);
  bits.make_vector();
  return bits;
}

// out[i] = x[i, but at `dim` index[i]], `fill` where that is out of range. `out` is contiguous, of `shape`; x has as
// many dims (a 0-dim one is given as a vector), and is in no dim but `dim` smaller.
void look_up(const Shape& shape, const Bits& x, int dim, const Bits& index, uint64_t fill, char* out,
             cudaStream_t stream);

// dx of shape `size`, contiguous: the sums of grad over the entries of index that name each place, in fp32 or, where
// grad or dx is fp64, in fp64. The order of every sum depends on the index alone: the same bits each time.
void add_up(const Bits& grad, Type type, int dim, const Bits& index, const Shape& size, Type dx_type, const Tensor& dx,
            cudaStream_t stream);

}  // namespace safeops::cuda
