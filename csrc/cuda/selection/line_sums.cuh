// Sums gradients in shared memory, for the backward of safe_gather and safe_index_select.
#pragma once

#include "indexed.cuh"

namespace safeops::cuda {

// Does what add_up (indexed.cuh) does, in one launch and without workspace; it writes all of dx. Returns false, and
// does nothing, in these cases: a line is so long that too many blocks would read its index; there are too few blocks
// for their entries; grad is smaller than dx in a dim other than `dim`; grad or dx is fp64.
bool add_lines(const Bits& grad, Type type, int dim, const Bits& index, const Shape& size, Type dx_type, char* dx,
               cudaStream_t stream);

}  // namespace safeops::cuda
