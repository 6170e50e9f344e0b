// The binary functions as ops: checks, outputs, the plan. The launches are in <op>.cu.
#include <tuple>

#include "cuda/engine/tensors.h"
#include "functions.h"

namespace safeops::cuda {
namespace {

Tensor binary(const BinaryLaunch& launch, const char* op, const Tensor& input, const Tensor& other,
              const std::optional<double>& eps, double fill_value, const std::optional<ScalarType>& dtype) {
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
  launch.forward(plan, wide, floor_of(eps, wide), fill_value, y, current_stream(input));
  check_launch(op);
  return out;
}

std::tuple<Tensor, Tensor> binary_backward(const BinaryLaunch& launch, const char* op, const Tensor& grad,
                                           const Tensor& input, const Tensor& other,
                                           const std::optional<double>& eps, bool need_input, bool need_other,
                                           const std::optional<ScalarType>& input_dtype,
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
  // g's dtype is the output's: elements that saturated there have gradient 0
  launch.backward(plan, wide, floor_of(eps, wide), g, need_input, need_other, current_stream(input));
  check_launch(op);
  return {out_a, out_b};
}

}  // namespace

#define SAFEOPS_BINARY(name)                                                                                      \
  extern const BinaryLaunch name##_launch;                                                                        \
  namespace {                                                                                                     \
  Tensor name(const Tensor& input, const Tensor& other, const std::optional<double>& eps, double fill_value,      \
              const std::optional<ScalarType>& dtype) {                                                           \
    return binary(name##_launch, "safeops::_" #name, input, other, eps, fill_value, dtype);                       \
  }                                                                                                               \
  std::tuple<Tensor, Tensor> name##_backward(const Tensor& grad, const Tensor& input, const Tensor& other,        \
                                             const std::optional<double>& eps, bool need_input, bool need_other,  \
                                             const std::optional<ScalarType>& input_dtype,                        \
                                             const std::optional<ScalarType>& other_dtype) {                      \
    return binary_backward(name##_launch, "safeops::_" #name "_backward", grad, input, other, eps, need_input,    \
                           need_other, input_dtype, other_dtype);                                                 \
  }                                                                                                               \
  }                                                                                                               \
  STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) {                                                                   \
    m.impl("_" #name, TORCH_BOX(&name));                                                                          \
    m.impl("_" #name "_backward", TORCH_BOX(&name##_backward));                                                   \
  }

SAFEOPS_BINARY(safe_atan2)
SAFEOPS_BINARY(safe_div)
SAFEOPS_BINARY(safe_pow)
SAFEOPS_BINARY(xlogy)

}  // namespace safeops::cuda
