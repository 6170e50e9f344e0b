// The driver of the pointwise losses. A loss is a struct of the parameters in its op's schema, constructed from them in
// order. It has the loss of an element and its derivatives as functions of (x, y) = (input, target):
//
//     template <class C> struct Huber {                    C: float or double
//       C delta;
//       explicit Huber(double delta);
//       C value(C x, C y) const;
//       C slope(C x, C y) const;                           d/dx, for a function of x - y; d/dy is -d/dx
//     };
//     SAFEOPS_POINTWISE_LOSS(huber_loss, Huber, double)
//
// A loss that is not a function of x - y has `Slopes<C> slopes(C x, C y) const`, with all derivatives, in place of
// slope(). A flag is best decided outside of the loops: a loss with flags has, in place of a constructor,
//
//     template <class Run> static auto choose(Run run, bool log_target) {
//       return log_target ? run(OfLogs<C>{}) : run(OfProbabilities<C>{});
//     }
//
// A loss with a third operand z, a tensor that defaults to 1, has value(x, y, z) and slopes(x, y, z), and is registered
// by SAFEOPS_TERNARY_LOSS.
//
// I/O, contiguous: forward reads x, y, mask; backward reads x, y, mask and writes dx, dy.
#pragma once

#include <algorithm>
#include <array>

#include "cpu/losses/pointwise_loops.h"

namespace safeops::cpu {

enum LossReduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };

template <class Void, class Loss, class... Arguments>
constexpr bool chooses = false;
template <class Loss, class... Arguments>
constexpr bool chooses<std::void_t<decltype(Loss::choose(std::declval<const Arguments&>()...))>, Loss, Arguments...> =
    true;

// Calls run(loss), where the loss has these parameters.
template <class Loss, class Run, class... Parameters>
auto with_loss(const Run& run, Parameters... parameters) {
  if constexpr (chooses<void, Loss, Run, Parameters...>)
    return Loss::choose(run, parameters...);
  else
    return run(Loss{parameters...});
}

// ---- the ops

using OptionalTensor = std::optional<Tensor>;
constexpr float kOne = 1;

// The operands of a loss, and the shape to which they broadcast.
template <int kCount>
struct LossOperands {
  std::array<View, kCount> views;
  Shape shape;

  template <class... Others>
  LossOperands(const Tensor& input, const Tensor& target, const Others&... others)
      : views{View(input), View(target), or_one(others)...}, shape(broadcast(views[0].shape(), views[1].shape())) {
    for (int i = 2; i < kCount; ++i) shape = broadcast(shape, views[i].shape());
  }

  static View or_one(const OptionalTensor& third) {
    return third ? View(*third) : View(reinterpret_cast<char*>(const_cast<float*>(&kOne)), DType::kFloat);
  }

  DType type() const {
    DType type = wide(views[0].dtype, views[0].dtype);
    for (const View& view : views) type = wide(type, view.dtype);
    return type;
  }

  bool same_type() const {
    return std::all_of(views.begin(), views.end(), [&](const View& view) { return view.dtype == views[0].dtype; });
  }

  template <class Work>
  void bind(Work& work, const OptionalTensor& mask, const OptionalTensor& weight) const {
    if (weight) work.input(View(*weight));
    for (const View& view : views) work.input(view);
    if (mask) work.mask(View(*mask));
  }
};

template <class>
using Needed = bool;
using OptionalType = std::optional<ScalarType>;
template <class>
using OptionalTypeOf = OptionalType;

template <template <class> class Loss, class Others, class... Parameters>
struct PointwiseLossOf;

template <template <class> class Loss, class... Others, class... Parameters>
struct PointwiseLossOf<Loss, std::tuple<Others...>, Parameters...> {
  using Pair = std::tuple<Tensor, Tensor>;
  static constexpr int kOperands = 2 + sizeof...(Others);
  using Operands = LossOperands<kOperands>;
  using Gradients = decltype(std::tuple_cat(Pair(), std::declval<std::tuple<typename Others::value_type...>>()));

