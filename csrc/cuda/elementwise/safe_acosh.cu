// safe_acosh: the area hyperbolic cosine of x, at least 1; the slope is 0 for x <= 1.
#include "unary.cuh"

namespace safeops::cuda {
namespace {

struct SafeAcosh : Plain {
  static double stand_in(double, double) { return 0; }

  template <class C>
  static __device__ C value(const Range<C>&, C x) {
    return acosh(x < C(1) ? C(1) : x);  // a NaN stays one
  }
  template <class C>  // g / sqrt((x - 1)(x + 1)), of two roots: the product under one overflows
  static __device__ C slope(const Range<C>&, C g, C x) {
    return x <= C(1) ? C(0) : g * (rsqrt(x - C(1)) * rsqrt(x + C(1)));
  }
};

}  // namespace

SAFEOPS_UNARY(safe_acosh, SafeAcosh)

}  // namespace safeops::cuda
