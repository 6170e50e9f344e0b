// masked_fill: out = fill_mask ? fill : input, bit for bit.  I/O: read input, read mask, write out (bf16: 5 bytes).
// Its backward is masked_fill of grad with fill 0.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstring>

#include "cuda/engine/tensors.h"
#include "floating.cuh"

namespace safeops::cuda {
namespace {

template <class Bits>
struct MaskedFill {
  using Value = Bits;
  static constexpr int kOut = 1, kIn = 1;
  static constexpr bool kMask = true, kRolled = false;
  Bits fill;
  const char* value;  // null, or the element of a tensor, read on the device: the host need not wait
  Type value_type, type;
  double largest;  // largest finite number of `type`

  __device__ void prepare() {
    if (value == nullptr) return;
    if (value_type == type) {  // copies the bits unchanged
      fill = Bits(load_raw<uint64>(value, type));
      return;
    }
    const double number = Dynamic<double>::decode(load_raw<uint64>(value, value_type), value_type);
    const bool over = finite(number) && fabs(number) > largest;
    fill = Bits(Dynamic<double>::encode(over ? copysign(largest, number) : number, type));
  }
  __device__ void operator()(const Bits* in, bool filled, Bits* out) const { out[0] = filled ? fill : in[0]; }
};

uint64_t fill_bits(double number, Type type) {
  const double value = saturate(number, DType(type));
  if (type == kF16) return c10::Half(float(value)).x;
  if (type == kBF16) return c10::BFloat16(float(value)).x;
  uint64_t bits = 0;
  if (type == kF64) {
    std::memcpy(&bits, &value, 8);
  } else {
    const float narrow = float(value);
    std::memcpy(&bits, &narrow, 4);
  }
  return bits;
}

// Reads `value` where it is a CPU tensor, which is allowed beside CUDA operands, as in torch.
double read_on_host(const Tensor& x, Type type) {
  const void* p = x.data_ptr();
  if (type == kF64) return *static_cast<const double*>(p);
  if (type == kF32) return *static_cast<const float*>(p);
  if (type == kF16) return float(*static_cast<const c10::Half*>(p));
  return float(*static_cast<const c10::BFloat16*>(p));
}

template <class Bits>
MaskedFill<Bits> make_op(uint64_t fill, const char* value, Type value_type, Type type) {
  return {Bits(fill), value, value_type, type, largest(DType(type))};
}

Tensor masked_fill(const Tensor& input, const Tensor& fill_mask, const std::optional<Tensor>& value, double number) {
  constexpr const char* kOp = "safeops::_masked_fill";
  const Type type = float_type(input, kOp, "input");
  STD_TORCH_CHECK(dtype_of(fill_mask) == DType::kBool, kOp, ": fill_mask must be bool");
  check_device(fill_mask, input, kOp, "fill_mask");
  const char* device_value = nullptr;
  Type value_type = type;
  if (value.has_value()) {
    value_type = float_type(*value, kOp, "value");
    STD_TORCH_CHECK(value->numel() == 1, kOp, ": value must have one element");
    if (value->is_cpu()) {
      number = read_on_host(*value, value_type);
    } else {
      check_device(*value, input, kOp, "value");
      device_value = static_cast<const char*>(value->data_ptr());
    }
  }
  const Shape shape = broadcast(View(input).shape(), View(fill_mask).shape());
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Tensor out = output_like(input, shape, type);
  auto plan = make_plan<3>(shape, {operand(out, type), operand(input, type), operand(fill_mask, kBool)});
  if (plan.numel == 0) return out;
  const cudaStream_t stream = current_stream(input);
  const uint64_t fill = fill_bits(number, type);
  const auto fixed = [&](auto bits) {
    using Bits = decltype(bits);
    return launch_fixed<Copy<Bits>>(plan, make_op<Bits>(fill, device_value, value_type, type), stream);
  };
  const int size = size_of(type);
  if (!(size == 2 ? fixed(uint16_t()) : size == 4 ? fixed(uint32_t()) : fixed(uint64())))
    launch_general(plan, make_op<uint64>(fill, device_value, value_type, type), stream);
  check_launch(kOp);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) { m.impl("_masked_fill", TORCH_BOX(&masked_fill)); }

}  // namespace safeops::cuda
