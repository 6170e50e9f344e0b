// masked_sum is sum w x over the kept elements. masked_mean divides it by their count, or by sum w if there are
// weights. They share a backward, to which the mean passes the denominator.
// I/O: forward reads x, mask, weight once; backward reads mask, writes dx.
#include <vector>

#include "cpu/engine/weighted_sum.h"

namespace safeops::cpu {

namespace {

using Dims = std::optional<std::vector<int64_t>>;

const int64_t* data(const Dims& dim) { return dim ? dim->data() : nullptr; }
int64_t count(const Dims& dim) { return dim ? static_cast<int64_t>(dim->size()) : -1; }

template <class C>
void reduce(const Shape& shape, const ReducedDims& dims, const View& x, const std::optional<Tensor>& mask,
            const std::optional<Tensor>& weight, const Finish& finish, const Tensor& value, const Tensor& denominator) {
  const Identity<C> op;
  Reduction<C> work(shape, dims, x);
  if (weight) work.input(View(*weight));
  work.input(x);
  if (mask) work.mask(View(*mask));
  work.run(pick_selection<C>(mask.has_value(), weight.has_value()), &op, finish, value, denominator);
}

// in: c = grad / denominator, [weight];  out: dx = keep ? c w : 0
template <class C, bool kMask, bool kWeight>
void gradient_loop(const void*, const Chunk<C>& chunk) {
  const C *c = chunk.in[0], *w = chunk.in[1];
  const uint8_t* mask = chunk.mask;
  C* dx = chunk.out[0];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) {
    C slope = c[i];
    if constexpr (kWeight) slope *= w[i];
    dx[i] = select_or_zero(is_kept<C, kMask, kWeight>(mask, w, i), slope);
  }
}

template <class C>
Loop<C> pick_gradient(bool mask, bool weight) {
  if (mask) return weight ? pick<&gradient_loop<C, true, true>>() : pick<&gradient_loop<C, true, false>>();
  return weight ? pick<&gradient_loop<C, false, true>>() : pick<&gradient_loop<C, false, false>>();
}

// I/O: read mask, write dx.
template <class C>
void backward(const Shape& shape, const ReducedDims& dims, bool keepdim, const Tensor& grad,
            const std::optional<Tensor>& denominator, const std::optional<Tensor>& mask,
            const std::optional<Tensor>& weight, const View& dx) {
  const GradientScale<C> c(grad, denominator);
  const Unreduced g(c.view, dims, shape.ndim, keepdim, "_masked_sum_backward");
  Elementwise<C> work(shape, dx);
  work.input(g.view);
  if (weight) work.input(View(*weight));
  if (mask) work.mask(View(*mask));
  work.output(dx);
  work.run(pick_gradient<C>(mask.has_value(), weight.has_value()), nullptr);
}

// Returns (sum or mean of the kept elements, denominator). The denominator is their count, or the sum of their weights.
std::tuple<Tensor, Tensor> masked_reduction(bool mean, const Tensor& input, const std::optional<Tensor>& mask,
                                            const std::optional<Tensor>& weight, const Dims& dim, bool keepdim,
                                            bool empty_nan, const std::optional<ScalarType>& dtype) {
  const View x(input);
  const Shape shape = x.shape();
  const ReducedDims dims(shape, data(dim), count(dim));
  const DType type = floating(dtype, wide(x.dtype, x.dtype));
  const Shape out = dims.output(shape, keepdim);
  const Tensor value = empty(out, type, input), denominator = empty(out, DType::kDouble, input);
  Finish finish;
  finish.mean = mean;
  finish.counted = mask || weight;
  finish.weighted = weight.has_value();
  finish.plain = !weight;
  finish.empty_nan = empty_nan;
  if (x.dtype == DType::kDouble || type == DType::kDouble || in_double(weight))
    reduce<double>(shape, dims, x, mask, weight, finish, value, denominator);
  else
    reduce<float>(shape, dims, x, mask, weight, finish, value, denominator);
  return {value, denominator};
}

std::tuple<Tensor, Tensor> masked_sum(const Tensor& input, const std::optional<Tensor>& mask,
                                      const std::optional<Tensor>& weight, const Dims& dim, bool keepdim,
                                      bool empty_nan, const std::optional<ScalarType>& dtype) {
  return masked_reduction(false, input, mask, weight, dim, keepdim, empty_nan, dtype);
}

std::tuple<Tensor, Tensor> masked_mean(const Tensor& input, const std::optional<Tensor>& mask,
                                       const std::optional<Tensor>& weight, const Dims& dim, bool keepdim,
                                       bool empty_nan, const std::optional<ScalarType>& dtype) {
  return masked_reduction(true, input, mask, weight, dim, keepdim, empty_nan, dtype);
}

Tensor masked_sum_backward(const Tensor& grad, const std::vector<int64_t>& size, ScalarType dtype,
                           const std::optional<Tensor>& denominator, const std::optional<Tensor>& mask,
                           const std::optional<Tensor>& weight, const Dims& dim, bool keepdim) {
  const Shape shape(static_cast<int>(size.size()), size.data());
  const ReducedDims dims(shape, data(dim), count(dim));
  const DType type = floating(dtype);
  const Tensor dx = new_output(shape, type, grad);
  // leaves_fp32 is asked only if all dims are reduced. Otherwise a tensor of a single row would run in double and a
  // tensor of several rows in float, so that a row's gradient would depend on the other rows.
  const bool all = dims.output(shape, false).ndim == 0;
  if (type == DType::kDouble || dtype_of(grad) == DType::kDouble || in_double(weight) ||
      (weight && all && leaves_fp32(grad, denominator)))
    backward<double>(shape, dims, keepdim, grad, denominator, mask, weight, View(dx));
  else
    backward<float>(shape, dims, keepdim, grad, denominator, mask, weight, View(dx));
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_masked_sum", TORCH_BOX(&masked_sum));
  m.impl("_masked_mean", TORCH_BOX(&masked_mean));
  m.impl("_masked_sum_backward", TORCH_BOX(&masked_sum_backward));
}

}  // namespace safeops::cpu
