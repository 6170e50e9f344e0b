// pow and its derivatives, through a logarithm with more digits than the type has. The rules at the head of math.h
// hold.
#pragma once

#include "cpu/engine/math.h"

namespace safeops::cpu::math {

// A number with twice the digits of a double: hi + lo.
struct Twice { double hi, lo; };

// Returns a + b exactly; requires |a| >= |b| or a = 0.
SAFEOPS_INLINE Twice sum(double a, double b) {
  const double hi = a + b;
  return {hi, b - (hi - a)};
}

// log(x) with a relative error of about 2^-68, for finite x > 0. (For inf and NaN it returns a finite number that
// nobody uses.)
SAFEOPS_INLINE Twice log_wide(double x) {
  // x = m 2^e with m in [sqrt(3)/2, sqrt(3)). c is the one of 1 and 3/2 that is nearer to m. s = (m - c)/(m + c).
  const Parts<double> part = parts(x, 0x3FEBB67AE8584CAAu);
  const double m = part.f + 1;
  const bool upper_half = m > 0x1.3988e1409212ep+0;
  const double c = select(upper_half, 1.5, 1.0), top = m - c;
  const Twice bottom = sum(c, m);
  const double s = top / bottom.hi, product = s * bottom.hi;
  const double rest = ((top - product) - product_error(s, bottom.hi, product) - s * bottom.lo) / bottom.hi;
  const double s1 = upper(s), s2 = (s - s1) + rest;
  // log(m/c) = 2/3 s (3 + s^2 + s^4 P(s^2)). Products of the leading halves (s1, t1, v1) are exact.
  const double z = s * s, z1 = s1 * s1;
  const double p = z * z * polynomial(z, 0x1.3333333333333p-1, 0x1.b6db6db6db477p-2, 0x1.55555555b534ap-2,
                                      0x1.1745d0fa7e924p-2, 0x1.d89e36dfe887bp-3, 0x1.995420fcf6d4cp-3,
                                      0x1.7820e9fa12fe0p-3) + s2 * (s1 + s);
  const double t1 = upper(3 + (z1 + p)), t2 = p - ((t1 - 3) - z1);
  const double u1 = s1 * t1, u2 = s2 * t1 + t2 * s;
  const double v1 = upper(u1 + u2), v2 = u2 - (v1 - u1);
  const double w1 = v1 * 0x1.5555550000000p-1, w2 = v1 * 0x1.5555555555555p-27 + v2 * 0x1.5555555555555p-1;
  // base + base2 = e log 2 + log c; `base` is exact.
  const double base = part.e * Traits<double>::kLog2Hi + select_or_zero(upper_half, 0x1.9f323ecbf9800p-2);
  const double base2 = part.e * Traits<double>::kLog2Lo + select_or_zero(upper_half, 0x1.2fcada35d9bd0p-48);
  const Twice total = sum(base, w1);
  return sum(total.hi, total.lo + (w2 + base2));
}

// Returns exp(x + lo) for any x; `lo` is much smaller than x.
SAFEOPS_INLINE double exp_twice(double x, double lo) {
  const bool inside = std::fabs(x) < 800;
  return exp_sum(at_least(at_most(x, 800.0), -800.0), select_or_zero(inside, lo));
}

// log(x) for a float x > 0: one double has enough digits, so lo is 0.
SAFEOPS_INLINE Twice log_wide(float x_) {
  const double x = x_;
  const uint64_t root = 0x3FE6A09E667F3BCDu, bits = bit_cast<uint64_t>(x) - root;
  const double f = bit_cast<double>((bits & 0x000FFFFFFFFFFFFFu) + root) - 1;
  const double e = bit_cast<double>(((bits + 0x3FF0000000000000u) >> 52) | 0x4330000000000000u) - (0x1p+52 + 1023);
  const double s = f / (2 + f), z = s * s;
  return {e * 0x1.62e42fefa39efp-1 +
              (2 * s + s * z * polynomial(z, 0x1.555555561e46bp-1, 0x1.999996a94403bp-2, 0x1.249411f04dd4bp-2,
                                          0x1.c62b141275514p-3, 0x1.911595b80e2c2p-3)),
          0};
}

// |x|^y, |x|^(y - 1) and log|x|, for 0 < |x| < inf.
struct Magnitude { double power, lower_power, log; };

SAFEOPS_INLINE Magnitude magnitude(double, double y, Twice log) {
  y = at_least(at_most(y, 0x1p+65), -0x1p+65);  // for larger |y|, all powers but 1^y are 0 or inf
  const double t = y * log.hi, t2 = product_error(y, log.hi, t) + y * log.lo;
  const double d = t - log.hi, part = d - t, d2 = (t - (d - part)) - (log.hi + part) + (t2 - log.lo);
  return {exp_twice(t, t2), exp_twice(d, d2), log.hi};
}

SAFEOPS_INLINE Magnitude magnitude(float x, float y_, Twice log) {
  using Limits = std::numeric_limits<float>;
  const double y = at_least(at_most(y_, Limits::max()), Limits::lowest());
  const double t = at_least(at_most(y * log.hi, 700.0), -700.0);
  const double n = (t * 0x1.71547652b82fep+0 + Traits<double>::kRound) - Traits<double>::kRound;
  const double r = t - n * 0x1.62e42fefa39efp-1;
  const double tail = polynomial(r, 0x1.0000003a2006ap-1, 0x1.555554437243fp-3, 0x1.55548dc9c9e59p-5,
                                 0x1.1112704155fedp-7, 0x1.6d8d037a8c5ecp-10, 0x1.9f0949f4e0a2cp-13);
  const double power = select_or_zero(!(t < -300), (1 + (r + r * r * tail)) * power_of_two(n));
  return {power, power / x, log.hi};
}

template <class C>
SAFEOPS_INLINE bool is_integer(C y) {
  constexpr C kWhole = sizeof(C) == 4 ? C(0x1p+23) : C(0x1p+52);  // all numbers >= kWhole are integers
  const C a = std::fabs(y);
  return (a >= kWhole) | ((a + kWhole) - kWhole == a);
}

// x^y as the C library's pow defines it, and the factors of its derivatives. The factors are doubles even if C is
// float, since they may exceed float's range. x and y are compared in type C: a register holds twice as many floats as
// doubles.
template <class C>
struct Power {
  C x, y, a;  // a = |x|
  bool real;  // false for a finite negative x with a fractional y
  C value;

