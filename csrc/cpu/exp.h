// exp in a few branch-free operations, so that loops of it vectorise for every instruction set. Within 1 ulp.
#pragma once

#include "convert.h"

namespace safeops::cpu {

// x = k ln2 + r, |r| <= ln2/2;  e^x = 2^k e^r.  2^k is applied as two factors: k reaches below the normal exponents.
// (The sum with 1.5 * 2^23 rounds to an integer, and leaves it in the low bits.)
inline float exp_(float x) {
  const float bounded = select(x < -105.f, -105.f, select(x > 89.f, 89.f, x));
  const float shifted = bounded * 0x1.715476p+0f + 0x1.8p+23f;
  const float k = shifted - 0x1.8p+23f;
  const float r = (bounded - k * 0x1.63p-1f) + k * 0x1.bd0106p-13f;  // ln2 = 355/512 - 2.12e-4
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.f;
  const int32_t n = bit_cast<int32_t>(shifted) - bit_cast<int32_t>(0x1.8p+23f), half = n >> 1;
  const float first = bit_cast<float>((half + 127) << 23), second = bit_cast<float>((n - half + 127) << 23);
  return p * first * second;
}

inline double exp_(double x) {
  const double bounded = select(x < -750.0, -750.0, select(x > 710.0, 710.0, x));
  const double shifted = bounded * 0x1.71547652b82fep+0 + 0x1.8p+52;
  const double k = shifted - 0x1.8p+52;
  const double r = (bounded - k * 0x1.62e42feep-1) - k * 0x1.a39ef35793c76p-33;
  double p = 1.0 / 6227020800.0;  // Taylor's series: r^14 / 14! is below the last bit
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * (r * r) + r + 1.0;
  // k/2 is rounded like k: before AVX-512 there is no arithmetic shift of 64 bits.
  const int64_t n = bit_cast<int64_t>(shifted) - bit_cast<int64_t>(0x1.8p+52);
  const int64_t half = bit_cast<int64_t>(k * 0.5 + 0x1.8p+52) - bit_cast<int64_t>(0x1.8p+52);
  const double first = bit_cast<double>((half + 1023) << 52), second = bit_cast<double>((n - half + 1023) << 52);
  return p * first * second;
}

}  // namespace safeops::cpu
