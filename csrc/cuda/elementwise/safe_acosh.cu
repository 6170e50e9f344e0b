// safe_acosh: acosh(max(x, 1)), the inverse hyperbolic cosine; the slope is 0 for x <= 1.
#include "unary.cuh"

namespace safeops::cuda {
namespace {

struct SafeAcosh : Plain {
  static double stand_in(double, double) { return 0; }

  template <class C>  // acosh(x) = 2 asinh(sqrt(h)) with h = (x - 1)/2; asinh(s) = log(1 + s + s^2/(1 + sqrt(1 + s^2)))
  static __device__ C value(const Range<C>&, C x) {
    if (x <= C(1)) return C(0);
    const C h = (x - C(1)) * C(0.5);
    return finite(x) ? 2 * log_of_1_plus(sqrt(h) + h / (C(1) + sqrt(C(1) + h))) : x;  // a NaN stays one
  }
  template <class C>  // g / sqrt((x - 1)(x + 1)), by two roots, since (x - 1)(x + 1) may overflow
  static __device__ C slope(const Range<C>&, C g, C x) {
    return x <= C(1) ? C(0) : g / (sqrt(x - C(1)) * sqrt(x + C(1)));
  }
};

}  // namespace

SAFEOPS_UNARY(safe_acosh, SafeAcosh)

}  // namespace safeops::cuda
