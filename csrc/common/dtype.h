// The dtypes that kernels distinguish. This header includes no torch header, since nvcc takes long to parse those.
#pragma once

#include <cstdint>

namespace safeops {

enum class DType : uint8_t { kHalf, kBFloat16, kFloat, kDouble, kBool, kLong, kOther };

inline int64_t size_of(DType type) {
  constexpr int64_t bytes[] = {2, 2, 4, 8, 1, 8, 0};
  return bytes[static_cast<int>(type)];
}

}  // namespace safeops
