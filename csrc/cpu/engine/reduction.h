// Reductions over any set of dims of a tensor of any layout. Counts are exact and results bitwise repeatable.
//
// A Reduction walks the input as three nested groups of dims, innermost last: (outer, reduced, inner). The inner dims
// are the kept dims that vary faster in memory than all reduced dims. If inner = 1, it reduces rows; if outer = 1,
// columns; a full reduction has outer = inner = 1. reduction_driver.h: rows are summed chunk by chunk, columns side by
// side.
#pragma once

#include "cpu/engine/elementwise.h"

namespace safeops::cpu {

// Options of a weighted sum or mean: how its results follow from its sums.
struct Finish {
  bool mean = false;       // divide by the denominator
  bool counted = false;    // there is a mask or a weight, so the loop writes `keep`
  bool weighted = false;   // the loop writes the kept weights, and the denominator is their sum
  bool plain = false;      // an element's value is the first input, 0 if masked out: rows are summed without the loop
  bool empty_nan = false;  // the result is NaN instead of 0 if nothing is kept
  std::optional<double> divisor;
};

// Sums a loop's values over elements in their stored dtypes: adds the sum to `value`, and the number of kept elements
// to `count`.
using StoredSum = void (*)(const void* op, const Stored& run, double& value, int64_t& count);

template <class C>
struct Reduction {
  Shape shape;
  ReducedDims dims;
  Order order, output_order;  // of the input's dims; of the outputs' dims, in the sequence of the input's walk
  int64_t outer = 1, reduced = 1, inner = 1;
  Inputs<C> inputs;

  // The walk follows the memory of x, which is broadcast to `shape`.
  Reduction(const Shape& shape, const ReducedDims& dims, const View& x);

  // Reduces the first dim. The walk is that of a contiguous tensor of this shape, whatever the operands' strides.
  explicit Reduction(const Shape& shape);

  // Returns a view that has the reduced dims as size 1. output: a tensor of the outputs' shape, with or without the
  // reduced dims.
  Unreduced seen(const Tensor& output) const {
    const View view(output);
    return Unreduced(view, dims, shape.ndim, view.ndim == shape.ndim, "safeops");
  }

  void input(const View& view) { inputs.add(view, shape, order); }
  void mask(const View& view) { inputs.add_mask(view, shape, order); }

  // Weighted sums or means. The loop writes an element's value to out[0], its kept weight to out[1], and 1 or 0 to
  // keep. `value` and `denominator` (float64) are the outputs. `stored` computes the same sums, without weights, from
  // contiguous inputs in their stored dtypes; null if no such loop exists.
  void run(Loop<C> loop, const void* op, const Finish& finish, const Tensor& value, const Tensor& denominator,
           StoredSum stored = nullptr) const;
};

}  // namespace safeops::cpu
