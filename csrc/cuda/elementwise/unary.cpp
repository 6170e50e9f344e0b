// Registers the unary functions as ops: checks operands, allocates outputs, makes the plan, and calls the launch that
// <op>.cu defines.
#include "cuda/engine/tensors.h"
#include "functions.h"

namespace safeops::cuda {
namespace {

// The floor that `eps` stands for, but at least the smallest positive number, so that 0 is always below the floor.
double floor_of_unary(const std::optional<double>& eps, bool wide) {
  const double least = wide ? std::numeric_limits<double>::denorm_min() : std::numeric_limits<float>::denorm_min();
  return std::fmax(floor_of(eps, wide), least);
}

Tensor unary(const UnaryLaunch& launch, const char* op, const Tensor& input, const std::optional<double>& eps,
             double fill_value, const std::optional<ScalarType>& dtype) {
  const Type x = float_type(input, op, "input"), y = dtype ? float_type(*dtype) : x;
  const bool wide = x == kF64 || y == kF64;
  const Shape shape = View(input).shape();
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Tensor out = output_like(input, shape, y);
  auto plan = make_plan<2>(shape, {operand(out, y), operand(input, x)});
  if (plan.numel == 0) return out;
  launch.forward(plan, wide, floor_of_unary(eps, wide), fill_value, y, current_stream(input));
  check_launch(op);
  return out;
}

Tensor unary_backward(const UnaryLaunch& launch, const char* op, const Tensor& grad, const Tensor& input,
                      const std::optional<double>& eps) {
  const Type g = float_type(grad, op, "grad"), x = float_type(input, op, "input");
  check_device(grad, input, op, "grad");
  const bool wide = g == kF64 || x == kF64;
  const Shape shape = View(input).shape();
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Tensor out = output_like(input, shape, x);
  auto plan = make_plan<3>(shape, {operand(out, x), operand(grad, g), operand(input, x)});
  if (plan.numel == 0) return out;
  // g, the dtype of grad, is that of the forward's output: an element that saturated in it has gradient 0.
  launch.backward(plan, wide, floor_of_unary(eps, wide), g, current_stream(input));
  check_launch(op);
  return out;
}

}  // namespace

#define SAFEOPS_UNARY(name)                                                                              \
  extern const UnaryLaunch name##_launch;                                                                \
  namespace {                                                                                            \
  Tensor name(const Tensor& input, const std::optional<double>& eps, double fill_value,                  \
              const std::optional<ScalarType>& dtype) {                                                  \
    return unary(name##_launch, "safeops::_" #name, input, eps, fill_value, dtype);                      \
  }                                                                                                      \
  Tensor name##_backward(const Tensor& grad, const Tensor& input, const std::optional<double>& eps) {    \
    return unary_backward(name##_launch, "safeops::_" #name "_backward", grad, input, eps);              \
  }                                                                                                      \
  }                                                                                                      \
  STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) {                                                          \
    m.impl("_" #name, TORCH_BOX(&name));                                                                 \
    m.impl("_" #name "_backward", TORCH_BOX(&name##_backward));                                          \
  }

SAFEOPS_UNARY(log1mexp)
SAFEOPS_UNARY(safe_acos)
SAFEOPS_UNARY(safe_acosh)
SAFEOPS_UNARY(safe_asin)
SAFEOPS_UNARY(safe_exp)
SAFEOPS_UNARY(safe_log)
SAFEOPS_UNARY(safe_reciprocal)
SAFEOPS_UNARY(safe_rsqrt)
SAFEOPS_UNARY(safe_sqrt)

}  // namespace safeops::cuda
