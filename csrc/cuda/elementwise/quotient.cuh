// The floor and the divisor's gradient, for safe_div and safe_reciprocal.
#pragma once

#include "floating.cuh"

namespace safeops::cuda {

template <class C>
__device__ inline bool divides(const Range<C>& range, C b) {
  return !(fabs(b) < range.eps || b == C(0));  // a NaN divisor is kept, and shows
}

// Returns -g q / b, with q = a / b and slope = g / b. If slope over- or underflows, the product may not: then it is
// -g (q / b).
template <class C>
__device__ inline C slope_of_divisor(C g, C b, C q, C slope) {
  const C other = q / b;
  return -(lost(slope, g) && !(finite(slope) && !finite(other)) ? g * other : slope * q);
}

}  // namespace safeops::cuda
