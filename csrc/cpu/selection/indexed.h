// Gathers elements by an index, and adds their gradients up.
#pragma once

#include "common/index.h"
#include "cpu/selection/patterns.h"

namespace safeops::cpu {

// An index tensor, int32 or int64. It is read in chunks as unsigned patterns, so that a negative index is out of range.
struct Index {
  bool narrow;
  BitView bits;

  explicit Index(const Tensor& t) : narrow(is_narrow_index(t)), bits(t) {}
};

// Calls f(I{}) with uint32_t or uint64_t.
template <class F>
void by_index(bool narrow, const F& f) {
  if (narrow)
    f(uint32_t{});
  else
    f(uint64_t{});
}

// The index as int64, sign kept.
inline int64_t as_signed(uint32_t i) { return static_cast<int32_t>(i); }
inline int64_t as_signed(uint64_t i) { return static_cast<int64_t>(i); }

// True if 0 <= i < size, also for sizes beyond int32.
template <class I>
inline bool in_range(I i, int64_t size) {
  return static_cast<uint64_t>(as_signed(i)) < static_cast<uint64_t>(size);
}

// out[...] = input[..., index[...], ...] along `dim`, `fill` where the index is out of range. `out` is contiguous.
void gather_elements(const BitView& input, int dim, const BitView& index, bool narrow, char* out, uint64_t fill);

// The transpose of gather_elements: adds gradients up at their index along `dim` of a contiguous dx of `size`. Every
// other dim of the index must be at most as large as in dx. The result has the same bits for any number of threads.
void scatter_add(const View& grad, int dim, const BitView& index, bool narrow, const Shape& size, const View& dx);

}  // namespace safeops::cpu
