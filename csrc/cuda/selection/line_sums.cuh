// Sums of gradients in shared memory, for the backward of safe_gather and safe_index_select.
#pragma once

#include "indexed.cuh"

namespace safeops::cuda {

// Like add_up, but writes all of dx, in one launch and without workspace. Returns false if it does not take these
// operands: a line is so long that too many blocks would read its index, the blocks are too few for their entries, a
// dim beside `dim` is smaller than in dx, or the sums are kept in fp64.
bool add_lines(const Bits& grad, Type type, int dim, const Bits& index, const Shape& size, Type dx_type, char* dx,
               cudaStream_t stream);

}  // namespace safeops::cuda
