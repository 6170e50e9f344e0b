// Reductions over any set of dims of any layout, with exact counts, bitwise repeatable.
//
// A Reduction is the walk over the input in three nested groups of dims, innermost last: (outer, reduced, inner). The
// inner dims are those of the output that vary fastest in memory. If inner = 1 it reduces rows; if outer = 1, columns;
// a full reduction has outer = inner = 1. Rows are summed chunk by chunk, columns side by side (reduction_driver.h).
#pragma once

#include "cpu/engine/elementwise.h"

namespace safeops::cpu {

// Options of the step from sums to the results of a weighted sum or mean.
struct Finish {
  bool mean = false;       // divide by the denominator
  bool counted = false;    // there is a mask or a weight, so the loop writes `keep`
  bool weighted = false;   // the loop writes the kept weights, and the denominator is their sum
  bool plain = false;      // the values are the first input, 0 where masked out: rows are summed without the loop
  bool empty_nan = false;  // nothing kept: NaN instead of 0
  std::optional<double> divisor;
};

// Adds the sum of a loop's values over stored elements to `value`, and the number that the mask keeps to `count`.
using StoredSum = void (*)(const void* op, const Stored& run, double& value, int64_t& count);

template <class C>
struct Reduction {
  Shape shape;
  ReducedDims dims;
  Order order, output_order;  // of the input; of the outputs, as the input's walk visits them
  int64_t outer = 1, reduced = 1, inner = 1;
  Inputs<C> inputs;

  // The walk follows the memory of x, broadcast to `shape`.
  Reduction(const Shape& shape, const ReducedDims& dims, const View& x);

  // Reduces the first dim. The walk is that of a contiguous tensor, whatever the operands' strides.
  explicit Reduction(const Shape& shape);

  // A view, with the reduced dims as size 1, of a tensor of the outputs' shape with or without them.
  Unreduced seen(const Tensor& output) const {
    const View view(output);
    return Unreduced(view, dims, shape.ndim, view.ndim == shape.ndim, "safeops");
  }

  void input(const View& view) { inputs.add(view, shape, order); }
  void mask(const View& view) { inputs.add_mask(view, shape, order); }

  // Weighted sums or means. The loop writes an element's value to out[0], its kept weight to out[1], and 1 or 0 to
  // keep. `value` and `denominator` (float64) are the outputs. `stored` computes the same, without weights, from
  // contiguous inputs in their stored dtypes; null if no such loop exists.
  void run(Loop<C> loop, const void* op, const Finish& finish, const Tensor& value, const Tensor& denominator,
           StoredSum stored = nullptr) const;
};

}  // namespace safeops::cpu
