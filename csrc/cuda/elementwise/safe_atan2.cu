// safe_atan2: the angle of the point (b, a), 0 and without a slope at the origin.
#include "binary.cuh"

namespace safeops::cuda {
namespace {

struct SafeAtan2 {
  static constexpr bool kRolled = false, kFixedRows = false;

  template <class C>
  static __device__ C value(const Range<C>&, C y, C x) {
    return y == C(0) && x == C(0) ? C(0) : atan2(y, x);
  }
  // dy = g x / (x^2 + y^2), dx = -g y / (x^2 + y^2). With u the longer leg, v the other and t = v / u that is
  // slope = g / (u (1 + t^2)) and slope t: no square over- or underflows.
  template <class C>
  static __device__ void slopes(const Range<C>&, C g, C y, C x, C& dy, C& dx) {
    const bool steep = fabs(y) > fabs(x);
    const C u = steep ? y : x, v = steep ? x : y;
    const C t = v / u, part = g / (C(1) + t * t), slope = part / u;
    // where t is too small, v; where slope is too large, g first and then u
    const bool plain = fabs(t) >= std::numeric_limits<C>::min() || t != t;
    const C factor = plain ? t : v, product = finite(slope) ? slope * factor : (part * factor) / u;
    const C other = plain ? product : product / u;
    // The origin; and where a leg is infinite, and the other no NaN, the angle is a constant.
    const bool far = !finite(u) && u == u && v == v;
    const bool flat = (u == C(0) && v == C(0)) || far;
    dy = flat ? C(0) : steep ? other : slope;
    dx = flat ? C(0) : steep ? -slope : -other;
  }
};

}  // namespace

SAFEOPS_BINARY(safe_atan2, SafeAtan2)

}  // namespace safeops::cuda
