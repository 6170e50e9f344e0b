// magnitude: sqrt(a^2 + b^2), with slope 0 at the origin.
#include "binary.cuh"

namespace safeops::cuda {
namespace {

struct Magnitude : Plain {
  // With u the longer part, v the other and t = v / u, r = |u| sqrt(1 + t^2): no square over- or underflows. t is 0 at
  // the origin, and that of the limit where u is infinite.
  template <class C>
  static __device__ C ratio(C u, C v) {
    const C t = v / u;
    return u == C(0) ? v : !finite(u) && fabs(u) == fabs(v) ? copysign(C(1), u) * copysign(C(1), v) : t;
  }
  template <class C>
  static __device__ C value(const Range<C>&, C a, C b) {
    const bool steep = fabs(b) > fabs(a);
    const C u = steep ? b : a, v = steep ? a : b, t = ratio(u, v);
    return fabs(u) * sqrt(C(1) + t * t);
  }
  template <class C>  // du = g sign(u) / sqrt(1 + t^2),  dv = t du
  static __device__ void slopes(const Range<C>&, C g, C a, C b, C& da, C& db) {
    const bool steep = fabs(b) > fabs(a);
    const C u = steep ? b : a, v = steep ? a : b, t = ratio(u, v), unit = copysign(C(1), u) / sqrt(C(1) + t * t);
    const bool origin = a == C(0) && b == C(0);
    const bool small = fabs(t) < std::numeric_limits<C>::min();  // g brings it back
    const C longer = origin ? C(0) : g * unit, other = origin ? C(0) : small ? g * unit * v / u : g * (t * unit);
    da = steep ? other : longer;
    db = steep ? longer : other;
  }
};

}  // namespace

SAFEOPS_BINARY(magnitude, Magnitude)

}  // namespace safeops::cuda
