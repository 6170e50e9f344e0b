// magnitude: sqrt(a^2 + b^2), with slope 0 at the origin.
#include "binary.cuh"

namespace safeops::cuda {
namespace {

struct Magnitude : Plain {
  // u is a or b, the larger in magnitude, and v the other; t = v / u. The result is |u| sqrt(1 + t^2), in which no
  // square over- or underflows. ratio() returns t: 0 at the origin, 1 or -1 if u and v are infinite.
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
    const C slope = a == C(0) && b == C(0) ? C(0) : g * unit;
    // t may underflow where g t does not. Then powers of two keep the factors of g t in range.
    constexpr C kMin = std::numeric_limits<C>::min(), kStep = std::numeric_limits<C>::epsilon() / 4;
    const bool vanishes = fabs(t) < kMin && v != C(0) && finite(u);
    const C other = vanishes ? slope * kStep * (v * (1 / kMin) / (u * kStep)) * kMin : slope * t;
    da = steep ? other : slope;
    db = steep ? slope : other;
  }
};

}  // namespace

SAFEOPS_BINARY(magnitude, Magnitude)

}  // namespace safeops::cuda
