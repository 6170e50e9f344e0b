// The driver of the pointwise losses. A loss is a struct of the schema's parameters, whose types follow its name, with
// the loss of an element and its derivatives as functions of (x, y) = (input, target):
//
//     template <class C> struct Huber {                    C: float or double
//       C delta;
//       explicit Huber(double delta);
//       C value(C x, C y) const;
//       C slope(C x, C y) const;                           by x, of a function of x - y: by y it is the opposite
//     };
//     SAFEOPS_POINTWISE_LOSS(huber_loss, Huber, double)
//
// Any other function gives both derivatives, `Slopes<C> slopes(C x, C y) const` in place of slope().
// I/O, contiguous: forward reads x, y, mask; backward reads x, y, mask and writes dx, dy.
#pragma once

#include "cpu/engine/weighted_sum.h"

namespace safeops::cpu {

enum LossReduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };

// ---- the loops of the gradients.  in: c = grad / denominator, [weight], x, y;  out: dx, dy, null where not wanted

template <class F, class = void>
constexpr bool has_two_slopes = false;
template <class F>
constexpr bool has_two_slopes<F, std::void_t<decltype(&F::slopes)>> = true;

template <class F, class C>
struct SignedLoss {
  F loss;
  C sign;  // -1 where the first output is dy = -dx
};

// dx = c w slope(x, y), and dy = -dx where both are wanted
template <class C, class F, bool kMask, bool kWeight>
void slope_loop(const void* op, const Chunk<C>& chunk) {
  const SignedLoss<F, C> f = *static_cast<const SignedLoss<F, C>*>(op);
  const C *c = chunk.in[0], *w = chunk.in[1], *x = chunk.in[1 + kWeight], *y = chunk.in[2 + kWeight];
  const uint8_t* mask = chunk.mask;
  C *dx = chunk.out[0], *dy = chunk.out[1];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) {
    C scale = f.sign * c[i];
    if constexpr (kWeight) scale *= w[i];
    const C slope = scale * f.loss.slope(x[i], y[i]);
    dx[i] = select_or_zero(is_kept<C, kMask, kWeight>(mask, w, i), slope);
  }
  if (!dy) return;
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) dy[i] = 0 - dx[i];  // +0 stays +0
}

// dx = c w slopes.first, dy = c w slopes.second
template <class C, class F, bool kMask, bool kWeight, bool kInput, bool kTarget>
void slopes_loop(const void* op, const Chunk<C>& chunk) {
  const F f = static_cast<const SignedLoss<F, C>*>(op)->loss;
  const C *c = chunk.in[0], *w = chunk.in[1], *x = chunk.in[1 + kWeight], *y = chunk.in[2 + kWeight];
  const uint8_t* mask = chunk.mask;
  C *dx = chunk.out[0], *dy = chunk.out[1];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) {
    const bool keep = is_kept<C, kMask, kWeight>(mask, w, i);
    const Slopes<C> slopes = f.slopes(x[i], y[i]);  // inlined: what one of them alone needs is computed for it alone
    C scale = c[i];
    if constexpr (kWeight) scale *= w[i];
    if constexpr (kInput) dx[i] = select_or_zero(keep, scale * slopes.first);
    if constexpr (kTarget) dy[i] = select_or_zero(keep, scale * slopes.second);
  }
}

template <class C, class F, bool kMask, bool kWeight>
Loop<C> pick_gradient(bool input, bool target) {
  if constexpr (has_two_slopes<F>)
    return input && target ? pick<&slopes_loop<C, F, kMask, kWeight, true, true>>()
           : input         ? pick<&slopes_loop<C, F, kMask, kWeight, true, false>>()
                           : pick<&slopes_loop<C, F, kMask, kWeight, false, true>>();
  else
    return pick<&slope_loop<C, F, kMask, kWeight>>();
}

template <class C, class F>
Loop<C> pick_gradient(bool mask, bool weight, bool input, bool target) {
  if (mask)
    return weight ? pick_gradient<C, F, true, true>(input, target) : pick_gradient<C, F, true, false>(input, target);
  return weight ? pick_gradient<C, F, false, true>(input, target) : pick_gradient<C, F, false, false>(input, target);
}

// ---- the ops

template <template <class> class Loss, class... Parameters>
struct PointwiseLoss {
  using OptionalTensor = std::optional<Tensor>;
  using Pair = std::tuple<Tensor, Tensor>;

  template <class C>
  static Pair compute(const Tensor& input, const View& x, const View& y, const OptionalTensor& mask,
                      const OptionalTensor& weight, const Finish& finish, int64_t reduction, DType dtype,
                      Parameters... parameters) {
    const Loss<C> loss{parameters...};
    const Shape shape = broadcast(x.shape(), y.shape());
    const Loop<C> loop = pick_value<C, Loss<C>>(mask.has_value(), weight.has_value());
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
      work.run(loop, &loss);
      return result;
    }
    Pair result{empty(Shape(), dtype, input), empty(Shape(), DType::kDouble, input)};
    const bool follow_x = shape.is(x.ndim, x.sizes);
    Reduction<C> work(shape, ReducedDims(shape, nullptr, 0), follow_x ? x : y);
    bind(work);
    work.run(loop, &loss, finish, std::get<0>(result), std::get<1>(result));
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

  // dx or dy is null where it is not wanted, not both.
  template <class C>
  static void compute_backward(const Shape& shape, const Tensor* dx, const Tensor* dy, const Tensor& grad,
                               const OptionalTensor& denominator, const View& x, const View& y,
                               const OptionalTensor& mask, const OptionalTensor& weight,
                               Parameters... parameters) {
    using F = Loss<C>;
    const SignedLoss<F, C> op{F{parameters...}, static_cast<C>(dx ? 1 : -1)};
    const GradientScale<C> c(grad, denominator);
    const View first(dx ? *dx : *dy), second(dy ? *dy : *dx);
    Elementwise<C> work(shape, first);
    work.input(c.view);
    if (weight) work.input(View(*weight));
    work.input(x);
    work.input(y);
    if (mask) work.mask(View(*mask));
    if constexpr (has_two_slopes<F>) {
      work.output(first, dx != nullptr);
      work.output(second, dy != nullptr);
    } else {  // slope_loop's first output is dy where that alone is wanted
      work.output(first);
      work.output(second, dx && dy);
    }
    work.run(pick_gradient<C, F>(mask.has_value(), weight.has_value(), dx, dy), &op);
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