  template <class C>
  static Pair compute(const Tensor& input, const Operands& operands, const OptionalTensor& mask,
                      const OptionalTensor& weight, const Finish& finish, int64_t reduction, DType dtype,
                      Parameters... parameters) {
    const View &x = operands.views[0], &y = operands.views[1];
    const Shape& shape = operands.shape;
    const auto run = [&](const auto& loss) {
      using F = std::decay_t<decltype(loss)>;
      const bool masked = mask.has_value(), weighted = weight.has_value();
      const LossLoop<F, C> op{loss, C(1), C(1), weighted,
                              masked || weighted ? pick_selection<C>(masked, weighted) : nullptr};
      Loop<C> loop;
      if constexpr (has_slopes<F>)
        loop = pick<&values_loop<C, F>>();
      else
        loop = pick_value<C, F>(masked, weighted);
      if (reduction == kNone) {
        Pair result{output_like(shape, dtype, input, x), empty_vector(DType::kDouble, input)};
        const View out(std::get<0>(result));
        Elementwise<C> work(shape, out);
        operands.bind(work, mask, weight);
        work.output(out);
        work.run(loop, &op);
        return result;
      }
      Pair result{empty(Shape(), dtype, input), empty(Shape(), DType::kDouble, input)};
      const bool follow_x = shape.is(x.ndim, x.sizes);
      Reduction<C> work(shape, ReducedDims(shape, nullptr, 0), follow_x ? x : y);
      operands.bind(work, mask, weight);
      StoredSum stored = nullptr;
      if constexpr (is_light<F>)
        if (!weighted && operands.same_type())
          stored = with_stored<C>(x.dtype, masked, [](auto s, auto mask_) {
            return pick<&stored_sum<C, F, decltype(s), decltype(mask_)::value>>();
          });
      work.run(loop, &op, finish, std::get<0>(result), std::get<1>(result), stored);
      return result;
    };
    return with_loss<Loss<C>>(run, parameters...);
  }

  static Pair forward(const Tensor& input, const Tensor& target, const Others&... others, const OptionalTensor& mask,
                      const OptionalTensor& weight, const OptionalTensor& denominator, int64_t reduction,
                      Parameters... parameters, bool empty_nan, const std::optional<double>& divisor) {
    const Operands operands(input, target, others...);
    const DType type = operands.type();
    Finish finish;
    finish.mean = reduction == kMean;
    finish.counted = mask || weight;
    finish.weighted = weight.has_value();
    finish.empty_nan = empty_nan;
    if (finish.mean && denominator) finish.divisor = read_scalar(View(*denominator));
    if (finish.mean && divisor) finish.divisor = *divisor;
    const auto run = type == DType::kDouble || in_double(weight) ? compute<double> : compute<float>;
    return run(input, operands, mask, weight, finish, reduction, type, parameters...);
  }

