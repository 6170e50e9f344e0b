// The element types, by number. Host and device.
#pragma once

#include <cstdint>

namespace safeops::cuda {

enum Type : int32_t { kF16, kBF16, kF32, kF64, kBool };

__host__ __device__ constexpr int size_of(Type type) {
  return type == kBool ? 1 : type <= kBF16 ? 2 : type == kF32 ? 4 : 8;
}

}  // namespace safeops::cuda
