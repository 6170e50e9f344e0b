// exp, branch free: it vectorises inside any loop. At most 1 ulp off, subnormal results included.
#pragma once

#include "cpu/engine/convert.h"

namespace safeops::cpu {

// e^x = 2^n e^r with n = round(x / ln 2) and |r| <= ln(2) / 2; ln 2 is subtracted in two parts, the first of them
// exact. `shifted` holds n in its low bits, which are all that a shift to the exponent's place leaves of it.

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

inline double exp_reduced(double x, double& shifted) {
  shifted = x * 0x1.71547652b82fep+0 + kRoundDouble;
  const double n = shifted - kRoundDouble;
  const double r = (x - n * 0x1.62e42fefp-1) - n * 0x1.473de6af278edp-34;
  const double high = 0x1.a01a01a7c2efep-13 +
                      r * (0x1.a019b9149a41cp-16 +
                           r * (0x1.71de0db2f6b19p-19 + r * (0x1.28917c89a43a7p-22 + r * 0x1.af389ecfc4b9cp-26)));
  const double q =
      0x1p-1 +
      r * (0x1.5555555555556p-3 +
           r * (0x1.5555555553d68p-5 + r * (0x1.11111111109b5p-7 + r * (0x1.6c16c17889ef1p-10 + r * high))));
  const double near = 1.0 + r;
  return near + (r * r * q + (r - (near - 1.0)));
}

}  // namespace detail

// For x <= 0 or NaN. The power is multiplied by 2^64, so that it is a normal number, and the product is divided by it
// again, with one rounding.
inline float exp_below(float x) {
  float shifted;
  const float e = detail::exp_reduced(x, shifted);
  const float power = bit_cast<float>((bit_cast<uint32_t>(shifted) << 23) + ((127u + 64u) << 23));
  return select_or_zero(!(x < -104.0f), e * power * 0x1p-64f);
}

inline double exp_below(double x) {
  double shifted;
  const double e = detail::exp_reduced(x, shifted);
  const double power = bit_cast<double>((bit_cast<uint64_t>(shifted) << 52) + (uint64_t{1023 + 64} << 52));
  return select_or_zero(!(x < -746.0), e * power * 0x1p-64);
}

// exp_below as a term of a sum that has a 1 in it: 0 where it would be subnormal, which spares a multiplication (a
// tenth of a logsumexp's time).
inline float exp_term(float x) {
  float shifted;
  const float e = detail::exp_reduced(x, shifted);
  const float power = bit_cast<float>((bit_cast<uint32_t>(shifted) << 23) + (127u << 23));
  return select_or_zero(!(x < -87.0f), e * power);
}

inline double exp_term(double x) {
  double shifted;
  const double e = detail::exp_reduced(x, shifted);
  const double power = bit_cast<double>((bit_cast<uint64_t>(shifted) << 52) + (uint64_t{1023} << 52));
  return select_or_zero(!(x < -708.0), e * power);
}

// For any x. The power is multiplied in two halves, so that neither leaves the normal numbers.
inline float exp_(float x) {
  float shifted;
  const float e = detail::exp_reduced(x, shifted);
  const int32_t n = bit_cast<int32_t>(shifted) - bit_cast<int32_t>(detail::kRound), half = n >> 1;
  const float first = bit_cast<float>((half + 127) << 23), second = bit_cast<float>((n - half + 127) << 23);
  return select(x > 89.0f, HUGE_VALF, select_or_zero(!(x < -104.0f), e * first * second));
}

inline double exp_(double x) {
  double shifted;
  const double e = detail::exp_reduced(x, shifted);
  // Biased to be positive: AVX2 has no arithmetic shift of 64 bits.
  const uint64_t n = bit_cast<uint64_t>(shifted) - bit_cast<uint64_t>(detail::kRoundDouble) + 2048, half = n >> 1;
  const double first = bit_cast<double>((half - 1024 + 1023) << 52);
  const double second = bit_cast<double>((n - half - 1024 + 1023) << 52);
  return select(x > 710.0, HUGE_VAL, select_or_zero(!(x < -746.0), e * first * second));
}

}  // namespace safeops::cpu