  // log must be log_wide(|x|).
  SAFEOPS_INLINE Power(C x_, C y_, Twice log) : x(x_), y(y_), a(std::fabs(x_)), inner(magnitude(a, y_, log)) {
    const bool integer = is_integer(y);
    odd = integer & !is_integer(y * C(0.5));
    edge = (a == 0) | (a == kInf);
    real = (x >= 0) | (a == kInf) | integer | (x != x) | (y != y);
    value = select(edge, at_edge(a, y), static_cast<C>(inner.power));
    value = select(x == x, value, x);
    value = flip(select((y == 0) | (x == 1), C(1), value), odd);
  }

  // Returns g y x^(y - 1), the gradient with respect to x. If the power is 0, y is left out: g y may overflow, and inf
  // times 0 would be NaN.
  SAFEOPS_INLINE C base_slope(C g_) const {
    const double g = g_;
    double inside = g * select(inner.lower_power == 0, 1.0, double(y)) * inner.lower_power;
    if constexpr (sizeof(C) == 8)  // a^(y - 1) may overflow, but its product with g not
      inside = select(std::fabs(inner.lower_power) == kInf, g * y * inner.power / a, inside);
    C lower_power = select(edge, at_edge(a, y - 1), static_cast<C>(inner.lower_power));
    lower_power = select(x == x, lower_power, select(y == 1, C(1), x));
    const bool endless = !(std::fabs(y) < kInf);
    const C outside = g_ * select((lower_power == 0) & !endless, C(1), y) * lower_power;
    return flip(select(edge | endless | (x != x), outside, static_cast<C>(inside)), !odd);
  }

  // Returns g log(x) x^y, the gradient with respect to y, for x > 0.
  SAFEOPS_INLINE C exponent_slope(C g) const {
    const bool endless = !(a < kInf) | (y != y);
    const C outside = g * select(a < kInf, static_cast<C>(inner.log), a) * value;
    double slope = double(g) * inner.log * inner.power;
    if constexpr (sizeof(C) == 8)  // if |g| is large, g log(x) may overflow: the power is multiplied first
      slope = select(std::fabs(g) > 0x1p1000, g * inner.power * inner.log, slope);
    return select(endless, outside, static_cast<C>(slope));
  }

 private:
  Magnitude inner;
  bool edge, odd;

  // Returns a^y, for a = 0 or a = inf.
  static SAFEOPS_INLINE C at_edge(C a, C y) {
    const C limit = select_or_zero((a > 1) == (y > 0), C(kInf));
    return select(y == 0, C(1), select(y == y, limit, y));
  }

  // Returns -magnitude if x is negative and `wanted` is true, else magnitude.
  SAFEOPS_INLINE C flip(C magnitude, bool wanted) const {
    using Bits = BitsOf<C>;
    const Bits sign = static_cast<Bits>(bit_cast<Bits>(x) & bit_cast<Bits>(C(-0.0)));
    return bit_cast<C>(static_cast<Bits>(bit_cast<Bits>(magnitude) ^ (sign & static_cast<Bits>(-Bits{wanted}))));
  }
};

template <class C>
SAFEOPS_INLINE C pow(C x, C y) {
  const Power<C> power(x, y, log_wide(std::fabs(x)));
  return select(power.real, power.value, std::numeric_limits<C>::quiet_NaN());
}

}  // namespace safeops::cpu::math
