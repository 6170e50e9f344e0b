// exp without a branch, so that loops over it vectorise. Its error is at most 1 ulp, subnormal results included.
#pragma once

#include <cmath>
#include <limits>

#include "cpu/engine/bits.h"

namespace safeops::cpu {

// e^x = 2^n e^r with n = round(x / ln 2) and |r| <= ln(2) / 2. n ln 2 is subtracted in two parts; the product with the
// first part is exact. Adding kRound leaves n in the low bits of `shifted`. A left shift moves these bits into the
// exponent field and drops all others.

namespace detail {

constexpr float kRound = 0x1.8p+23f;
constexpr double kRoundDouble = 0x1.8p+52;

inline float exp_reduced(float x, float& shifted) {
  shifted = x * 0x1.715476p+0f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
  const float high = 0x1.1110ep-7f + r * (0x1.6d4316p-10f + r * 0x1.a124e4p-13f);
  const float q = 0x1p-1f + r * (0x1.555556p-3f + r * (0x1.5554eap-5f + r * high));
  return 1.0f + (r + r * r * q);
}

template <class T>  // double, or a vector of doubles
inline T exp_reduced(const T& x, T& shifted) {
  shifted = x * 0x1.71547652b82fep+0 + kRoundDouble;
  const T n = shifted - kRoundDouble;
  const T r = (x - n * 0x1.62e42fefp-1) - n * 0x1.473de6af278edp-34;
  const T high = 0x1.a01a01a7c2efep-13 +
                 r * (0x1.a019b9149a41cp-16 +
                      r * (0x1.71de0db2f6b19p-19 + r * (0x1.28917c89a43a7p-22 + r * 0x1.af389ecfc4b9cp-26)));
  const T q =
      0x1p-1 +
      r * (0x1.5555555555556p-3 +
           r * (0x1.5555555553d68p-5 + r * (0x1.11111111109b5p-7 + r * (0x1.6c16c17889ef1p-10 + r * high))));
  const T near = 1.0 + r;
  return near + (r * r * q + (r - (near - 1.0)));
}

}  // namespace detail

// e^x for x <= 0 or NaN. 2^n is multiplied by 2^64, so that the factor is a normal number; the division of the product
// by 2^64 rounds the result once.
inline float exp_nonpositive(float x) {
  float shifted;
  const float e = detail::exp_reduced(x, shifted);
  const float power = bit_cast<float>((bit_cast<uint32_t>(shifted) << 23) + ((127u + 64u) << 23));
  return select_or_zero(!(x < -104.0f), e * power * 0x1p-64f);
}

inline double exp_nonpositive(double x) {
  double shifted;
  const double e = detail::exp_reduced(x, shifted);
  const double power = bit_cast<double>((bit_cast<uint64_t>(shifted) << 52) + (uint64_t{1023 + 64} << 52));
  return select_or_zero(!(x < -746.0), e * power * 0x1p-64);
}

// ---- For sums of exponentials and probabilities. T is a number or a GNU vector of numbers.

namespace detail {

// Returns e^x / 2^n, with e^x = 2^n 2^f, n = round(t) and t = x / ln 2 = n + f. Rounding 1 / ln 2 changes e^x by |x|
// 1.3e-8, less than the rounding of x itself does, and saves a subtraction. The low bits of `shifted` are n + kBias.
template <int kBias, class T>
inline T exp2_reduced(const T& x, T& shifted) {
  if constexpr (std::is_same_v<ElementOf<T>, float>) {
    shifted = x * 0x1.715476p+0f + (kRound + kBias);
    const T f = x * 0x1.715476p+0f - (shifted - (kRound + kBias));
    const T high = 0x1.c6b752p-5f + f * (0x1.3ceaap-7f + f * 0x1.5bba6cp-10f);
    return 1.0f + f * (0x1.62e42ap-1f + f * (0x1.ebf9bcp-3f + f * high));
  } else {
    const T e = exp_reduced(x, shifted);
    shifted += kBias;
    return e;
  }
}

}  // namespace detail

// 2^kRaise e^x for x <= 0 or NaN; 0 if that is less than the smallest normal number. For float the error is at most 3
// ulp, plus that of rounding x.
template <int kRaise, class T>
inline T exp_raised(const T& x) {
  using C = ElementOf<T>;
  using Bits = WithElement<T, BitsOf<C>>;
  constexpr int kLeast = std::numeric_limits<C>::min_exponent - 1 - kRaise;
  T shifted;
  const T e = detail::exp2_reduced<std::numeric_limits<C>::max_exponent - 1 + kRaise>(x, shifted);
  // 2^n is a factor of its own: if n were added to the exponent bits of e, a NaN would become a number.
  const T power = bit_cast<T>(static_cast<Bits>(bit_cast<Bits>(shifted) << (std::numeric_limits<C>::digits - 1)));
  return zero_where(x < C(kLeast * 0x1.62e42fefa39efp-1), T(e * power));
}

// For products of exponentials that may be subnormal: exp_raised<kLowest<C>>(x) times a factor keeps all its digits, so
// that dividing the product by 2^kLowest<C> rounds it once.
template <class C>
constexpr int kLowest = std::numeric_limits<C>::digits;

// Returns e^x, x <= 0, for a sum that contains a 1: terms too small to be normal numbers may become 0.
template <class T>
inline T exp_term(const T& x) {
  return exp_raised<0>(x);
}

// e^x for any x. 2^n is applied as two factors, so that each is a normal number.
inline float exp_(float x) {
  float shifted;
  const float e = detail::exp_reduced(x, shifted);
  const int32_t n = bit_cast<int32_t>(shifted) - bit_cast<int32_t>(detail::kRound), half = n >> 1;
  // If x is NaN, n is any integer, and the shift may lose bits of it, which is defined only for unsigned integers.
  const uint32_t low = half + 127, high = n - half + 127;
  const float first = bit_cast<float>(low << 23), second = bit_cast<float>(high << 23);
  return select(x > 89.0f, HUGE_VALF, select_or_zero(!(x < -104.0f), e * first * second));
}

inline double exp_(double x) {
  double shifted;
  const double e = detail::exp_reduced(x, shifted);
  // Adding 2048 makes n positive: AVX2 has no arithmetic right shift of 64-bit integers.
  const uint64_t n = bit_cast<uint64_t>(shifted) - bit_cast<uint64_t>(detail::kRoundDouble) + 2048, half = n >> 1;
  const double first = bit_cast<double>((half - 1024 + 1023) << 52);
  const double second = bit_cast<double>((n - half - 1024 + 1023) << 52);
  return select(x > 710.0, HUGE_VAL, select_or_zero(!(x < -746.0), e * first * second));
}

}  // namespace safeops::cpu
