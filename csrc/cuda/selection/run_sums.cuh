// The sums of entries that name the same destination, as safe_gather and safe_index_select need them backward.
#pragma once

#include "cuda/engine/bits.cuh"

namespace safeops::cuda {

// An entry is a line of grad, and a key: the line it is added to, above the bits of its own position in grad. dx is
// (lines, total, inner), contiguous; total is also the destination of entries that are added to nothing.
struct Sums {
  Plan<2> columns;   // order, grad: the dims beside the indexed one
  const char* keys;  // sorted
  int64_t entries, total, width, inner;  // width: columns
  int position_bits;
  Type type, dx_type;  // of grad; of dx
  char* dx;
  char *next_keys, *next;  // set by sum_runs: what a launch leaves to the next, two entries a thread
};

// Operands of `entries`: order, grad. dx is written where an entry names it. `like` says where workspace is allocated.
void sum_runs(Plan<2> entries, Sums sums, const Tensor& like, cudaStream_t stream);

}  // namespace safeops::cuda
