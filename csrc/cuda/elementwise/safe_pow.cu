// safe_pow: a^b, 0 where there is no real power, saturation where it does not fit.
#include "binary.cuh"

namespace safeops::cuda {
namespace {

template <class C>
__device__ inline C power(C a, C b) {
  if (b == C(2)) return a * a;  // most exponents are this number
  return pow(a, b);
}

struct SafePow {
  static constexpr bool kRolled = true, kFixedRows = false;

  template <class C>
  static __device__ C value(const Range<C>& range, C a, C b) {
    const C y = power(a, b);
    const bool known = finite(a) && finite(b);
    return known && a < C(0) && b != trunc(b) ? C(0) : range.saturated(y, known && range.overflows(y));
  }
  template <class C>  // da = g b a^(b-1), db = g a^b log(a)
  static __device__ void slopes(const Range<C>& range, C g, C a, C b, C& da, C& db) {
    constexpr C kSmallest = std::numeric_limits<C>::min();
    const C y = power(a, b);
    const bool known = finite(a) && finite(b);
    // No power; one that does not fit; at 0 the slope of a constant, or where the first one that is not 0 is infinite.
    const bool flat = (known && ((a <= C(0) && b != trunc(b)) || range.overflows(y))) || (a == C(0) && b < C(1));
    da = db = C(0);
    if (flat) return;
    if (range.need_input && b != C(0)) {
      // a^(b-1) is a^b / a, where that is not below the normal numbers
      const C part = known && fabs(y) >= kSmallest ? y / a : pow(a, b - C(1));
      const C slope = b * part;
      da = g * slope;
      if (known && lost(slope, C(1))) {  // b a^(b-1) over- or underflows where its product with g may not
        const bool larger = fabs(b) > fabs(part);
        const C large = larger ? b : part, small = larger ? part : b;
        const C turned = (g * y) / a;  // for a part that over- or underflows already
        const bool beyond = !finite(part) || (part == C(0) && y != C(0));
        da = beyond              ? finite(turned) ? turned * b : (g * y) * (b / a)
             : finite(g * large) ? (g * large) * small
                                 : (g * small) * large;
      }
    }
    if (range.need_other && !(a <= C(0))) {  // elsewhere there is no derivative by the exponent
      const C logarithm = log(a), product = g * y;
      db = lost(product, g) ? g * (y * logarithm) : product * logarithm;
    }
  }
};

}  // namespace

SAFEOPS_BINARY(safe_pow, SafePow)

}  // namespace safeops::cuda
