// Elements of any dtype, handled as bit patterns: their size, new tensors of a given tensor's dtype, and the bits of a
// number in a dtype. Device independent.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "limits.h"
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

// Returns a new contiguous tensor with t's dtype and device.
inline Tensor new_like(const Shape& shape, const Tensor& t) { return empty_of_code(shape, dtype_code(t), t); }

// Returns a new tensor of this shape, with t's dtype and device: torch.empty_like(t) if t has this shape, else
// contiguous.
inline Tensor laid_like(const Shape& shape, const Tensor& t) {
  return keeps_strides(shape, View(t)) ? torch_empty_like(t, std::nullopt, dtype_code(t)) : new_like(shape, t);
}

template <class T>
uint64_t integer_bits(double value) {
  STD_TORCH_CHECK(value == value, "safeops: NaN does not exist in an integer dtype");
  using Limits = std::numeric_limits<T>;
  // For 64-bit types max() becomes 2^63 or 2^64 as a double, which is one too large: `>=` saturates these values, too.
  const T integer = value >= static_cast<double>(Limits::max())   ? Limits::max()
                    : value <= static_cast<double>(Limits::min()) ? Limits::min()
                                                                  : static_cast<T>(value);
  return static_cast<uint64_t>(static_cast<std::make_unsigned_t<T>>(integer));
}

// Returns the bits of `value` in t's dtype. Finite values saturate at the dtype's range; half and bfloat16 are rounded
// from fp32, as torch does. In a complex dtype `value` is the real part.
inline uint64_t fill_bits(double value, const Tensor& t) {
  if (value == 0 && !std::signbit(value)) return 0;
  const auto within = [&](DType type) { return static_cast<float>(saturate(value, type)); };
  uint64_t bits = 0;
  const auto as = [&](auto number) {
    std::memcpy(&bits, &number, sizeof(number));
    return bits;
  };
  switch (t.scalar_type()) {
    case ScalarType::Half:
    case ScalarType::ComplexHalf: return c10::Half(within(DType::kHalf)).x;
    case ScalarType::BFloat16: return c10::BFloat16(within(DType::kBFloat16)).x;
    case ScalarType::Float:
    case ScalarType::ComplexFloat: return as(within(DType::kFloat));
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
