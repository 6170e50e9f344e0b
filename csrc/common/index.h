// What an index tensor must be, and which dim it names. Device independent.
#pragma once

#include "tensor.h"

namespace safeops {

// An index is int32 (true) or int64.
inline bool is_narrow_index(const Tensor& t) {
  int32_t code;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &code));
  const bool narrow = code == aoti_torch_dtype_int32();
  STD_TORCH_CHECK(narrow || code == aoti_torch_dtype_int64(), "safeops: an index must be int32 or int64");
  return narrow;
}

// dim in [0, ndim); a 0-dim tensor accepts 0 and -1.
inline int resolve_dim(int64_t dim, int ndim) {
  const int64_t span = ndim == 0 ? 1 : ndim;
  STD_TORCH_CHECK(-span <= dim && dim < span, "safeops: dim ", dim, " is out of range for ", ndim, " dims");
  return static_cast<int>(dim < 0 ? dim + span : dim);
}

}  // namespace safeops
