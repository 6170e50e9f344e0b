// Gathers elements by an index, and adds their gradients up.
#pragma once

#include "common/index.h"
#include "cpu/selection/patterns.h"

namespace safeops::cpu {

// An index tensor, int32 or int64. It is read in chunks, as unsigned bit patterns.
struct Index {
  bool narrow;
  BitView bits;

  explicit Index(const Tensor& t) : narrow(is_narrow_index(t)), bits(t) {}
};

// Calls f(I{}), where I is uint32_t if `narrow`, else uint64_t.
template <class F>
void by_index(bool narrow, const F& f) {
  if (narrow)
    f(uint32_t{});
  else
    f(uint64_t{});
}

// Returns an index pattern as int64, sign kept.
inline int64_t as_signed(uint32_t i) { return static_cast<int32_t>(i); }
inline int64_t as_signed(uint64_t i) { return static_cast<int64_t>(i); }

// True if 0 <= i < size, also for sizes beyond int32.
template <class I>
inline bool in_range(I i, int64_t size) {
  return static_cast<uint64_t>(as_signed(i)) < static_cast<uint64_t>(size);
}

// out[...] = input[..., index[...], ...] along `dim`, or `fill` if the index is out of range. `out` is contiguous.
void gather_elements(const BitView& input, int dim, const BitView& index, bool narrow, char* out, uint64_t fill);

// The transpose of gather_elements: adds each gradient to the element of dx that its index names along `dim`. dx is
// contiguous, of shape `size`. Each other dim of the index must be at most as large as in dx. The bits of the result do
// not depend on the number of threads.
void scatter_add(const View& grad, int dim, const BitView& index, bool narrow, const Shape& size, const View& dx);

}  // namespace safeops::cpu
