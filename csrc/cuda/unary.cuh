// The skeleton of the unary functions. An op brings two functions of the compute type C:
//
//   struct SafeLog {
//     static constexpr bool kRolled = false;                          // elementwise.cuh
//     static double stand_in(double eps, double fill_value);          // on the host: the value where there is none
//     template <class C> static __device__ C value(const Range<C>& range, C x);
//     template <class C> static __device__ C slope(const Range<C>& range, C g, C x);  // g f'(x), exactly 0 if flat
//   };
//   SAFEOPS_UNARY(safe_log, SafeLog)
//
// I/O: read x, write y (bf16: 4 bytes); backward reads g, x and writes dx (bf16: 6 bytes).
#pragma once

#include "floating.cuh"

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
void launch_unary(Plan<2>& plan, bool wide, double eps, double stand_in, Type out, cudaStream_t stream) {
  launch_floating(plan, wide, Unary<Function, float>{make_range<float>(eps, out, stand_in)},
                  Unary<Function, double>{make_range<double>(eps, out, stand_in)}, stream);
}

template <class Function>
void launch_unary_backward(Plan<3>& plan, bool wide, double eps, Type out, cudaStream_t stream) {
  launch_floating(plan, wide, UnaryBackward<Function, float>{make_range<float>(eps, out, 0)},
                  UnaryBackward<Function, double>{make_range<double>(eps, out, 0)}, stream);
}

}  // namespace safeops::cuda

#define SAFEOPS_UNARY(name, Function)                                                              \
  template void launch_unary<Function>(Plan<2>&, bool, double, double, Type, cudaStream_t);        \
  template void launch_unary_backward<Function>(Plan<3>&, bool, double, Type, cudaStream_t);       \
  SAFEOPS_UNARY_ON_HOST(name, Function)

#ifdef __CUDA_ARCH__  // a file is parsed once per architecture: torch's headers in the host's pass alone
#define SAFEOPS_UNARY_ON_HOST(name, Function)
#else

#include "tensors.h"

namespace safeops::cuda {

// A floor of 0 still holds 0 itself.
inline double unary_floor(const std::optional<double>& eps, bool wide) {
  const double least = wide ? std::numeric_limits<double>::denorm_min() : std::numeric_limits<float>::denorm_min();
  return std::fmax(floor_of(eps.has_value(), eps.value_or(0), wide), least);
}

template <class Function>
Tensor unary(const char* op, const Tensor& input, const std::optional<double>& eps, double fill_value,
             const std::optional<ScalarType>& dtype) {
  const Type x = float_type(input, op, "input"), y = dtype ? float_type(*dtype) : x;
  const bool wide = x == kF64 || y == kF64;
  const Shape shape = View(input).shape();
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Tensor out = output_like(input, shape, y);
  auto plan = make_plan<2>(shape, {operand(out, y), operand(input, x)});
  if (plan.numel == 0) return out;
  const double floor = unary_floor(eps, wide);
  launch_unary<Function>(plan, wide, floor, Function::stand_in(floor, fill_value), y, current_stream(input));
  check_launch(op);
  return out;
}

template <class Function>
Tensor unary_backward(const char* op, const Tensor& grad, const Tensor& input, const std::optional<double>& eps) {
  const Type g = float_type(grad, op, "grad"), x = float_type(input, op, "input");
  check_device(grad, input, op, "grad");
  const bool wide = g == kF64 || x == kF64;
  const Shape shape = View(input).shape();
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Tensor out = output_like(input, shape, x);
  auto plan = make_plan<3>(shape, {operand(out, x), operand(grad, g), operand(input, x)});
  if (plan.numel == 0) return out;
  // g's dtype is the output's: what saturated there has no gradient
  launch_unary_backward<Function>(plan, wide, unary_floor(eps, wide), g, current_stream(input));
  check_launch(op);
  return out;
}

}  // namespace safeops::cuda

#define SAFEOPS_UNARY_ON_HOST(name, Function)                                                                    \
  namespace {                                                                                                    \
  Tensor name(const Tensor& input, const std::optional<double>& eps, double fill_value,                          \
              const std::optional<ScalarType>& dtype) {                                                          \
    return unary<Function>("safeops::_" #name, input, eps, fill_value, dtype);                                   \
  }                                                                                                              \
  Tensor name##_backward(const Tensor& grad, const Tensor& input, const std::optional<double>& eps) {            \
    return unary_backward<Function>("safeops::_" #name "_backward", grad, input, eps);                           \
  }                                                                                                              \
  }                                                                                                              \
  STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) {                                                                  \
    m.impl("_" #name, TORCH_BOX(&name));                                                                         \
    m.impl("_" #name "_backward", TORCH_BOX(&name##_backward));                                                  \
  }
#endif
