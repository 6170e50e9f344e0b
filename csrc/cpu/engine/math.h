// exp, expm1, log, log1p, asin, acos, atan2 and pow, without a branch or a table: an `omp simd` loop over them
// vectorises for every instruction set. The methods are the classic ones: Cody and Waite's reduction for exp; for log
// the series in s = f/(2 + f), asin through sqrt((1 - x)/2), pow through a logarithm in two pieces as in Sun's fdlibm;
// the polynomials are minimax ones of our own (tests/cpu_math/remez.py). Subnormal, infinite, NaN operands are right.
//
// Where a result needs more digits than its type has, factors are split into halves, so that products of halves are
// exact; std::fma would be a library call on the baseline. The code is right whether or not the compiler contracts a *
// b + c.
//
// Largest errors in ulp over 4 million operands of all sizes (pow: 20 million) and the edges, baseline and AVX2, as
// tests/cpu_math/ulp.cpp measures them against a wider type:
//
//            exp    expm1  log    log1p  asin   acos   atan2  pow
//   float    0.77   0.86   0.78   1.37   0.80   0.77   0.51   0.51
//   double   0.80   1.17   0.82   1.37   0.84   0.78   0.94   0.81
//
// (log1p is log1p_unit, for operands from 0 to 1. log1p for any operand is tested by the losses that call it.)
#pragma once

#include <cmath>
#include <limits>

#include "cpu/engine/bits.h"

#define SAFEOPS_INLINE __attribute__((always_inline)) inline

