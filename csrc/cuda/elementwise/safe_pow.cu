// safe_pow: a^b; 0 where it is not real (a < 0, b no integer); saturated where it does not fit into the output dtype.
#include "binary.cuh"

namespace safeops::cuda {
namespace {

// Terms of a^b that value and slopes share for fp16 and bf16. Conditions use & and |, since && and || become branches.
struct Halves {
  float log2, power;       // log2 |a|, log2 |a^b|
  bool one, fractional;    // one: |a| = 1, so |a^b| = 1; fractional: b is finite and not an integer
  float sign;              // a number with the sign of a^b
  float nan_or_zero;       // 0, or NaN if a or b is not finite

  __device__ Halves(float a, float b) : log2(log2_of(fabs(a))), nan_or_zero(0 * a + 0 * b) {
    one = (fabs(a) == 1) & ((a > 0) | (b == b));  // 1^NaN is 1, too
    power = one | (b == 0) ? 0 : b * log2;        // NaN^0 is 1, too
    // Near 1.5 * 2^23 fp32 numbers are 1 apart: the lowest bit of |b| + 1.5 * 2^23 is set if |b| is odd. fp16 and bf16
    // numbers of 2^22 and more are even.
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

// Returns g b part, the gradient of a, with y = a^b and part = a^(b-1).
template <class C>
__device__ inline C slope_of_base(C g, C a, C b, C y, C part) {
  const C slope = b * part;
  if (!(finite(a) && finite(b) && lost(slope, C(1)))) return g * slope;
  // From here on b part over- or underflows, but g b part may not.
  const bool larger = fabs(b) > fabs(part);
  const C large = larger ? b : part, small = larger ? part : b;
  // (1) If part itself over- or underflows, the result is g b y / a: g y / a times b; or g y times b / a if g y / a is
  //     infinite; or (g y b) / a if b / a is infinite, too.
  // (2) Else it is g times the larger of b and part, times the smaller one; in the reverse order if that overflows.
  const C turned = (g * y) / a, ratio = b / a;
  const bool beyond = !finite(part) || (part == C(0) && y != C(0));
  return beyond              ? finite(turned) ? turned * b : finite(ratio) ? (g * y) * ratio : (g * y * b) / a
         : finite(g * large) ? (g * large) * small
                             : (g * small) * large;
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
    // Slopes are 0 where a^b is not real, where it saturates, and at a = 0 for b < 1 (a^b is constant or infinitely
    // steep there).
    const bool flat = (both_finite && ((a < C(0) && b != trunc(b)) || range.overflows(y))) || (a == C(0) && b < C(1));
    da = db = C(0);
    if (flat) return;
    if (range.need_input && b != C(0)) {
      // part = a^(b-1). If a and b are finite and a^b is a normal number: a^b / a. Else: |a|^(b-1), with the sign of
      // a^b / a. For a < 0, pow's a^b is negative if b is odd, else positive (also for a = -inf and a fractional b).
      // Parity is tested on b, since b - 1 is rounded for a large b.
      const bool odd = b == trunc(b) && b / 2 != trunc(b / 2);
      const C part = both_finite && fabs(y) >= kSmallest ? y / a : pow(fabs(a), b - C(1)) * (a < C(0) && !odd ? -1 : 1);
      da = slope_of_base(g, a, b, y, part);
    }
    if (range.need_other && !(a <= C(0))) {  // for a <= 0, a^b has no derivative by b
      const C logarithm = log(a), product = g * y;
      db = lost(product, g) ? g * (y * logarithm) : product * logarithm;
    }
  }
  static __device__ void slopes(const Half& range, float g, float a, float b, float& da, float& db) {
    const Halves x(a, b);
    const float size = rough_log2(fabs(g)), before = x.one | (b == 1) ? 0 : (b - 1) * x.log2;  // log2 |a^(b-1)|
    const bool over = x.power >= range.log2_limit + (a == 0 ? 0 : x.nan_or_zero);  // also 0^-inf
    const bool flat = over | (x.fractional & (a < 0) & (a >= kLowest)) | ((a == 0) & (b < 1));
    const float log_da = size + rough_log2(fabs(b)) + before,
                log_db = size + x.power + approx_log2(fabs(x.log2 * kLog2));
    const float slope = with_signs_of(rough_exp2(log_da), g, b, a, x.sign);
    const float other = with_signs_of(rough_exp2(log_db), g, x.log2);
    da = flat | (b == 0) ? 0 : slope;
    db = flat | (a <= 0) ? 0 : other;
  }
};

// ---- b is one number for all elements, finite and not 0: its properties are computed before the launch

// An exponent b, with less_one = b - 1 for the slope. For a < 0, a^b is negative if b is odd, a^(b-1) if b is even.
struct Exponent {
  float b, less_one, log2_size;
  uint32_t odd, even;  // odd: the sign bit if b is odd, else 0; even: the reverse
  bool fractional;

  explicit Exponent(double number)
      : b(float(number)),
        less_one(float(number - 1)),
        log2_size(float(std::log2(std::fabs(number)))),
        odd(std::fabs(std::fmod(number, 2)) == 1 ? 0x80000000u : 0),
        even(odd ^ 0x80000000u),
        fractional(number != std::trunc(number)) {}

