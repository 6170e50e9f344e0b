// The largest number and the overflow threshold of each floating dtype, and the default floor of a divisor. Device
// independent.
#pragma once

#include <cmath>
#include <limits>
#include <optional>

#include "dtype.h"

namespace safeops {

inline double largest(DType type) {
  constexpr double values[] = {65504.0, 0x1.FEp+127, 0x1.FFFFFEp+127, 0x1.FFFFFFFFFFFFFp+1023};
  return values[static_cast<int>(type)];
}

// Magnitudes >= this round to inf in `type`: its largest number plus half a step (the tie rounds to even, to inf).
inline double overflow_from(DType type) {
  constexpr double values[] = {65520.0, 0x1.FFp+127, 0x1.FFFFFFp+127, HUGE_VAL};
  return values[static_cast<int>(type)];
}

// Clamps a finite x to the largest magnitude of `type`; inf and NaN pass.
inline double saturate(double x, DType type) {
  const double limit = largest(type);
  if (!std::isfinite(x) || std::fabs(x) <= limit) return x;
  return std::copysign(limit, x);
}

// Returns the floor of a divisor: eps, or by default the smallest normal number of the compute type.
inline double floor_of(const std::optional<double>& eps, bool in_double) {
  if (eps) return *eps;
  return in_double ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
}

}  // namespace safeops
