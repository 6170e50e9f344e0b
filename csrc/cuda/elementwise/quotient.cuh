// Shared by safe_div and safe_reciprocal: the test of a divisor against the floor eps, and the divisor's gradient.
#pragma once

#include "floating.cuh"

namespace safeops::cuda {

template <class C>
__device__ inline bool divides(const Range<C>& range, C b) {
  return !(fabs(b) < range.eps || b == C(0));  // true for NaN, so that the quotient is NaN
}

// Returns -g q / b, the gradient of b, with q = a / b and slope = g / b. It is -slope q; or, if slope over- or
// underflows where g q / b may not, -g (q / b).
template <class C>
__device__ inline C slope_of_divisor(C g, C b, C q, C slope) {
  const C other = q / b;
  return -(lost(slope, g) && !(finite(slope) && !finite(other)) ? g * other : slope * q);
}

}  // namespace safeops::cuda
