// The skeleton of the binary functions. An op brings two functions of the compute type C:
//
//   struct Xlogy {
//     static constexpr bool kRolled = false;     // elementwise.cuh
//     static constexpr bool kFixedRows = false;  // floating.cuh
//     template <class C> static __device__ C value(const Range<C>& range, C a, C b);
//     template <class C>  // da = g df/da, db = g df/db, exactly 0 where f is flat
//     static __device__ void slopes(const Range<C>& range, C g, C a, C b, C& da, C& db);
//   };
//   SAFEOPS_BINARY(xlogy, Xlogy)               // and a line in binary.cpp
//
// I/O: read a, read b, write out (bf16: 6 bytes); backward reads g, a, b and writes da, db (bf16: 10 bytes).
#pragma once

#include "floating.cuh"
#include "functions.h"

namespace safeops::cuda {

template <class Function, class C>
struct Binary {
  using Value = C;
  static constexpr int kOut = 1, kIn = 2;
  static constexpr bool kMask = false, kRolled = Function::kRolled, kFixedRows = Function::kFixedRows;
  Range<C> range;

  __device__ void prepare() {}
  __device__ void operator()(const C* in, bool, C* out) const { out[0] = Function::value(range, in[0], in[1]); }
};

template <class Function, class C>
struct BinaryBackward {
  using Value = C;
  static constexpr int kOut = 2, kIn = 3;
  static constexpr bool kMask = false, kRolled = Function::kRolled, kFixedRows = Function::kFixedRows;
  Range<C> range;

  __device__ void prepare() {}
  __device__ void operator()(const C* in, bool, C* out) const {
    Function::slopes(range, in[0], in[1], in[2], out[0], out[1]);
  }
};

template <class Function>
void launch_binary(Plan<3>& plan, bool wide, double eps, double fill, Type out, cudaStream_t stream) {
  launch_floating(plan, wide, Binary<Function, float>{make_range<float>(eps, out, fill)},
                  Binary<Function, double>{make_range<double>(eps, out, fill)}, stream);
}

template <class Function>
void launch_binary_backward(Plan<5>& plan, bool wide, double eps, Type out, bool need_input, bool need_other,
                            cudaStream_t stream) {
  launch_floating(
      plan, wide, BinaryBackward<Function, float>{make_range<float>(eps, out, 0, need_input, need_other)},
      BinaryBackward<Function, double>{make_range<double>(eps, out, 0, need_input, need_other)}, stream);
}

}  // namespace safeops::cuda

#define SAFEOPS_BINARY(name, Function)     \
  extern const BinaryLaunch name##_launch; \
  const BinaryLaunch name##_launch = {launch_binary<Function>, launch_binary_backward<Function>};
