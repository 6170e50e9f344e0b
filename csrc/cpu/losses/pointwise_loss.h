// The skeleton of the pointwise losses. A loss is a struct of two one-line functions of the difference d = x - y, made
// of the parameters of its schema, whose types follow its name
//
//     template <class C> struct Mse {
//       C value(C d) const { return d * d; }
//       C slope(C d) const { return 2 * d; }
//     };
//     SAFEOPS_POINTWISE_LOSS(mse_loss, Mse)
//     SAFEOPS_POINTWISE_LOSS(huber_loss, Huber, double)
//
// I/O, contiguous: forward reads x, y, mask; backward reads x, y, mask and writes dx.
#pragma once

#include "cpu/engine/weighted_sum.h"

namespace safeops::cpu {

enum LossReduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };

template <template <class> class Loss, class C>
struct OfDifference {
  static constexpr int operands = 2;
  Loss<C> loss;
  C value(C x, C y) const { return loss.value(x - y); }
  C slope(C x, C y) const { return loss.slope(x - y); }
};

template <template <class> class Loss, class... Parameters>
struct PointwiseLoss {
  using OptionalTensor = std::optional<Tensor>;
  using Pair = std::tuple<Tensor, Tensor>;

  template <class C>
  static Pair compute(const Tensor& input, const View& x, const View& y, const OptionalTensor& mask,
                      const OptionalTensor& weight, const Finish& finish, int64_t reduction, DType dtype,
                      Parameters... parameters) {
    using F = OfDifference<Loss, C>;
    const F f{Loss<C>{parameters...}};
    const Shape shape = broadcast(x.shape(), y.shape());
    const Loop<C> loop = pick_terms<C, F>(mask.has_value(), weight.has_value());
    const auto bind = [&](auto& work) {
      if (weight) work.input(View(*weight));
      work.input(x);
      work.input(y);
      if (mask) work.mask(View(*mask));
    };
    if (reduction == kNone) {
      Pair result{output_like(shape, dtype, input, x), empty_vector(DType::kDouble, input)};
      const View out(std::get<0>(result));
      Elementwise<C> work(shape, out);
      bind(work);
      work.output(out);
      work.run(loop, &f);
      return result;
    }
    Pair result{empty(Shape(), dtype, input), empty(Shape(), DType::kDouble, input)};
    const bool follow_x = shape.is(x.ndim, x.sizes);
    Reduction<C> work(shape, ReducedDims(shape, nullptr, 0), follow_x ? x : y);
    bind(work);
    work.run(loop, &f, finish, std::get<0>(result), std::get<1>(result));
    return result;
  }

  static Pair forward(const Tensor& input, const Tensor& target, const OptionalTensor& mask,
                      const OptionalTensor& weight, const OptionalTensor& denominator, int64_t reduction,
                      Parameters... parameters, bool empty_nan, const std::optional<double>& divisor) {
    const View x(input), y(target);
    const DType type = wide(x.dtype, y.dtype);
    Finish finish;
    finish.mean = reduction == kMean;
    finish.counted = mask || weight;
    finish.weighted = weight.has_value();
    finish.empty_nan = empty_nan;
    if (finish.mean && denominator) finish.divisor = read_scalar(View(*denominator));
    if (finish.mean && divisor) finish.divisor = *divisor;
    if (type == DType::kDouble || in_double(weight))
      return compute<double>(input, x, y, mask, weight, finish, reduction, type, parameters...);
    return compute<float>(input, x, y, mask, weight, finish, reduction, type, parameters...);
  }

  template <class C>
  static void compute_backward(const Shape& shape, const Tensor* dx, const Tensor* dy, const Tensor& grad,
                               const OptionalTensor& denominator, const View& x, const View& y,
                               const OptionalTensor& mask, const OptionalTensor& weight,
                               Parameters... parameters) {
    using F = OfDifference<Loss, C>;
    const Slope<F, C> op{F{Loss<C>{parameters...}}, static_cast<C>(dx ? 1 : -1)};
    const Scale<C> c(grad, denominator);
    const View first(dx ? *dx : *dy);
    Elementwise<C> work(shape, first);
    work.input(c.view);
    if (weight) work.input(View(*weight));
    work.input(x);
    work.input(y);
    if (mask) work.mask(View(*mask));
    work.output(first);
    const bool both = dx && dy;
    work.output(both ? View(*dy) : first, both);
    work.run(pick_slope<C, F>(mask.has_value(), weight.has_value()), &op);
  }

  static Pair backward(const Tensor& grad, const OptionalTensor& denominator, const Tensor& input,
                       const Tensor& target, const OptionalTensor& mask, const OptionalTensor& weight,
                       Parameters... parameters, bool need_input, bool need_target,
                       const std::optional<ScalarType>& input_dtype,
                       const std::optional<ScalarType>& target_dtype) {
    const View x(input), y(target);
    const Shape shape = broadcast(x.shape(), y.shape());
    const DType dx_type = floating(input_dtype, x.dtype), dy_type = floating(target_dtype, y.dtype);
    const Tensor dx = need_input ? output_like(shape, dx_type, input, x) : empty_vector(dx_type, input);
    const Tensor dy = need_target ? output_like(shape, dy_type, target, y) : empty_vector(dy_type, target);
    const bool wide = in_double(weight) || dtype_of(grad) == DType::kDouble || x.dtype == DType::kDouble ||
                      y.dtype == DType::kDouble ||
                      (need_input && dx_type == DType::kDouble) || (need_target && dy_type == DType::kDouble);
    if (need_input || need_target) {
      const Tensor *first = need_input ? &dx : nullptr, *second = need_target ? &dy : nullptr;
      const auto run = wide ? compute_backward<double> : compute_backward<float>;
      run(shape, first, second, grad, denominator, x, y, mask, weight, parameters...);
    }
    return {dx, dy};
  }
};

}  // namespace safeops::cpu

#define SAFEOPS_POINTWISE_LOSS(name, ...)                    \
  STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {               \
    using Op = PointwiseLoss<__VA_ARGS__>;                   \
    m.impl("_" #name, TORCH_BOX(&Op::forward));              \
    m.impl("_" #name "_backward", TORCH_BOX(&Op::backward)); \
  }
