// safe_exp: e^x, saturated where it does not fit into the output dtype.
#include "unary.cuh"

namespace safeops::cuda {
namespace {

struct SafeExp : Plain {
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
  static __device__ float slope(const Half& range, float g, float x) {
    const float y = x * (1 / kLog2);
    return y >= range.log2_limit && finite(x) ? 0 : with_signs_of(rough_exp2(rough_log2(fabs(g)) + y), g);
  }
};

}  // namespace

SAFEOPS_UNARY(safe_exp, SafeExp)

}  // namespace safeops::cuda