  __device__ bool none(float a) const { return fractional & (a < 0) & (a >= SafePow::kLowest); }
};

__device__ inline float with_signs(float size, uint32_t signs) {
  return __uint_as_float(__float_as_uint(size) ^ (signs & 0x80000000u));
}

struct PowerOfHalf : Functor<SafePow, Half, 1, 1> {
  Exponent exponent;
  __device__ void operator()(const float* in, bool, float* out) const {
    const float a = in[0], power = rough_exp2(exponent.b * log2_of(fabs(a)));
    const float fits = fminf(exponent.b == 2 ? a * a : power, range.largest + 0 * a);
    out[0] = exponent.none(a) ? 0 : with_signs(fits, __float_as_uint(a) & exponent.odd);
  }
};

struct PowerOfHalfBackward : Functor<SafePow, Half, 1, 2> {
  Exponent exponent;
  __device__ void operator()(const float* in, bool, float* out) const {
    const float g = in[0], a = in[1], log2 = log2_of(fabs(a));
    const float before = exponent.less_one == 0 ? 0 : exponent.less_one * log2;
    const bool over = exponent.b * log2 >= range.log2_limit + 0 * a;
    const bool flat = over | exponent.none(a) | ((a == 0) & (exponent.b < 1));
    const float slope = rough_exp2(rough_log2(fabs(g)) + exponent.log2_size + before);
    out[0] = flat ? 0 : with_signs(slope, __float_as_uint(g) ^ __float_as_uint(exponent.b) ^
                                              (__float_as_uint(a) & exponent.even));
  }
};

// a^b for |b| <= 4 where 2 b is an integer, as a product of a, a^2, a^4 and sqrt(a), or of their inverses. All factors
// are at least 1, or all at most 1, so no partial product over- or underflows unless a^b does.
struct Product {
  bool inverse, root;
  unsigned whole;  // the integer part of |b|

  explicit Product(double b) : inverse(b < 0), root(b != std::trunc(b)), whole(unsigned(std::fabs(b))) {}

  static bool has(double b) { return std::fabs(b) <= 4 && 2 * b == std::trunc(2 * b); }

  template <class C>
  __device__ C of(C a) const {
    if (root) a = fabs(a);
    C power = 1;
    if (root) power = inverse ? 1 / sqrt(a) : sqrt(a);
    if (inverse && whole) a = 1 / a;
    const C square = a * a;
    power *= whole & 1 ? a : C(1);
    power *= whole & 2 ? square : C(1);
    return whole & 4 ? power * (square * square) : power;
  }
};

template <class C>
struct SmallPower : Functor<Plain, Range<C>, 1, 1> {
  Product power;
  __device__ void operator()(const C* in, bool, C* out) const {
    const C a = in[0], y = power.of(a);
    const bool is_finite = finite(a);
    out[0] = power.root && a < C(0) && is_finite ? C(0)
                                                 : this->range.saturated(y, is_finite && this->range.overflows(y));
  }
};

template <class C>
struct SmallPowerBackward : Functor<Plain, Range<C>, 1, 2> {
  Product power, less_one;
  C b;
  __device__ void operator()(const C* in, bool, C* out) const {
    const C g = in[0], a = in[1], y = power.of(a), part = less_one.of(a);
    const bool none = power.root && a < C(0);
    const bool flat = (finite(a) && (none || this->range.overflows(y))) || (a == C(0) && b < C(1));
    out[0] = flat ? C(0) : slope_of_base(g, a, b, y, none ? -part : part);
  }
};

// Launches with the number b as exponent. small(range): the functor if a^b is a Product; any(range): else. If b is 0,
// infinite or NaN, elements are processed one at a time.
template <class Any, class Small, int N, class... Parameters>
void launch_power(Plan<N>& plan, bool wide, double b, const Any& any, const Small& small, cudaStream_t stream,
                  const Parameters&... parameters) {
  if (b != 0 && std::isfinite(b)) {
    if (Product::has(b)) launch_floating(plan, wide, small, stream, parameters...);
    else launch_floating(plan, wide, any, stream, parameters...);
  } else if (wide) {
    launch_general(plan, any(make_range<double>(parameters...)), stream);
  } else {
    launch_general(plan, any(make_range<float>(parameters...)), stream);
  }
}

}  // namespace

template <>
void launch_number<SafePow>(Plan<2>& plan, bool wide, double b, double eps, double fill, Type out,
                            cudaStream_t stream) {
  const auto any = [&](const auto& range) {
    using R = std::decay_t<decltype(range)>;
    if constexpr (R::kHalf) return PowerOfHalf{{range}, Exponent(b)};
    else return ByNumber<SafePow, R>{{range}, typename R::Value(b)};
  };
  const auto small = [&](const auto& range) {
    using R = std::decay_t<decltype(range)>;
    if constexpr (R::kHalf) return any(range);
    else return SmallPower<typename R::Value>{{range}, Product(b)};
  };
  launch_power(plan, wide, b, any, small, stream, eps, out, fill);
}

template <>
void launch_number_backward<SafePow>(Plan<3>& plan, bool wide, double b, double eps, Type out, cudaStream_t stream) {
  const auto any = [&](const auto& range) {
    using R = std::decay_t<decltype(range)>;
    if constexpr (R::kHalf) return PowerOfHalfBackward{{range}, Exponent(b)};
    else return ByNumberBackward<SafePow, R>{{range}, typename R::Value(b)};
  };
  const auto small = [&](const auto& range) {
    using R = std::decay_t<decltype(range)>;
    using C = typename R::Value;
    if constexpr (R::kHalf) return any(range);
    else return SmallPowerBackward<C>{{range}, Product(b), Product(b - 1), C(b)};
  };
  launch_power(plan, wide, b, any, small, stream, eps, out, 0.0, true, false);
}

SAFEOPS_BINARY(safe_pow, SafePow)

}  // namespace safeops::cuda
