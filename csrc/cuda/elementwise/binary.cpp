// Registers the binary functions as ops: checks operands, allocates outputs, makes the plan, and calls the launch that
// <op>.cu defines.
#include <tuple>

#include "cuda/engine/tensors.h"
#include "functions.h"

namespace safeops::cuda {
namespace {

template <class Plan, class Launch, class... Arguments>
void run(const char* op, const Tensor& input, Plan plan, const Launch& launch, const Arguments&... arguments) {
  if (plan.numel == 0) return;
  launch(plan, arguments..., current_stream(input));
  check_launch(op);
}

Tensor binary(const BinaryLaunch& launch, const char* op, const Tensor& input, const std::optional<Tensor>& other,
              const std::optional<double>& eps, double fill_value, const std::optional<ScalarType>& dtype,
              const std::optional<double>& number) {
  const Type a = float_type(input, op, "input"), b = other ? float_type(*other, op, "other") : a,
             y = dtype ? float_type(*dtype) : a;
  STD_TORCH_CHECK(dtype || a == b, op, ": dtype is needed where the operands' dtypes differ");
  STD_TORCH_CHECK(other.has_value() != number.has_value(), op, ": either other or number is needed");
  if (other) check_device(*other, input, op, "other");
  const Shape shape = other ? broadcast(View(input).shape(), View(*other).shape()) : View(input).shape();
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Tensor out = output_like(input, shape, y);
  const bool wide = a == kF64 || b == kF64 || y == kF64;
  const double floor = floor_of(eps, wide);
  const Operand to = operand(out, y), from = operand(input, a);
  if (other) run(op, input, make_plan<3>(shape, {to, from, operand(*other, b)}), launch.forward, wide, floor,
                 fill_value, y);
  else run(op, input, make_plan<2>(shape, {to, from}), launch.forward_number, wide, *number, floor, fill_value, y);
  return out;
}

std::tuple<Tensor, Tensor> binary_backward(const BinaryLaunch& launch, const char* op, const Tensor& grad,
                                           const Tensor& input, const std::optional<Tensor>& other,
                                           const std::optional<double>& eps, bool need_input, bool need_other,
                                           const std::optional<ScalarType>& input_dtype,
                                           const std::optional<ScalarType>& other_dtype,
                                           const std::optional<double>& number) {
  STD_TORCH_CHECK(other.has_value() != number.has_value(), op, ": either other or number is needed");
  need_other = need_other && other;
  const Type g = float_type(grad, op, "grad"), a = float_type(input, op, "input"),
             b = other ? float_type(*other, op, "other") : a, da = input_dtype ? float_type(*input_dtype) : a,
             db = other_dtype ? float_type(*other_dtype) : b;
  check_device(grad, input, op, "grad");
  if (other) check_device(*other, input, op, "other");
  const Shape shape = other ? broadcast(View(input).shape(), View(*other).shape()) : View(input).shape();
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Tensor out_a = need_input ? output_like(input, shape, da) : empty_vector(DType(da), input);
  const Tensor out_b = need_other ? output_like(*other, shape, db) : empty_vector(DType(db), input);
  if (!(need_input || need_other)) return {out_a, out_b};
  const bool wide = g == kF64 || a == kF64 || b == kF64 || (need_input && da == kF64) ||
                    (need_other && db == kF64);
  const double floor = floor_of(eps, wide);
  const Operand first = need_input ? operand(out_a, da) : no_operand(da), upstream = operand(grad, g),
                from = operand(input, a);
  // g, the dtype of grad, is that of the forward's output: an element that saturated in it has gradient 0.
  if (other)
    run(op, input, make_plan<5>(shape, {first, need_other ? operand(out_b, db) : no_operand(db), upstream, from,
                             operand(*other, b)}),
        launch.backward, wide, floor, g, need_input, need_other);
  else
    run(op, input, make_plan<3>(shape, {first, upstream, from}), launch.backward_number, wide, *number, floor, g);
  return {out_a, out_b};
}

}  // namespace

#define SAFEOPS_BINARY(name)                                                                                          \
  extern const BinaryLaunch name##_launch;                                                                            \
  namespace {                                                                                                         \
  Tensor name(const Tensor& input, const std::optional<Tensor>& other, const std::optional<double>& eps,              \
              double fill_value, const std::optional<ScalarType>& dtype, const std::optional<double>& number) {       \
    return binary(name##_launch, "safeops::_" #name, input, other, eps, fill_value, dtype, number);                   \
  }                                                                                                                   \
  std::tuple<Tensor, Tensor> name##_backward(const Tensor& grad, const Tensor& input,                                 \
                                             const std::optional<Tensor>& other, const std::optional<double>& eps,    \
                                             bool need_input, bool need_other,                                        \
                                             const std::optional<ScalarType>& input_dtype,                            \
                                             const std::optional<ScalarType>& other_dtype,                            \
                                             const std::optional<double>& number) {                                   \
    return binary_backward(name##_launch, "safeops::_" #name "_backward", grad, input, other, eps, need_input,        \
                           need_other, input_dtype, other_dtype, number);                                             \
  }                                                                                                                   \
  }                                                                                                                   \
  STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) {                                                                       \
    m.impl("_" #name, TORCH_BOX(&name));                                                                              \
    m.impl("_" #name "_backward", TORCH_BOX(&name##_backward));                                                       \
  }

SAFEOPS_BINARY(magnitude)
SAFEOPS_BINARY(safe_atan2)
SAFEOPS_BINARY(safe_div)
SAFEOPS_BINARY(safe_pow)
SAFEOPS_BINARY(xlogy)

}  // namespace safeops::cuda
