// The driver of the unary functions. A function is a struct
//
//     template <class C> struct SafeSqrt {
//       static constexpr double most = 1.9e19;       // upper bound of |value|: decides whether loops must saturate
//       explicit SafeSqrt(const Arguments& arguments);
//       bool absent(C x) const;                      // there is no value or no slope at x (false for a NaN) ...
//       C stand_in(C x, C y) const;                  // ... so the output is this (y = value(x)), and the slope is 0
//       C value(C x) const;
//       C slope(C g, C x, C y) const;                // g times the derivative
//     };
//     SAFEOPS_UNARY(safe_sqrt, SafeSqrt)
//
// value and slope are computed for every element and selected afterwards: a branch would stop the vectorisation.
// I/O: forward reads x and writes y; backward reads g, x and writes dx.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "cpu/engine/elementwise.h"

namespace safeops::cpu {

// The arguments of the op. eps: the floor; fill: the fill value, saturated in the output's dtype; out: the output's
// dtype.
struct Arguments {
  double eps, fill;
  DType out;

  Arguments(const std::optional<double>& eps_, double fill_, DType out_, bool in_double)
      : eps(floor_of(eps_, in_double)), fill(saturate(fill_, out_)), out(out_) {}

  // Returns eps, raised to at least the smallest positive number, so that |0| is always below it.
  template <class C>
  C positive_eps() const {
    return std::max(static_cast<C>(eps), std::numeric_limits<C>::denorm_min());
  }
};

// Saturation in the output dtype: the value of a finite x that does not fit becomes the largest number, and its slope
// 0.
template <class C>
struct Saturation {
  C largest, overflow;  // |value| >= overflow would round to inf in the output dtype

  explicit Saturation(DType out)
      : largest(static_cast<C>(safeops::largest(out))), overflow(static_cast<C>(overflow_from(out))) {}

  C value(C y, C x) const {
    const C shown = select(std::fabs(y) >= overflow, std::copysign(largest, y), y);
    return select(std::fabs(x) < std::numeric_limits<C>::infinity(), shown, y);
  }

  C slope(C dx, C y, C x) const {
    const C inside = select_or_zero(!(std::fabs(y) >= overflow), dx);
    return select(std::fabs(x) < std::numeric_limits<C>::infinity(), inside, dx);
  }
};

template <template <class> class Function>
struct Unary {
  template <class C>
  struct Op {
    Function<C> function;
    Saturation<C> saturation;

    explicit Op(const Arguments& arguments) : function(arguments), saturation(arguments.out) {}
  };

  template <class C, bool kSaturates>
  static void value_loop(const void* op, const Chunk<C>& chunk) {
    const Op<C> f = *static_cast<const Op<C>*>(op);
    const C* in = chunk.in[0];
    C* out = chunk.out[0];
    SAFEOPS_SIMD
    for (int64_t i = 0; i < chunk.n; ++i) {
      const C x = in[i];
      C y = f.function.value(x);
      if constexpr (kSaturates) y = f.saturation.value(y, x);
      out[i] = select(f.function.absent(x), f.function.stand_in(x, y), y);
    }
  }

  template <class C, bool kSaturates>
  static void slope_loop(const void* op, const Chunk<C>& chunk) {
    const Op<C> f = *static_cast<const Op<C>*>(op);
    const C *upstream = chunk.in[0], *in = chunk.in[1];
    C* out = chunk.out[0];
    SAFEOPS_SIMD
    for (int64_t i = 0; i < chunk.n; ++i) {
      const C g = upstream[i], x = in[i], y = f.function.value(x);
      C dx = f.function.slope(g, x, y);
      if constexpr (kSaturates) dx = f.saturation.slope(dx, y, x);
      out[i] = select_or_zero(!f.function.absent(x), dx);
    }
  }

  // Returns loop(true) if a value may overflow the output dtype, so that the loop must saturate; else loop(false).
  template <class C, class Pick>
  static Loop<C> loop_for(DType out, const Pick& loop) {
    constexpr double most = Function<C>::most, half_overflow = 65520;
    if constexpr (most < half_overflow)
      return loop(std::false_type());
    else if constexpr (most == std::numeric_limits<double>::infinity())
      return loop(std::true_type());
    else
      return most < overflow_from(out) ? loop(std::false_type()) : loop(std::true_type());
  }

  template <class C>
  static void run(const View& out, const View& x, const Arguments& arguments) {
    const Op<C> op(arguments);
    Elementwise<C> loop(x.shape(), out);
    loop.input(x);
    loop.output(out);
    loop.run(loop_for<C>(arguments.out, [](auto saturates) { return pick<&value_loop<C, saturates>>(); }), &op);
  }

  static Tensor forward(const Tensor& input, const std::optional<double>& eps, double fill_value,
                        const std::optional<ScalarType>& dtype) {
    const View x(input);
    STD_TORCH_CHECK(x.is_floating(), "safeops: input must be floating point");
    const DType type = floating(dtype, x.dtype);
    const Tensor result = output_like(x.shape(), type, input, x);
    const bool in_double = x.dtype == DType::kDouble || type == DType::kDouble;
    const auto call = in_double ? run<double> : run<float>;
    call(View(result), x, Arguments(eps, fill_value, type, in_double));
    return result;
  }

  template <class C>
  static void run_backward(const View& dx, const View& g, const View& x, const Arguments& arguments) {
    const Op<C> op(arguments);
    Elementwise<C> loop(x.shape(), dx);
    loop.input(g);
    loop.input(x);
    loop.output(dx);
    loop.run(loop_for<C>(arguments.out, [](auto saturates) { return pick<&slope_loop<C, saturates>>(); }), &op);
  }

  // grad has the output's dtype: elements whose value saturates in this dtype have slope 0.
  static Tensor backward(const Tensor& grad, const Tensor& input, const std::optional<double>& eps) {
    const View g(grad), x(input);
    STD_TORCH_CHECK(g.is_floating() && x.is_floating(), "safeops: grad and input must be floating point");
    const Tensor result = output_like(x.shape(), x.dtype, input, x);
    const bool in_double = x.dtype == DType::kDouble || g.dtype == DType::kDouble;
    const auto call = in_double ? run_backward<double> : run_backward<float>;
    call(View(result), g, x, Arguments(eps, 0.0, g.dtype, in_double));
    return result;
  }
};

}  // namespace safeops::cpu

#define SAFEOPS_UNARY(name, Function)                                    \
  STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {                           \
    m.impl("_" #name, TORCH_BOX(&Unary<Function>::forward));             \
    m.impl("_" #name "_backward", TORCH_BOX(&Unary<Function>::backward)); \
  }
