// The format of real dtypes: floating or not, signed or not, and the bytes of an element. Device independent.
#pragma once

#include "tensor.h"

namespace safeops {

struct Real {
  DType floating;  // kOther: an integer or a bool
  bool is_signed;
  int64_t bytes;
};

inline Real real_of(const Tensor& t, const char* op) {
  switch (t.scalar_type()) {
    case ScalarType::Half:
    case ScalarType::BFloat16:
    case ScalarType::Float:
    case ScalarType::Double: return {dtype_of(t), true, size_of(dtype_of(t))};
    case ScalarType::Char: return {DType::kOther, true, 1};
    case ScalarType::Short: return {DType::kOther, true, 2};
    case ScalarType::Int: return {DType::kOther, true, 4};
    case ScalarType::Long: return {DType::kOther, true, 8};
    case ScalarType::Bool:
    case ScalarType::Byte: return {DType::kOther, false, 1};
    case ScalarType::UInt16: return {DType::kOther, false, 2};
    case ScalarType::UInt32: return {DType::kOther, false, 4};
    case ScalarType::UInt64: return {DType::kOther, false, 8};
    default: STD_TORCH_CHECK(false, op, ": needs real tensors");
  }
}

}  // namespace safeops
