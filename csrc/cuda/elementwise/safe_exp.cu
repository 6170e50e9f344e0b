// safe_exp: e^x, saturated where it does not fit.
#include "unary.cuh"

namespace safeops::cuda {
namespace {

struct SafeExp {
  static constexpr bool kRolled = false;
  static double stand_in(double, double) { return 0; }

  template <class C>
  static __device__ C value(const Range<C>& range, C x) {
    const C y = exp(x);
    return range.saturated(y, range.overflows(y) && finite(x));
  }
  template <class C>
  static __device__ C slope(const Range<C>& range, C g, C x) {
    const C y = exp(x);
    return range.overflows(y) && finite(x) ? C(0) : g * y;
  }
};

}  // namespace

SAFEOPS_UNARY(safe_exp, SafeExp)

}  // namespace safeops::cuda
