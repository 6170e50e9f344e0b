// The skeleton of the unary functions. An op brings two functions of the compute type C:
//
//   struct SafeLog {
//     static constexpr bool kRolled = false;                          // elementwise.cuh
//     static double stand_in(double eps, double fill_value);          // on the host: the value where there is none
//     template <class C> static __device__ C value(const Range<C>& range, C x);
//     template <class C> static __device__ C slope(const Range<C>& range, C g, C x);  // g f'(x), exactly 0 if flat
//   };
//   SAFEOPS_UNARY(safe_log, SafeLog)                                // and a line in unary.cpp
//
// I/O: read x, write y (bf16: 4 bytes); backward reads g, x and writes dx (bf16: 6 bytes).
#pragma once

#include "floating.cuh"
#include "functions.h"

namespace safeops::cuda {

template <class Function, class C>
struct Unary {
  using Value = C;
  static constexpr int kOut = 1, kIn = 1;
  static constexpr bool kMask = false, kRolled = Function::kRolled, kFixedRows = false;
  Range<C> range;

  __device__ void prepare() {}
  __device__ void operator()(const C* in, bool, C* out) const { out[0] = Function::value(range, in[0]); }
};

template <class Function, class C>
struct UnaryBackward {
  using Value = C;
  static constexpr int kOut = 1, kIn = 2;
  static constexpr bool kMask = false, kRolled = Function::kRolled, kFixedRows = false;
  Range<C> range;

  __device__ void prepare() {}
  __device__ void operator()(const C* in, bool, C* out) const { out[0] = Function::slope(range, in[0], in[1]); }
};

template <class Function>
void launch_unary(Plan<2>& plan, bool wide, double eps, double fill_value, Type out, cudaStream_t stream) {
  const double stand_in = Function::stand_in(eps, fill_value);
  launch_floating(plan, wide, Unary<Function, float>{make_range<float>(eps, out, stand_in)},
                  Unary<Function, double>{make_range<double>(eps, out, stand_in)}, stream);
}

template <class Function>
void launch_unary_backward(Plan<3>& plan, bool wide, double eps, Type out, cudaStream_t stream) {
  launch_floating(plan, wide, UnaryBackward<Function, float>{make_range<float>(eps, out, 0)},
                  UnaryBackward<Function, double>{make_range<double>(eps, out, 0)}, stream);
}

}  // namespace safeops::cuda

#define SAFEOPS_UNARY(name, Function)     \
  extern const UnaryLaunch name##_launch; \
  const UnaryLaunch name##_launch = {launch_unary<Function>, launch_unary_backward<Function>};
