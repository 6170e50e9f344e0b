// safe_div: a / b, a stand-in where b vanishes, saturation where the quotient does not fit.
#include "binary.cuh"
#include "quotient.cuh"

namespace safeops::cuda {
namespace {

struct SafeDiv : Plain {
  static constexpr bool kFixedRows = true;

  template <class C>
  static __device__ C value(const Range<C>& range, C a, C b) {
    const C q = a / b;  // selected below, so an inf or NaN from a vanishing b goes nowhere
    return divides(range, b) ? range.saturated(q, range.overflows(q) && finite(a)) : range.stand_in;
  }
  static __device__ float value(const Half& range, float a, float b) {  // of a subnormal number 1 / b may be infinite
    const float lift = fabs(b) < std::numeric_limits<float>::min() ? 0x1p24f : 1, q = (a * lift) * (1 / (b * lift));
    return divides(range, b) ? range.saturated(q, range.overflows(q) && finite(a)) : range.stand_in;
  }
  template <class C>  // da = g / b, db = -g a / b^2; exactly 0 at both kinds of stand-in
  static __device__ void slopes(const Range<C>& range, C g, C a, C b, C& da, C& db) {
    const C q = a / b, slope = g / b;
    const bool live = divides(range, b) && !(range.overflows(q) && finite(a));
    da = live ? slope : C(0);
    db = live ? slope_of_divisor(g, b, q, slope) : C(0);
  }
};

}  // namespace

SAFEOPS_BINARY(safe_div, SafeDiv)

}  // namespace safeops::cuda
