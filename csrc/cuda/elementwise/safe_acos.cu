// safe_acos: the arc cosine of x clamped to [-1, 1]; the slope is 0 for |x| >= 1.
#include "unary.cuh"

namespace safeops::cuda {
namespace {

struct SafeAcos : Plain {
  static double stand_in(double, double) { return 0; }

  template <class C>
  static __device__ C value(const Range<C>&, C x) {
    return acos(x > C(1) ? C(1) : x < C(-1) ? C(-1) : x);  // a NaN stays one
  }
  template <class C>  // -g / sqrt((1 - x)(1 + x)), which does not cancel near the bounds
  static __device__ C slope(const Range<C>&, C g, C x) {
    return fabs(x) >= C(1) ? C(0) : -g * rsqrt((C(1) - x) * (C(1) + x));
  }
};

}  // namespace

SAFEOPS_UNARY(safe_acos, SafeAcos)

}  // namespace safeops::cuda
