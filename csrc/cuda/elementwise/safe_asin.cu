// safe_asin: the arc sine of x clamped to [-1, 1]; the slope is 0 for |x| >= 1.
#include "unary.cuh"

namespace safeops::cuda {
namespace {

struct SafeAsin : Plain {
  static double stand_in(double, double) { return 0; }

  template <class C>
  static __device__ C value(const Range<C>&, C x) {
    return asin(x > C(1) ? C(1) : x < C(-1) ? C(-1) : x);  // a NaN stays one
  }
  template <class C>  // g / sqrt((1 - x)(1 + x)), which does not cancel near the bounds
  static __device__ C slope(const Range<C>&, C g, C x) {
    return fabs(x) >= C(1) ? C(0) : g * rsqrt((C(1) - x) * (C(1) + x));
  }
};

}  // namespace

SAFEOPS_UNARY(safe_asin, SafeAsin)

}  // namespace safeops::cuda
