// Keys sorted on the device by CUB, whose header takes long to compile: it is in sorted.cu alone.
#pragma once

#include "cuda/engine/tensors.h"
#include "cuda/engine/types.cuh"

namespace safeops::cuda {

// Sorts n keys by their bits from `begin` to `end`; keys equal in those keep their order. Works in `keys` and `other`,
// and returns which of the two holds the result. Nothing waits. `like` says where workspace is allocated.
uint64* sort_keys(uint64* keys, uint64* other, int64_t n, int begin, int end, const Tensor& like, cudaStream_t stream);

}  // namespace safeops::cuda
