// `_health_` writes one row of integers for each tensor of a list (safeops/ops/lists/health.py). This header names the
// columns of such a row, and the magnitudes up to which kSmall and kTiny count. Device independent.
#pragma once

#include "dtype.h"

namespace safeops {

// kSmall counts magnitudes below 2^-14, the smallest normal number of fp16. kTiny counts magnitudes of at most 2^-25,
// which fp16 rounds to 0. Neither counts zeros. kLargest holds the bits of the largest finite magnitude as a double.
// kFirst is numel minus the index of the first NaN or inf.
enum HealthColumn { kNan, kInf, kMinusInf, kZero, kSmall, kTiny, kLargest, kFirst, kHealthColumns };

// The bits of inf, 2^-14 and 2^-25 in each dtype. fp16 has no number in (0, 2^-25], so its `tiny` is 0.
struct HealthLimits {
  uint64_t infinity, normal, tiny;
};

constexpr HealthLimits health_limits(DType type) {
  constexpr HealthLimits limits[] = {{0x7C00, 0x0400, 0},
                                     {0x7F80, 0x3880, 0x3300},
                                     {0x7F800000, 0x38800000, 0x33000000},
                                     {0x7FF0000000000000, 0x3F10000000000000, 0x3E60000000000000}};
  return limits[static_cast<int>(type)];
}

}  // namespace safeops
