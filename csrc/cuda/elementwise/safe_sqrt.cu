// safe_sqrt: sqrt(max(x, 0)); the slope is 0 below eps.
#include "unary.cuh"

namespace safeops::cuda {
namespace {

struct SafeSqrt : Plain {
  static double stand_in(double, double) { return 0; }

  template <class C>
  static __device__ C value(const Range<C>& range, C x) {
    const C y = sqrt(x);
    return x <= C(0) ? C(0) : range.saturated(y, range.overflows(y) && finite(x));
  }
  template <class C>
  static __device__ C slope(const Range<C>& range, C g, C x) {
    const C y = sqrt(x);
    return x < range.eps || (range.overflows(y) && finite(x)) ? C(0) : g / (C(2) * y);
  }
};

}  // namespace

SAFEOPS_UNARY(safe_sqrt, SafeSqrt)

}  // namespace safeops::cuda
