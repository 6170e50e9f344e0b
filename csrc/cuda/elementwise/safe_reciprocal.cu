// safe_reciprocal: 1 / x; fill_value where |x| < eps or x is 0; saturated where 1 / x does not fit into the output
// dtype.
#include "quotient.cuh"
#include "unary.cuh"

namespace safeops::cuda {
namespace {

struct SafeReciprocal : Plain {
  static double stand_in(double, double fill_value) { return fill_value; }

  template <class C>
  static __device__ C value(const Range<C>& range, C x) {
    const C q = C(1) / x;
    return divides(range, x) ? range.saturated(q, range.overflows(q)) : range.stand_in;
  }
  template <class C>  // -g / x^2
  static __device__ C slope(const Range<C>& range, C g, C x) {
    const C q = C(1) / x;
    return divides(range, x) && !range.overflows(q) ? slope_of_divisor(g, x, q, g / x) : C(0);
  }
  static __device__ float slope(const Half& range, float g, float x) {
    const float size = rough_log2(fabs(x));
    const bool live = divides(range, x) && !(-size >= range.log2_limit);
    return live ? -with_signs_of(rough_exp2(rough_log2(fabs(g)) - 2 * size), g) : 0;
  }
};

}  // namespace

SAFEOPS_UNARY(safe_reciprocal, SafeReciprocal)

}  // namespace safeops::cuda
