// safe_pow: a^b, 0 where there is no real power, saturated where it does not fit.
#include "binary.cuh"

namespace safeops::cuda {
namespace {

// Terms that value and slopes of halves share. Written with & and |, since && and || would be branches.
struct Halves {
  float log2, power;       // log2 |a|, log2 |a^b|
  bool one, fractional;    // |a| is 1, and so is its power; b is finite and no integer
  float sign;              // a number with the sign of a^b
  float nan_or_zero;       // 0, or NaN if a or b is not finite

  __device__ Halves(float a, float b) : log2(log2_of(fabs(a))), nan_or_zero(0 * a + 0 * b) {
    one = (fabs(a) == 1) & ((a > 0) | (b == b));  // also 1 to the power of NaN
    power = one | (b == 0) ? 0 : b * log2;        // and NaN to the power of 0
    // At 1.5 2^23 a step is 1, so the lowest bit says whether |b| is odd. Halves of 2^22 and more are even.
    const float size = fminf(fabs(b), 0x1p22f), raised = size + 0x1.8p23f;
    fractional = raised - 0x1.8p23f != size;
    sign = __uint_as_float(fractional ? 0 : __float_as_uint(raised) << 31 & __float_as_uint(a));
  }
};

template <class C>
__device__ inline C power(C a, C b) {
  if (b == C(2)) return a * a;  // the most frequent exponent
  return pow(a, b);
}

struct SafePow : Plain {
  static constexpr float kLowest = -std::numeric_limits<float>::max();
  static constexpr bool kRolled = true;

  template <class C>
  static __device__ C value(const Range<C>& range, C a, C b) {
    const C y = power(a, b);
    const bool both_finite = finite(a) && finite(b);
    return both_finite && a < C(0) && b != trunc(b) ? C(0) : range.saturated(y, both_finite && range.overflows(y));
  }
  static __device__ float value(const Half& range, float a, float b) {
    const Halves x(a, b);
    const float power = rough_exp2(x.power), size = b == 2 ? a * a : power;
    const float fits = fminf(size, range.largest + x.nan_or_zero);  // fminf of a number and NaN is the number
    return x.fractional & (a < 0) & (a >= kLowest) ? 0 : with_signs_of(fits, x.sign);
  }
  template <class C>  // da = g b a^(b-1), db = g a^b log(a)
  static __device__ void slopes(const Range<C>& range, C g, C a, C b, C& da, C& db) {
    constexpr C kSmallest = std::numeric_limits<C>::min();
    const C y = power(a, b);
    const bool both_finite = finite(a) && finite(b);
    // Slopes are 0 where there is no power, where it does not fit, and at a = 0 for b < 1, where f is constant or
    // infinitely steep.
    const bool flat = (both_finite && ((a < C(0) && b != trunc(b)) || range.overflows(y))) || (a == C(0) && b < C(1));
    da = db = C(0);
    if (flat) return;
    if (range.need_input && b != C(0)) {
      // a^(b-1) is a^b / a, where a^b is not below the normal numbers. Else its sign is a's, unless b is odd (b - 1
      // cannot tell for a large or infinite b), and |a| replaces a, as pow has it for -inf and a fractional b.
      const bool odd = b == trunc(b) && b / 2 != trunc(b / 2);
      const C part = both_finite && fabs(y) >= kSmallest ? y / a : pow(fabs(a), b - C(1)) * (a < C(0) && !odd ? -1 : 1);
      const C slope = b * part;
      da = g * slope;
      if (both_finite && lost(slope, C(1))) {  // b a^(b-1) over- or underflows where its product with g may not
        const bool larger = fabs(b) > fabs(part);
        const C large = larger ? b : part, small = larger ? part : b;
        // For a part that over- or underflows already. Where g y / a and b / a are both infinite, g y b is not small.
        const C turned = (g * y) / a, ratio = b / a;
        const bool beyond = !finite(part) || (part == C(0) && y != C(0));
        da = beyond              ? finite(turned) ? turned * b : finite(ratio) ? (g * y) * ratio : (g * y * b) / a
             : finite(g * large) ? (g * large) * small
                                 : (g * small) * large;
      }
    }
    if (range.need_other && !(a <= C(0))) {  // elsewhere there is no derivative by the exponent
      const C logarithm = log(a), product = g * y;
      db = lost(product, g) ? g * (y * logarithm) : product * logarithm;
    }
  }
  static __device__ void slopes(const Half& range, float g, float a, float b, float& da, float& db) {
    const Halves x(a, b);
    const float size = rough_log2(fabs(g)), before = x.one | (b == 1) ? 0 : (b - 1) * x.log2;  // log2 |a^(b-1)|
    const bool over = x.power >= range.log2_limit + (a == 0 ? 0 : x.nan_or_zero);  // 0 has no negative power
    const bool flat = over | (x.fractional & (a < 0) & (a >= kLowest)) | ((a == 0) & (b < 1));
    const float log_da = size + rough_log2(fabs(b)) + before,
                log_db = size + x.power + approx_log2(fabs(x.log2 * kLog2));
    const float slope = with_signs_of(rough_exp2(log_da), g, b, a, x.sign);
    const float other = with_signs_of(rough_exp2(log_db), g, x.log2);
    da = flat | (b == 0) ? 0 : slope;
    db = flat | (a <= 0) ? 0 : other;
  }
};

}  // namespace

SAFEOPS_BINARY(safe_pow, SafePow)

}  // namespace safeops::cuda
