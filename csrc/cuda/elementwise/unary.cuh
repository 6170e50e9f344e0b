// The skeleton of the unary functions f(x). An op defines stand_in, and two functions of the compute type C:
//
//   struct SafeLog : Plain {
//     static double stand_in(double eps, double fill_value);          // on the host: the value where f has none
//     template <class C> static __device__ C value(const Range<C>& range, C x);
//     template <class C> static __device__ C slope(const Range<C>& range, C g, C x);  // g f'(x), exactly 0 if flat
//     static __device__ float value(const Half& range, float x);  // optional: a shorter form for halves
//   };
//   SAFEOPS_UNARY(safe_log, SafeLog)                                // and a line in unary.cpp
//
// I/O: read x, write y (bf16: 4 bytes); backward reads g, x and writes dx (bf16: 6 bytes).
#pragma once

#include "floating.cuh"
#include "functions.h"
#include "half.cuh"

namespace safeops::cuda {

// Returns log(1 + x) for a finite x > -1. With u = 1 + x rounded, it is log(u) + e / u, where e is the rounding error.
template <class C>
__device__ C log_of_1_plus(C x) {
  const C u = C(1) + x;
  return log(u) + (x - (u - C(1))) / u;
}

template <class Function, class R>
struct Unary : Functor<Function, R, 1, 1> {
  using Value = typename R::Value;
  __device__ void operator()(const Value* in, bool, Value* out) const {
    out[0] = Function::value(this->range, in[0]);
  }
};

template <class Function, class R>
struct UnaryBackward : Functor<Function, R, 1, 2> {
  using Value = typename R::Value;
  __device__ void operator()(const Value* in, bool, Value* out) const {
    out[0] = Function::slope(this->range, in[0], in[1]);
  }
};

template <class Function>
void launch_unary(Plan<2>& plan, bool wide, double eps, double fill_value, Type out, cudaStream_t stream) {
  const auto make = [](const auto& range) { return Unary<Function, std::decay_t<decltype(range)>>{{range}}; };
  launch_floating(plan, wide, make, stream, eps, out, Function::stand_in(eps, fill_value));
}

template <class Function>
void launch_unary_backward(Plan<3>& plan, bool wide, double eps, Type out, cudaStream_t stream) {
  const auto make = [](const auto& range) { return UnaryBackward<Function, std::decay_t<decltype(range)>>{{range}}; };
  launch_floating(plan, wide, make, stream, eps, out);
}

}  // namespace safeops::cuda

#define SAFEOPS_UNARY(name, Function)     \
  extern const UnaryLaunch name##_launch; \
  const UnaryLaunch name##_launch = {launch_unary<Function>, launch_unary_backward<Function>};
