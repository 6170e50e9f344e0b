// safe_div: a / b, a stand-in where b vanishes, saturation where the quotient does not fit.
// I/O: read a, read b, write out (bf16: 6 bytes); backward reads g, a, b and writes da, db (bf16: 10 bytes).
#include <cmath>
#include <limits>
#include <tuple>

#include "elementwise.cuh"
#include "tensors.h"

namespace safeops::cuda {
namespace {

// C is the compute type. A kept quotient saturates exactly where it would round to inf in the output dtype, which
// is |q| >= limit: so neither functor has to know that dtype.
template <class C>
struct Domain {
  C eps, limit;
  __device__ bool keeps(C b) const { return !(fabs(b) < eps || b == C(0)); }  // a NaN divisor is kept, and shows
  __device__ bool overflows(C q, C a) const {
    return fabs(q) >= limit && fabs(a) <= std::numeric_limits<C>::max();
  }
};

template <class C>
struct SafeDiv {
  using Value = C;
  static constexpr int kOut = 1, kIn = 2;
  static constexpr bool kMask = false;
  Domain<C> domain;
  C fill, largest;

  __device__ void prepare() {}
  __device__ void operator()(const C* in, bool, C* out) const {
    const C a = in[0], b = in[1];
    const C q = a / b;  // selected below, so an inf or NaN from a vanishing b goes nowhere
    const C y = domain.overflows(q, a) ? copysign(largest, q) : q;
    out[0] = domain.keeps(b) ? y : fill;
  }
};

template <class C>
struct SafeDivBackward {  // da = g / b, db = -g a / b^2; exactly 0 at both kinds of stand-in
  using Value = C;
  static constexpr int kOut = 2, kIn = 3;
  static constexpr bool kMask = false;
  Domain<C> domain;

  __device__ void prepare() {}
  __device__ void operator()(const C* in, bool, C* out) const {
    const C g = in[0], a = in[1], b = in[2];
    const C q = a / b, da = g / b;
    const bool live = domain.keeps(b) && !domain.overflows(q, a);
    out[0] = live ? da : C(0);
    // g (q/b) where g/b over- or underflows and the product may not
    const C size = fabs(da);
    const bool lost = size > std::numeric_limits<C>::max() || (size < std::numeric_limits<C>::min() && g != 0);
    out[1] = live ? -(lost ? g * (q / b) : da * q) : C(0);
  }
};

constexpr double kLargest[] = {65504.0, 3.38953138925153547590e38, 3.40282346638528859812e38,
                               1.79769313486231570815e308};  // by Type

// The smallest |q| that rounds to inf: half a step above the largest finite value, ties going to even, which is up.
// From fp64 the halves are rounded by way of fp32, so half an fp32 step lower.
double overflow_limit(Type out, bool wide) {
  switch (out) {
    case kF16: return wide ? 65520.0 - 0x1p-9 : 65520.0;
    case kBF16: return wide ? 0x1.FFp127 - 0x1p103 : 0x1.FFp127;
    case kF32: return wide ? 0x1.FFFFFFp127 : std::numeric_limits<double>::infinity();
    default: return std::numeric_limits<double>::infinity();
  }
}

template <class C>
Domain<C> make_domain(double eps, Type out) {
  return {C(eps), C(overflow_limit(out, sizeof(C) == 8))};
}

// Every operand of one dtype: 16-byte packets of that dtype. A mix: packets of eight, then element by element.
template <class Op32, class Op64, int N>
void launch(Plan<N>& plan, bool wide, const Op32& op32, const Op64& op64, cudaStream_t stream) {
  Type type = kBool;
  bool same = true, narrow = true;
  for (int i = 0; i < N; ++i) {
    if (plan.base[i] == nullptr) continue;
    if (type == kBool) type = plan.type[i];
    same = same && plan.type[i] == type;
    narrow = narrow && plan.type[i] != kF64;
  }
  bool done = false;
  if (same && type == kF16) done = launch_fixed<F16>(plan, op32, stream);
  if (same && type == kBF16) done = launch_fixed<BF16>(plan, op32, stream);
  if (same && type == kF32 && !wide) done = launch_fixed<F32>(plan, op32, stream);
  if (same && type == kF64) done = launch_fixed<F64>(plan, op64, stream);
  if (!done && !same && narrow && !wide) done = launch_rows<Mixed>(plan, op32, stream);
  if (done) return;
  if (wide) launch_general(plan, op64, stream);
  else launch_general(plan, op32, stream);
}

// A floor nobody named: the smallest normal number of the compute type.
double floor_of(const std::optional<double>& eps, bool wide) {
  if (eps) return *eps;
  return wide ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
}

Tensor safe_div(const Tensor& input, const Tensor& other, const std::optional<double>& eps, double fill_value,
                const std::optional<ScalarType>& dtype) {
  constexpr const char* kOp = "safeops::_safe_div";
  const Type a = float_type(input, kOp, "input"), b = float_type(other, kOp, "other"),
             y = dtype ? float_type(*dtype) : a;
  STD_TORCH_CHECK(dtype || a == b, kOp, ": dtype is needed where the operands' dtypes differ");
  check_device(other, input, kOp, "other");
  const Shape shape = broadcast(View(input).shape(), View(other).shape());
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Tensor out = output_like(input, shape, y);
  auto plan = make_plan<3>(shape, {operand(out, y), operand(input, a), operand(other, b)});
  if (plan.numel == 0) return out;
  const bool wide = a == kF64 || b == kF64 || y == kF64;
  const double largest = kLargest[y];
  const double fill = std::isfinite(fill_value) ? std::fmin(std::fmax(fill_value, -largest), largest) : fill_value;
  const double floor = floor_of(eps, wide);
  launch(plan, wide, SafeDiv<float>{make_domain<float>(floor, y), float(fill), float(largest)},
         SafeDiv<double>{make_domain<double>(floor, y), fill, largest}, current_stream(input));
  check_launch(kOp);
  return out;
}

std::tuple<Tensor, Tensor> safe_div_backward(const Tensor& grad, const Tensor& input, const Tensor& other,
                                             const std::optional<double>& eps, bool need_input, bool need_other,
                                             const std::optional<ScalarType>& input_dtype,
                                             const std::optional<ScalarType>& other_dtype) {
  constexpr const char* kOp = "safeops::_safe_div_backward";
  const Type g = float_type(grad, kOp, "grad"), a = float_type(input, kOp, "input"),
             b = float_type(other, kOp, "other"), da = input_dtype ? float_type(*input_dtype) : a,
             db = other_dtype ? float_type(*other_dtype) : b;
  check_device(grad, input, kOp, "grad");
  check_device(other, input, kOp, "other");
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
  const double floor = floor_of(eps, wide);  // and g's dtype is the output's: what saturated there has no gradient
  launch(plan, wide, SafeDivBackward<float>{make_domain<float>(floor, g)},
         SafeDivBackward<double>{make_domain<double>(floor, g)}, current_stream(input));
  check_launch(kOp);
  return {out_a, out_b};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) {
  m.impl("_safe_div", TORCH_BOX(&safe_div));
  m.impl("_safe_div_backward", TORCH_BOX(&safe_div_backward));
}

}  // namespace safeops::cuda