namespace safeops::cpu::math {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Returns c0 + c1 x + c2 x^2 + ...
template <class C>
SAFEOPS_INLINE C polynomial(C, C c0) { return c0; }

template <class C, class... More>
SAFEOPS_INLINE C polynomial(C x, C c0, More... more) { return c0 + x * polynomial(x, more...); }

// min(x, high) and max(x, low), but NaN stays NaN.
template <class C>
SAFEOPS_INLINE C at_most(C x, C high) { return select(x > high, high, x); }

template <class C>
SAFEOPS_INLINE C at_least(C x, C low) { return select(x < low, low, x); }

// Returns x with only the upper half of its significant bits: products of two such numbers are exact.
SAFEOPS_INLINE float upper(float x) { return bit_cast<float>(bit_cast<uint32_t>(x) & 0xFFFFF000u); }
SAFEOPS_INLINE double upper(double x) { return bit_cast<double>(bit_cast<uint64_t>(x) & 0xFFFFFFFFF8000000u); }

// Returns a b - product, where `product` is a b rounded.
template <class C>
SAFEOPS_INLINE C product_error(C a, C b, C product) {
  const C a1 = upper(a), b1 = upper(b), a2 = a - a1, b2 = b - b1;
  return ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2;
}

// Constants of each type. x + kRound has round(x) in its low bits, for |x| < 2^22 (float) or 2^51 (double).
template <class C> struct Traits;

template <> struct Traits<float> {
  static constexpr float kRound = 0x1.8p+23f, kLog2Hi = 0x1.62e4p-1f, kLog2Lo = 0x1.7f7d1cp-20f;
  static constexpr float kHalfPi = 0x1.921fb6p+0f, kHalfPiLo = -0x1.777a5cp-25f;
  static constexpr int kExponentBits = 23, kBias = 127;

  static SAFEOPS_INLINE float exp_tail(float r) {  // exp(r) = 1 + r + r^2 P(r)
    return polynomial(r, 0x1.0p-1f, 0x1.555554p-3f, 0x1.55548ep-5f, 0x1.111270p-7f, 0x1.6d8d04p-10f, 0x1.9f094ap-13f);
  }
  static SAFEOPS_INLINE float asin_tail(float z) {  // asin(x) = x + x z P(z), z = x^2
    return polynomial(z, 0x1.55554cp-3f, 0x1.33387cp-4f, 0x1.6caecap-5f, 0x1.0491e0p-5f, 0x1.d91c00p-7f,
                      0x1.3356fcp-5f);
  }
};

template <> struct Traits<double> {
  static constexpr double kRound = 0x1.8p+52, kLog2Hi = 0x1.62e42fefa3800p-1, kLog2Lo = 0x1.ef35793c76730p-45;
  static constexpr double kHalfPi = 0x1.921fb54442d18p+0, kHalfPiLo = 0x1.1a62633145c07p-54;
  static constexpr int kExponentBits = 52, kBias = 1023;

  static SAFEOPS_INLINE double exp_tail(double r) {
    const double q = r * r;
    return polynomial(q, 0x1.0p-1, 0x1.5555555555504p-5, 0x1.6c16c16c300f2p-10, 0x1.a01a013774216p-16,
                      0x1.27e5b2a3bee2cp-22, 0x1.1e3f6c11ef081p-29) +
           r * polynomial(q, 0x1.555555555555bp-3, 0x1.111111110ec59p-7, 0x1.a01a01b37f74ep-13, 0x1.71ddf01e7f632p-19,
                          0x1.af6beaf5e3e99p-26);
  }
  static SAFEOPS_INLINE double asin_tail(double z) {
    const double q = z * z;
    return polynomial(q, 0x1.5555555555577p-3, 0x1.6db6db7214630p-5, 0x1.6e8bdef06c430p-6, 0x1.ca1fa440b3a0bp-7,
                      0x1.61401d891fd1ep-7, 0x1.63ab170c1a835p-6, 0x1.0b4c9f1432780p-5) +
           z * polynomial(q, 0x1.333333332e0fdp-4, 0x1.f1c71a944e454p-6, 0x1.1c49ef5497273p-6, 0x1.7584dbe988edap-7,
                          0x1.e5c2b6207a0f9p-9, -0x1.581131f7e2c02p-6);
  }
};

// Returns 2^n for an integer n, if 2^n is a normal number.
template <class C>
SAFEOPS_INLINE C power_of_two(C n) {
  using Bits = BitsOf<C>;
  constexpr C kBiased = Traits<C>::kRound + Traits<C>::kBias;
  return bit_cast<C>(static_cast<Bits>(bit_cast<Bits>(n + kBiased) << Traits<C>::kExponentBits));
}

// exp(x + lo), for |lo| much smaller than |x| and an x such that the result is neither 0 nor inf.
template <class C>
SAFEOPS_INLINE C exp_sum(C x, C lo) {
  using T = Traits<C>;
  const C n = (x * C(0x1.71547652b82fep+0) + T::kRound) - T::kRound;  // round(x / log 2)
  const C r = (x - n * T::kLog2Hi) + (lo - n * T::kLog2Lo);
  const C one = 1 + r, y = one + ((r - (one - 1)) + r * r * T::exp_tail(r));
  // 2^n is applied as two factors: 2^n itself may be subnormal, or overflow.
  const C half = (n * C(0.5) + T::kRound) - T::kRound;
  return y * power_of_two(half) * power_of_two(n - half);
}

SAFEOPS_INLINE float exp(float x) { return exp_sum(at_least(at_most(x, 89.0f), -104.0f), 0.0f); }
SAFEOPS_INLINE double exp(double x) { return exp_sum(at_least(at_most(x, 710.0), -746.0), 0.0); }

// exp(x) - 1 for x <= 0; -0 counts as 0.
template <class C>
SAFEOPS_INLINE C expm1_nonpositive(C x) {
  using T = Traits<C>;
  x = at_least(x, C(-40));  // at and below -40 the result rounds to -1
  const C n = (x * C(0x1.71547652b82fep+0) + T::kRound) - T::kRound;  // round(x / log 2)
  const C r = (x - n * T::kLog2Hi) - n * T::kLog2Lo, power = power_of_two(n);
  return power * (r + r * r * T::exp_tail(r)) + (power - 1);
}

// Splits a positive, finite x: x = (1 + f) 2^e, with 1 + f in [sqrt(1/2), sqrt(2)).
template <class C>
struct Parts { C f, e; };

SAFEOPS_INLINE Parts<float> parts(float x) {
  const bool small = x < 0x1p-126f;
  const uint32_t bits = bit_cast<uint32_t>(select(small, x * 0x1p+24f, x)) - 0x3F3504F3u;
  const float m = bit_cast<float>((bits & 0x007FFFFFu) + 0x3F3504F3u);
  const float e = static_cast<float>(static_cast<int32_t>(bits) >> 23);
  return {m - 1, e - select_or_zero(small, 24.0f)};
}

// root: the bits of a double. 1 + f is in [root, 2 root).
SAFEOPS_INLINE Parts<double> parts(double x, uint64_t root = 0x3FE6A09E667F3BCDu) {
  const bool small = x < 0x1p-1022;
  constexpr uint64_t kOne = 0x3FF0000000000000u;
  const uint64_t bits = bit_cast<uint64_t>(select(small, x * 0x1p+54, x)) - root;
  const double m = bit_cast<double>((bits & 0x000FFFFFFFFFFFFFu) + root);
  // Converts the integer without an instruction, which only AVX-512 has: the biased exponent goes into the bits of
  // 2^52.
  const double e = bit_cast<double>(((bits + kOne) >> 52) | 0x4330000000000000u) - (0x1p+52 + 1023);
  return {m - 1, e - select_or_zero(small, 54.0)};
}

// Returns log(1 + f) + e log 2.
SAFEOPS_INLINE float log_of(const Parts<float>& x) {
  const float f = x.f, q = f * f;
  // log(1 + f) = f - f^2/2 + f^3 P(f)
  const float p = polynomial(f, 0x1.555548p-2f, -0x1.000006p-2f, 0x1.99a4b4p-3f, -0x1.555c48p-3f, 0x1.23378ap-3f,
                             -0x1.fc22dap-4f, 0x1.e6ef68p-4f, -0x1.de371ap-4f, 0x1.1453e4p-4f);
  const float tail = f * q * p + x.e * Traits<float>::kLog2Lo;
  return x.e * Traits<float>::kLog2Hi + (f - (0.5f * q - tail));
}

SAFEOPS_INLINE double log_of(const Parts<double>& x) {
  const double f = x.f, s = f / (2 + f), z = s * s, half = 0.5 * f * f;
  // log(1 + f) = 2 s + s z P(z), and 2 s = f - f^2/2 + s f^2/2
  const double p = z * polynomial(z, 0x1.5555555555592p-1, 0x1.999999997fd80p-2, 0x1.24924941f49b3p-2,
                                  0x1.c71c52064fa39p-3, 0x1.74663f9396b8cp-3, 0x1.39a1a8791e53ep-3,
                                  0x1.2f0624af94b43p-3);
  return x.e * Traits<double>::kLog2Hi + (f - (half - (s * (half + p) + x.e * Traits<double>::kLog2Lo)));
}

// Returns log(x) for x > 0; inf and NaN stay as they are.
template <class C>
SAFEOPS_INLINE C log_positive(C x) { return select(x < C(kInf), log_of(parts(x)), x); }

template <class C>
SAFEOPS_INLINE C log(C x) {
  const C y = select(x == 0, C(-kInf), log_positive(x));
  return select(x < 0, std::numeric_limits<C>::quiet_NaN(), y);
}

// Returns log(1 + x) for 0 <= x <= 1.
template <class C>
SAFEOPS_INLINE C log1p_unit(C x) {
  const bool large = x > C(0x1.a827999fcef32p-2);  // beyond sqrt(2) - 1: 1 + x = 2 (1 + f) with f = (x - 1) / 2
  return log_of(Parts<C>{select(large, (x - 1) * C(0.5), x), select_or_zero(large, C(1))});
}

// log(1 + x) for any x: log(u) + (rounding error of u) / u, with u = 1 + x rounded.
template <class C>
SAFEOPS_INLINE C log1p(C x) {
  const C u = 1 + x, lost = x - (u - 1);
  return log(u) + select_or_zero(u > 0 && u < C(kInf), lost / u);
}

// An angle hi + lo, from which asin and acos are computed, for a = |x| in [0, 1]:
//     a <= 1/2:         hi + lo = asin(a)
//     a > 1/2 (large):  hi + lo = 2 asin(sqrt((1 - a)/2)), so that asin(a) = pi/2 - (hi + lo)
template <class C>
struct Arc {
  bool large;
  C hi, lo;

