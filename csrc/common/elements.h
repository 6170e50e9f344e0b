// Elements of any dtype as bit patterns: how wide they are, new tensors of them, a number as their bits.
// Device independent.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "tensor.h"

namespace safeops {

inline int32_t dtype_code(const Tensor& t) {
  int32_t code;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &code));
  return code;
}

inline int64_t element_bytes(const Tensor& t) {
  return static_cast<int64_t>(aoti_torch_dtype_element_size(dtype_code(t)));
}

// A new contiguous tensor of t's dtype and device.
inline Tensor new_like(const Shape& shape, const Tensor& t) {
  int64_t strides[kMaxDims];
  contiguous_strides(shape, strides);
  int32_t index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.get(), &index));
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(shape.ndim, shape.size, strides, dtype_code(t),
                                                  device_type_of(t), index, &handle));
  return Tensor(handle);
}

// torch.empty_like(t) if t has the full shape, else contiguous. torch is asked only where the answer is not plain: its
// rule keeps even the strides of size-1 dims.
inline Tensor laid_like(const Shape& shape, const Tensor& t) {
  const View view(t);
  int64_t plain[kMaxDims];
  contiguous_strides(shape, plain);
  bool own = false;
  if (shape.is(view.ndim, view.sizes))
    for (int d = 0; d < shape.ndim; ++d) own = own || view.strides[d] != plain[d];
  if (!own) return new_like(shape, t);
  using torch::stable::detail::from;
  StableIValue stack[6] = {from(t),           from(std::nullopt), from(std::nullopt),
                           from(std::nullopt), from(std::nullopt), from(std::nullopt)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::empty_like", "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

template <class T>
uint64_t integer_bits(double value) {
  STD_TORCH_CHECK(value == value, "safeops: NaN does not exist in an integer dtype");
  using Limits = std::numeric_limits<T>;
  // 2^63 and 2^64 are doubles, the largest integers below them are not
  const T integer = value >= static_cast<double>(Limits::max())   ? Limits::max()
                    : value <= static_cast<double>(Limits::min()) ? Limits::min()
                                                                  : static_cast<T>(value);
  return static_cast<uint64_t>(static_cast<std::make_unsigned_t<T>>(integer));
}

// `value` as the bits of t's dtype, saturated and rounded by way of fp32 as torch does; of a complex number the real
// part.
inline uint64_t fill_bits(double value, const Tensor& t) {
  if (value == 0 && !std::signbit(value)) return 0;
  const auto within = [&](float largest) {
    return static_cast<float>(std::isfinite(value) ? std::fmax(-largest, std::fmin(largest, value)) : value);
  };
  uint64_t bits = 0;
  const auto as = [&](auto number) {
    std::memcpy(&bits, &number, sizeof(number));
    return bits;
  };
  switch (t.scalar_type()) {
    case ScalarType::Half:
    case ScalarType::ComplexHalf: return c10::Half(within(65504.0f)).x;
    case ScalarType::BFloat16: return c10::BFloat16(within(3.38953138925153547590e38f)).x;
    case ScalarType::Float:
    case ScalarType::ComplexFloat: return as(within(std::numeric_limits<float>::max()));
    case ScalarType::Double:
    case ScalarType::ComplexDouble: return as(value);
    case ScalarType::Bool: return value != 0;
    case ScalarType::Byte: return integer_bits<uint8_t>(value);
    case ScalarType::Char: return integer_bits<int8_t>(value);
    case ScalarType::Short: return integer_bits<int16_t>(value);
    case ScalarType::Int: return integer_bits<int32_t>(value);
    case ScalarType::Long: return integer_bits<int64_t>(value);
    case ScalarType::UInt16: return integer_bits<uint16_t>(value);
    case ScalarType::UInt32: return integer_bits<uint32_t>(value);
    case ScalarType::UInt64: return integer_bits<uint64_t>(value);
    default: STD_TORCH_CHECK(false, "safeops: fill_value must be 0 for this dtype");
  }
}

}  // namespace safeops
