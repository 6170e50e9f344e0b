// The one reduction: sums of terms over any set of dims of any layout, with exact counts, bitwise repeatable.
//
// The input's walk is split in three nested groups, innermost last: (outer, reduced, inner), where inner are kept dims
// that lie fastest in memory. A row reduction has inner = 1, a column reduction outer = 1, a full one neither.
// Rows are summed chunk by chunk, columns in lanes: at most 16 fp32 additions one after the other, then double. The
// partition depends on the sizes alone.
#pragma once

#include "cpu/engine/elementwise.h"

namespace safeops::cpu {

// How totals become results.
struct Finish {
  bool mean = false;       // divide by the denominator
  bool counted = false;    // there is a mask or a weight, so the loop writes `keep`
  bool weighted = false;   // the loop writes the kept weights, and the denominator is their sum
  bool plain = false;      // the terms are the first input, or 0 where the mask is: a row needs no loop before its sum
  bool empty_nan = false;  // nothing kept: NaN instead of 0
  std::optional<double> divisor;
};

template <class C>
struct Reduction {
  Shape shape;
  ReducedDims dims;
  Order order, kept;  // of the input; of the outputs, in the input's order
  int64_t outer = 1, reduced = 1, inner = 1;
  Inputs<C> inputs;

  // The walk follows the memory of x, seen in the full shape.
  Reduction(const Shape& shape, const ReducedDims& dims, const View& x);

  // A tensor of the outputs' shape, with or without the reduced dims, seen with them.
  Unreduced seen(const Tensor& output) const {
    const View view(output);
    return Unreduced(view, dims, shape.ndim, view.ndim == shape.ndim, "safeops");
  }

  void input(const View& view) { inputs.add(view, shape, order); }
  void mask(const View& view) { inputs.add_mask(view, shape, order); }

  // The loop writes terms to out[0], kept weights to out[1], keep to keep. `value` and `denominator` (float64) are the
  // outputs, contiguous in the kept dims.
  void run(Loop<C> loop, const void* op, const Finish& finish, const Tensor& value, const Tensor& denominator) const;
};

}  // namespace safeops::cpu