  explicit SAFEOPS_INLINE Arc(C a) : large(a > C(0.5)) {
    const C z = select(large, (1 - a) * C(0.5), a * a);
    const C root = std::sqrt(z), leg = select(large, root, a);
    const C tail = leg * (z * Traits<C>::asin_tail(z));
    const C head = upper(root), rest = (z - head * head) / (root + head);  // sqrt(z) = head + rest
    hi = select(large, 2 * head, a);
    lo = select(large, 2 * (select_or_zero(z > 0, rest) + tail), tail);
  }
};

template <class C>
SAFEOPS_INLINE C asin(C x) {
  using T = Traits<C>;
  const Arc<C> arc(at_most(std::fabs(x), C(1)));
  // pi/2 - (hi + lo), as pi/4 + (pi/4 - hi - lo): smaller sums have smaller rounding errors.
  const C far = T::kHalfPi / 2 + ((T::kHalfPi / 2 - arc.hi) + (T::kHalfPiLo - arc.lo));
  return std::copysign(select(arc.large, far, arc.hi + arc.lo), x);
}

template <class C>
SAFEOPS_INLINE C acos(C x) {
  using T = Traits<C>;
  const Arc<C> arc(at_most(std::fabs(x), C(1)));
  // Large arcs: the arc if x > 0, pi - arc if x < 0. Else: pi/2 - arc if x >= 0, pi/2 + arc if x < 0.
  const bool negative = x < 0;
  const C quarters = select(arc.large, select_or_zero(negative, C(2)), C(1));
  const bool minus = arc.large == negative;
  const C hi = select(minus, -arc.hi, arc.hi), lo = select(minus, -arc.lo, arc.lo);
  return quarters * T::kHalfPi + (hi + (lo + quarters * T::kHalfPiLo));
}

// The angle of the point (x, y); 0 at the origin. x = -0 counts as 0.
SAFEOPS_INLINE float atan2(float y, float x) {
  constexpr double kPi = 0x1.921fb54442d18p+1;
  // In double the quotient of floats neither overflows nor underflows, and a large number may replace inf.
  const double a = at_most<double>(std::fabs(y), 0x1p+1000), b = at_most<double>(std::fabs(x), 0x1p+1000);
  const bool steep = a > b;
  const double low = select(steep, b, a), high = select(steep, a, b);
  const bool turned = low > high * 0x1.a827999fcef32p-2;  // q = low/high > tan(pi/8): pi/4 + atan((q - 1)/(q + 1))
  const double t = (low - select_or_zero(turned, high)) / (select(high == 0, 1.0, high) + select_or_zero(turned, low));
  const double z = t * t;
  double angle = t + t * z * polynomial(z, -0x1.555554c5f0b76p-2, 0x1.999918921287fp-3, -0x1.247ed89f2244fp-3,
                                        0x1.c463d058ff12fp-4, -0x1.5b2f20e2e01c7p-4, 0x1.849da2f2e4880p-5);
  angle = angle + select_or_zero(turned, kPi / 4);
  angle = select(steep, kPi / 2 - angle, angle);
  angle = select(static_cast<double>(x) < 0, kPi - angle, angle);
  return std::copysign(static_cast<float>(angle), y);
}

// A power of two. Its product with x is in [1, 4), or a normal number if x is subnormal.
SAFEOPS_INLINE double scale_of(double x) {
  const uint64_t exponent = bit_cast<uint64_t>(x) & 0x7FF0000000000000u;
  const double scale = bit_cast<double>(0x7FE0000000000000u - exponent);
  return select(std::fabs(x) < 0x1p+1023, scale, 0x1p-1022);
}

SAFEOPS_INLINE double atan2(double y, double x) {
  const bool steep = std::fabs(y) > std::fabs(x);
  double low = std::fabs(select(steep, x, y)), high = std::fabs(select(steep, y, x));
  const bool infinite = high == kInf;
  low = select(infinite, select(low == kInf, 1.0, low * 0), low);  // NaN stays NaN
  high = select(infinite, 1.0, select(high == 0, 1.0, high));
  const double scale = scale_of(high);
  low *= scale;
  high *= scale;
  // t = top / bottom; top_rest and bottom_rest are the rounding errors of top and bottom
  const bool turned = low > high * 0x1.a827999fcef32p-2;
  const double taken = select_or_zero(turned, high), added = select_or_zero(turned, low);
  const double top = low - taken, bottom = high + added;
  const double top_rest = select_or_zero(turned, low - (top + taken)), bottom_rest = added - (bottom - high);
  const double t = top / bottom, product = t * bottom;
  const double rest = ((top - product) - product_error(t, bottom, product) + (top_rest - t * bottom_rest)) / bottom;
  const double z = t * t, q = z * z;
  const double p = polynomial(q, -0x1.555555555553dp-2, -0x1.24924922a9fc6p-3, -0x1.745cf8bf65b0cp-4,
                              -0x1.10eba547a019ap-4, -0x1.9cce8900a91dbp-5, -0x1.255598cd86905p-6) +
                   z * polynomial(q, 0x1.99999999957c1p-3, 0x1.c71c70e4ec235p-4, 0x1.3b111749721b5p-4,
                                  0x1.df0e4b4fd5adap-5, 0x1.37cb9ccc5d055p-5);
  const double tail = t * z * p + select_or_zero(std::fabs(t) > 0x1p-900, rest);
  // The angle is k pi/4 +- (t + tail). k kHalfPi / 2 is exact for k <= 4.
  const bool negative = x < 0;
  double k = select_or_zero(turned, 1.0);
  k = select(steep, 2 - k, k);
  k = select(negative, 4 - k, k);
  const bool minus = steep != negative;
  const double angle = k * (Traits<double>::kHalfPi / 2) +
                       (select(minus, -t, t) + (select(minus, -tail, tail) + k * (Traits<double>::kHalfPiLo / 2)));
  return std::copysign(angle, y);
}

}  // namespace safeops::cpu::math