  // outputs: the gradients; null for one that is not wanted. At least one is wanted.
  template <class C>
  static void compute_backward(const Tensor* const* outputs, const Tensor& grad, const OptionalTensor& denominator,
                               const Operands& operands, const OptionalTensor& mask, const OptionalTensor& weight,
                               Parameters... parameters) {
    const GradientScale<C> c(grad, denominator);
    const Tensor* first = *std::find_if(outputs, outputs + kOperands, [](const Tensor* t) { return t; });
    Elementwise<C> work(operands.shape, View(*first));
    work.input(c.view);
    operands.bind(work, mask, weight);
    const auto run = [&](const auto& loss) {
      using F = std::decay_t<decltype(loss)>;
      const bool masked = mask.has_value(), weighted = weight.has_value();
      const C sign = outputs[0] || has_slopes<F> ? 1 : -1;
      const bool number = c.view.single();
      const LossLoop<F, C> op{loss, sign, number ? sign * static_cast<C>(read_scalar({c.view.data, c.view.dtype})) : 0,
                              weighted, pick_scale<C>(is_flat<F>, masked, weighted)};
      Loop<C> loop;
      if constexpr (has_slopes<F>) {
        for (int i = 0; i < kOperands; ++i) work.output(View(outputs[i] ? *outputs[i] : *first), outputs[i] != nullptr);
        loop = pick<&gradients_loop<C, F>>();
      } else {  // if only dy is wanted, slope_loop's first output is dy
        work.output(View(*first));
        work.output(View(outputs[1] ? *outputs[1] : *first), outputs[0] && outputs[1]);
        loop = pick_slope<C, F>(masked, weighted);
      }
      StoredLoop<C> stored = nullptr;
      if constexpr (is_light<F>)
        if (number && !weighted && operands.same_type())
          stored = with_stored<C>(operands.views[0].dtype, masked, [](auto s, auto mask_) {
            return pick<&stored_gradients<C, F, decltype(s), decltype(mask_)::value>>();
          });
      work.run(loop, &op, stored);
    };
    with_loss<Loss<C>>(run, parameters...);
  }

  static Gradients backward(const Tensor& grad, const OptionalTensor& denominator, const Tensor& input,
                            const Tensor& target, const Others&... others, const OptionalTensor& mask,
                            const OptionalTensor& weight, Parameters... parameters, bool need_input, bool need_target,
                            Needed<Others>... need_others, const OptionalType& input_dtype,
                            const OptionalType& target_dtype, const OptionalTypeOf<Others>&... other_dtypes) {
    const Operands operands(input, target, others...);
    const Tensor* like[] = {&input, &target, (others ? &*others : &input)...};
    const bool needs[] = {need_input, need_target, need_others...};
    const DType types[] = {floating(input_dtype, operands.views[0].dtype),
                           floating(target_dtype, operands.views[1].dtype),
                           floating(other_dtypes, operands.views[kOperands - 1].dtype)...};
    const auto gradient = [&](int i) {
      return needs[i] ? output_like(operands.shape, types[i], *like[i], operands.views[i])
                      : empty_vector(types[i], input);
    };
    int place = 2;
    const Gradients gradients{gradient(0), gradient(1), (static_cast<void>(others), gradient(place++))...};
    const Tensor* outputs[kOperands];
    std::apply([&](const auto&... each) { int i = 0; ((outputs[i] = needs[i] ? &each : nullptr, ++i), ...); },
               gradients);
    bool in_fp64 = in_double(weight) || dtype_of(grad) == DType::kDouble || operands.type() == DType::kDouble ||
                   leaves_fp32(grad, denominator);
    for (int i = 0; i < kOperands; ++i) in_fp64 |= needs[i] && types[i] == DType::kDouble;
    if (std::any_of(needs, needs + kOperands, [](bool need) { return need; })) {
      const auto run = in_fp64 ? compute_backward<double> : compute_backward<float>;
      run(outputs, grad, denominator, operands, mask, weight, parameters...);
    }
    return gradients;
  }
};

template <template <class> class Loss, class... Parameters>
using PointwiseLoss = PointwiseLossOf<Loss, std::tuple<>, Parameters...>;
template <template <class> class Loss, class... Parameters>
using TernaryLoss = PointwiseLossOf<Loss, std::tuple<OptionalTensor>, Parameters...>;

}  // namespace safeops::cpu

#define SAFEOPS_LOSS(name, ...)                              \
  STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {               \
    using Op = __VA_ARGS__;                                  \
    m.impl("_" #name, TORCH_BOX(&Op::forward));              \
    m.impl("_" #name "_backward", TORCH_BOX(&Op::backward)); \
  }
#define SAFEOPS_POINTWISE_LOSS(name, ...) SAFEOPS_LOSS(name, PointwiseLoss<__VA_ARGS__>)
#define SAFEOPS_TERNARY_LOSS(name, ...) SAFEOPS_LOSS(name, TernaryLoss<__VA_ARGS__>)
