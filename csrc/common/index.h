// Index tensors are int32 or int64. Device independent.
#pragma once

#include "tensor.h"

namespace safeops {

// True for int32, false for int64; any other dtype is an error.
inline bool is_narrow_index(const Tensor& t) {
  int32_t code;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &code));
  const bool narrow = code == aoti_torch_dtype_int32();
  STD_TORCH_CHECK(narrow || code == aoti_torch_dtype_int64(), "safeops: an index must be int32 or int64");
  return narrow;
}

}  // namespace safeops
