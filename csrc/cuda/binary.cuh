// The skeleton of the binary functions. An op brings two functions of the compute type C:
//
//   struct Xlogy {
//     static constexpr bool kRolled = false;     // elementwise.cuh
//     static constexpr bool kFixedRows = false;  // floating.cuh
//     template <class C> static __device__ C value(const Range<C>& range, C a, C b);
//     template <class C>  // da = g df/da, db = g df/db, exactly 0 where f is flat
//     static __device__ void slopes(const Range<C>& range, C g, C a, C b, C& da, C& db);
//   };
//   SAFEOPS_BINARY(xlogy, Xlogy)
//
// I/O: read a, read b, write out (bf16: 6 bytes); backward reads g, a, b and writes da, db (bf16: 10 bytes).
#pragma once

#include "floating.cuh"

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

#define SAFEOPS_BINARY(name, Function)                                                                        \
  template void launch_binary<Function>(Plan<3>&, bool, double, double, Type, cudaStream_t);                  \
  template void launch_binary_backward<Function>(Plan<5>&, bool, double, Type, bool, bool, cudaStream_t);     \
  SAFEOPS_BINARY_ON_HOST(name, Function)

#ifdef __CUDA_ARCH__  // a file is parsed once per architecture: torch's headers in the host's pass alone
#define SAFEOPS_BINARY_ON_HOST(name, Function)
#else

#include <tuple>

#include "tensors.h"

namespace safeops::cuda {

template <class Function>
Tensor binary(const char* op, const Tensor& input, const Tensor& other, const std::optional<double>& eps,
              double fill_value, const std::optional<ScalarType>& dtype) {
  const Type a = float_type(input, op, "input"), b = float_type(other, op, "other"),
             y = dtype ? float_type(*dtype) : a;
  STD_TORCH_CHECK(dtype || a == b, op, ": dtype is needed where the operands' dtypes differ");
  check_device(other, input, op, "other");
  const Shape shape = broadcast(View(input).shape(), View(other).shape());
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Tensor out = output_like(input, shape, y);
  auto plan = make_plan<3>(shape, {operand(out, y), operand(input, a), operand(other, b)});
  if (plan.numel == 0) return out;
  const bool wide = a == kF64 || b == kF64 || y == kF64;
  launch_binary<Function>(plan, wide, floor_of(eps.has_value(), eps.value_or(0), wide), fill_value, y,
                          current_stream(input));
  check_launch(op);
  return out;
}

template <class Function>
std::tuple<Tensor, Tensor> binary_backward(const char* op, const Tensor& grad, const Tensor& input,
                                           const Tensor& other, const std::optional<double>& eps, bool need_input,
                                           bool need_other, const std::optional<ScalarType>& input_dtype,
                                           const std::optional<ScalarType>& other_dtype) {
  const Type g = float_type(grad, op, "grad"), a = float_type(input, op, "input"),
             b = float_type(other, op, "other"), da = input_dtype ? float_type(*input_dtype) : a,
             db = other_dtype ? float_type(*other_dtype) : b;
  check_device(grad, input, op, "grad");
  check_device(other, input, op, "other");
  const Shape shape = broadcast(View(input).shape(), View(other).shape());
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Tensor out_a = need_input ? output_like(input, shape, da) : empty_vector(DType(da), input);
  const Tensor out_b = need_other ? output_like(other, shape, db) : empty_vector(DType(db), input);
  auto plan = make_plan<5>(shape, {need_input ? operand(out_a, da) : no_operand(da),
                                   need_other ? operand(out_b, db) : no_operand(db), operand(grad, g),
                                   operand(input, a), operand(other, b)});
  if (plan.numel == 0 || !(need_input || need_other)) return {out_a, out_b};
  const bool wide = g == kF64 || a == kF64 || b == kF64 || (need_input && da == kF64) ||
                    (need_other && db == kF64);
  // g's dtype is the output's: what saturated there has no gradient
  launch_binary_backward<Function>(plan, wide, floor_of(eps.has_value(), eps.value_or(0), wide), g, need_input,
                                   need_other, current_stream(input));
  check_launch(op);
  return {out_a, out_b};
}

}  // namespace safeops::cuda

#define SAFEOPS_BINARY_ON_HOST(name, Function)                                                                   \
  namespace {                                                                                                    \
  Tensor name(const Tensor& input, const Tensor& other, const std::optional<double>& eps, double fill_value,     \
              const std::optional<ScalarType>& dtype) {                                                          \
    return binary<Function>("safeops::_" #name, input, other, eps, fill_value, dtype);                           \
  }                                                                                                              \
  std::tuple<Tensor, Tensor> name##_backward(const Tensor& grad, const Tensor& input, const Tensor& other,       \
                                             const std::optional<double>& eps, bool need_input, bool need_other, \
                                             const std::optional<ScalarType>& input_dtype,                       \
                                             const std::optional<ScalarType>& other_dtype) {                     \
    return binary_backward<Function>("safeops::_" #name "_backward", grad, input, other, eps, need_input,        \
                                     need_other, input_dtype, other_dtype);                                      \
  }                                                                                                              \
  }                                                                                                              \
  STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) {                                                                  \
    m.impl("_" #name, TORCH_BOX(&name));                                                                         \
    m.impl("_" #name "_backward", TORCH_BOX(&name##_backward));                                                  \
  }
#endif
