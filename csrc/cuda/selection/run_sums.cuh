// Sums of entries that name the same destination, for the backward of safe_gather and safe_index_select.
#pragma once

#include "cuda/engine/bits.cuh"

namespace safeops::cuda {

// An entry is a line of grad, and a key = destination << position_bits | its position in grad. dx is (lines, total,
// inner), contiguous. Destination `total`: the entry is added to nothing.
struct Sums {
  Plan<2> columns;   // order, grad: all dims but the indexed one
  const char* keys;  // sorted
  int64_t entries, total, width, inner;  // width: columns
  int position_bits;
  Type type, dx_type;  // of grad; of dx
  char* dx;
  char *next_keys, *next;  // set by sum_runs: partial sums for the next launch, two entries a thread
};

// Operands of `entries`: order, grad. dx is written where an entry names it. Workspace is allocated like `like`.
void sum_runs(Plan<2> entries, Sums sums, const Tensor& like, cudaStream_t stream);

}  // namespace safeops::cuda
