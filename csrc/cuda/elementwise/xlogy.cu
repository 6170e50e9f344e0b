// xlogy: a log(b), and 0 where a is 0, whatever b is.
#include "binary.cuh"

namespace safeops::cuda {
namespace {

struct Xlogy : Plain {
  template <class C>
  static __device__ C value(const Range<C>&, C a, C b) {
    return a == C(0) ? C(0) : a * log(b);
  }
  static __device__ float value(const Half&, float a, float b) { return a == 0 ? 0 : a * (log2_of(b) * kLog2); }
  template <class C>  // da = g log(b), db = g a / b; both are 0 where a is 0 and log(b) is not finite
  static __device__ void slopes(const Range<C>&, C g, C a, C b, C& da, C& db) {
    const bool live = a != C(0) || (b > C(0) && finite(b));  // true if a is NaN
    const C slope = g / b, quotient = a / b;
    // db is (g / b) a, g (a / b) or (g a) / b: the first whose intermediate result is a normal number.
    const C product = !lost(slope, g) ? slope * a : !lost(quotient, a) || b == C(0) || !finite(b)
                                               ? g * quotient
                                               : (g * a) / b;
    da = live ? g * log(b) : C(0);
    db = live ? product : C(0);
  }
  static __device__ void slopes(const Half&, float g, float a, float b, float& da, float& db) {
    const bool live = a != 0 || (b > 0 && finite(b));
    const float logarithm = log2_of(fabs(b)), size = rough_log2(fabs(g)) + rough_log2(fabs(a)) - logarithm;
    da = live ? g * (b < 0 ? NAN : logarithm * kLog2) : 0;
    db = live ? with_signs_of(rough_exp2(size), g, a, b) : 0;
  }
};

}  // namespace

SAFEOPS_BINARY(xlogy, Xlogy)

}  // namespace safeops::cuda
