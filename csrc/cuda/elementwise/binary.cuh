// The skeleton of the binary functions f(a, b). An op defines two functions of the compute type C:
//
//   struct Xlogy : Plain {
//     template <class C> static __device__ C value(const Range<C>& range, C a, C b);
//     template <class C>  // da = g df/da, db = g df/db, exactly 0 where f is flat
//     static __device__ void slopes(const Range<C>& range, C g, C a, C b, C& da, C& db);
//     static __device__ float value(const Half& range, float a, float b);  // optional: a shorter form for halves
//   };
//   SAFEOPS_BINARY(xlogy, Xlogy)               // and a line in binary.cpp
//
// I/O: read a, read b, write out (bf16: 6 bytes); backward reads g, a, b and writes da, db (bf16: 10 bytes). If b is a
// number, it is a parameter of the kernel: 4 and 6 bytes.
#pragma once

#include "floating.cuh"
#include "functions.h"
#include "half.cuh"

namespace safeops::cuda {

template <class Function, class R>
struct Binary : Functor<Function, R, 1, 2> {
  using Value = typename R::Value;
  __device__ void operator()(const Value* in, bool, Value* out) const {
    out[0] = Function::value(this->range, in[0], in[1]);
  }
};

template <class Function, class R>
struct BinaryBackward : Functor<Function, R, 2, 3> {
  using Value = typename R::Value;
  __device__ void operator()(const Value* in, bool, Value* out) const {
    Function::slopes(this->range, in[0], in[1], in[2], out[0], out[1]);
  }
};

template <class Function, class R>
struct ByNumber : Functor<Function, R, 1, 1> {
  using Value = typename R::Value;
  Value other;
  __device__ void operator()(const Value* in, bool, Value* out) const {
    out[0] = Function::value(this->range, in[0], other);
  }
};

template <class Function, class R>
struct ByNumberBackward : Functor<Function, R, 1, 2> {
  using Value = typename R::Value;
  Value other;
  __device__ void operator()(const Value* in, bool, Value* out) const {
    Value unused;
    Function::slopes(this->range, in[0], in[1], other, out[0], unused);
  }
};

template <class Function>
void launch_binary(Plan<3>& plan, bool wide, double eps, double fill, Type out, cudaStream_t stream) {
  const auto make = [](const auto& range) { return Binary<Function, std::decay_t<decltype(range)>>{{range}}; };
  launch_floating(plan, wide, make, stream, eps, out, fill);
}

template <class Function>
void launch_binary_backward(Plan<5>& plan, bool wide, double eps, Type out, bool need_input, bool need_other,
                            cudaStream_t stream) {
  const auto make = [](const auto& range) { return BinaryBackward<Function, std::decay_t<decltype(range)>>{{range}}; };
  launch_floating(plan, wide, make, stream, eps, out, 0.0, need_input, need_other);
}

template <class Function>
void launch_number(Plan<2>& plan, bool wide, double number, double eps, double fill, Type out, cudaStream_t stream) {
  const auto make = [&](const auto& range) {
    using R = std::decay_t<decltype(range)>;
    return ByNumber<Function, R>{{range}, typename R::Value(number)};
  };
  launch_floating(plan, wide, make, stream, eps, out, fill);
}

template <class Function>
void launch_number_backward(Plan<3>& plan, bool wide, double number, double eps, Type out, cudaStream_t stream) {
  const auto make = [&](const auto& range) {
    using R = std::decay_t<decltype(range)>;
    return ByNumberBackward<Function, R>{{range}, typename R::Value(number)};
  };
  launch_floating(plan, wide, make, stream, eps, out, 0.0, true, false);
}

}  // namespace safeops::cuda

#define SAFEOPS_BINARY(name, Function)                                                             \
  extern const BinaryLaunch name##_launch;                                                         \
  const BinaryLaunch name##_launch = {launch_binary<Function>, launch_binary_backward<Function>,   \
                                      launch_number<Function>, launch_number_backward<Function>};
