// safe_rsqrt: 1 / sqrt(max(x, eps)).
#include "unary.cuh"

namespace safeops::cuda {
namespace {

struct SafeRsqrt {
  static constexpr bool kRolled = false;
  static double stand_in(double eps, double) { return 1 / std::sqrt(eps); }

  template <class C>
  static __device__ C value(const Range<C>& range, C x) {
    const C y = rsqrt(x);
    return x < range.eps ? range.stand_in : range.saturated(y, range.overflows(y));
  }
  template <class C>  // -g x^(-3/2) / 2; the cube of the root may overflow where its product with g does not
  static __device__ C slope(const Range<C>& range, C g, C x) {
    const C y = rsqrt(x);
    return x < range.eps || range.overflows(y) ? C(0) : -(g / (C(2) * x)) * y;
  }
};

}  // namespace

SAFEOPS_UNARY(safe_rsqrt, SafeRsqrt)

}  // namespace safeops::cuda
