// safe_rsqrt: 1 / sqrt(max(x, eps)); the slope is 0 for x < eps.
#include "unary.cuh"

namespace safeops::cuda {
namespace {

struct SafeRsqrt : Plain {
  static double stand_in(double eps, double) { return 1 / std::sqrt(eps); }

  template <class C>
  static __device__ C value(const Range<C>& range, C x) {
    const C y = rsqrt(x);
    return x < range.eps ? range.stand_in : range.saturated(y, range.overflows(y));
  }
  template <class C>  // -g x^(-3/2) / 2, as (g / 2x) y: y^3 alone may overflow where its product with g does not
  static __device__ C slope(const Range<C>& range, C g, C x) {
    const C y = rsqrt(x);
    return x < range.eps || range.overflows(y) ? C(0) : -(g / (C(2) * x)) * y;
  }
  static __device__ float slope(const Half& range, float g, float x) {
    const float size = rough_log2(x);
    const bool flat = x < range.eps || -0.5f * size >= range.log2_limit;
    return flat ? 0 : -with_signs_of(rough_exp2(rough_log2(fabs(g)) - 1.5f * size - 1), g);
  }
};

}  // namespace

SAFEOPS_UNARY(safe_rsqrt, SafeRsqrt)

}  // namespace safeops::cuda
