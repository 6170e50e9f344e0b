// Sums the entries of each destination, for the backward of safe_gather and safe_index_select.
#pragma once

#include "cuda/engine/bits.cuh"

namespace safeops::cuda {

// An entry has `width` elements of grad (its columns), and a key = destination << position_bits | position in grad. dx
// is contiguous, with the shape (lines, total, inner). An entry with the destination `total` is added to nothing.
struct Sums {
  Plan<2> columns;   // operands order, grad: over the dims of an entry
  const char* keys;  // sorted
  int64_t entries, total, width, inner;
  int position_bits;
  Type type, dx_type;  // of grad; of dx
  char* dx;
  char *next_keys, *next;  // set by sum_runs: partial sums for the next launch, two entries a thread
};

// Sums the entries of each destination. dx is written only where an entry names it. Operands of `entries`: order, grad.
// Workspace is allocated on the device of `like`.
void sum_runs(Plan<2> entries, Sums sums, const Tensor& like, cudaStream_t stream);

}  // namespace safeops::cuda
