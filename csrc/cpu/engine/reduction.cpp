#include "cpu/engine/reduction.h"

#include "cpu/engine/sums.h"

namespace safeops::cpu {

constexpr int64_t kFirstDim = 0;

template <class C>
Reduction<C>::Reduction(const Shape& shape_, const ReducedDims& dims_, const View& x) : shape(shape_), dims(dims_) {
  int64_t strides[kMaxDims];
  expand_strides(x.ndim, x.sizes, x.strides, shape, strides);
  const Order walk = Order::by_strides(shape, strides);
  const Order reduced_order = Order::by_strides(shape, strides, dims.reduced, true);
  output_order = Order::by_strides(shape, strides, dims.reduced, false);
  int fastest = 0;  // number of output dims that vary faster in memory than every reduced dim
  while (fastest < walk.ndim && !dims.reduced[walk.dim[fastest]]) ++fastest;
  if (reduced_order.ndim == 0) fastest = 0;
  for (int i = 0; i < output_order.ndim; ++i) (i < fastest ? inner : outer) *= output_order.size[i];
  for (int i = 0; i < fastest; ++i) order.push(output_order.dim[i], output_order.size[i]);
  for (int i = 0; i < reduced_order.ndim; ++i) order.push(reduced_order.dim[i], reduced_order.size[i]);
  for (int i = fastest; i < output_order.ndim; ++i) order.push(output_order.dim[i], output_order.size[i]);
  for (int d = 0; d < shape.ndim; ++d)
    if (dims.reduced[d]) reduced *= shape.size[d];
}

template <class C>
Reduction<C>::Reduction(const Shape& shape_)
    : shape(shape_), dims(shape, &kFirstDim, 1), order(Order::contiguous(shape)) {
  reduced = shape.size[0];
  for (int d = 1; d < shape.ndim; ++d) inner *= shape.size[d];
}

template <class C>
void Reduction<C>::run(Loop<C> loop, const void* op, const Finish& finish, const Tensor& value,
                       const Tensor& denominator, StoredSum stored) const {
  Outputs outputs(*this, pick<&sum_results_loop>(), &finish);
  outputs.add(seen(value));
  outputs.add(seen(denominator));
  const Sums<C> sums{finish, loop, op, stored};
  ReductionDriver<C, Sums<C>>{*this, sums, outputs}.run();
}

template struct Reduction<float>;
template struct Reduction<double>;

}  // namespace safeops::cpu
