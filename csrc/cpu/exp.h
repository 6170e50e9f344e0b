// exp, branch free: it vectorises inside any loop. At most 1 ulp off, subnormal results included.
#pragma once

#include "convert.h"

namespace safeops::cpu {

// e^x = 2^n e^r with n = round(x / ln 2) and |r| <= ln(2) / 2; ln 2 is subtracted in two parts, the first of them exact.
// 2^n is multiplied in two halves, so that neither leaves the normal numbers.

inline float exp_(float x) {
  x = x < -104.0f ? -104.0f : x;  // 0 from here on; NaN compares false, and passes
  x = x > 89.0f ? 89.0f : x;      // inf
  constexpr float kRound = 0x1.8p+23f;
  const float shifted = x * 0x1.715476p+0f + kRound, n = shifted - kRound;
  const float r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
  const float q = 0x1p-1f + r * (0x1.5554dep-3f + r * (0x1.55551ap-5f + r * (0x1.120b62p-7f + r * 0x1.6d10fcp-10f)));
  const float near = 1.0f + r, e = near + (r * r * q + (r - (near - 1.0f)));
  const int32_t power = bit_cast<int32_t>(shifted) - bit_cast<int32_t>(kRound), half = power >> 1;
  const float first = bit_cast<float>((half + 127) << 23), second = bit_cast<float>((power - half + 127) << 23);
  return e * first * second;
}

inline double exp_(double x) {
  x = x < -746.0 ? -746.0 : x;
  x = x > 710.0 ? 710.0 : x;
  constexpr double kRound = 0x1.8p+52;
  const double shifted = x * 0x1.71547652b82fep+0 + kRound, n = shifted - kRound;
  const double r = (x - n * 0x1.62e42fefp-1) - n * 0x1.473de6af278edp-34;
  const double high = 0x1.a01a01a7c2efep-13 +
                      r * (0x1.a019b9149a41cp-16 +
                           r * (0x1.71de0db2f6b19p-19 + r * (0x1.28917c89a43a7p-22 + r * 0x1.af389ecfc4b9cp-26)));
  const double q =
      0x1p-1 +
      r * (0x1.5555555555556p-3 +
           r * (0x1.5555555553d68p-5 + r * (0x1.11111111109b5p-7 + r * (0x1.6c16c17889ef1p-10 + r * high))));
  const double near = 1.0 + r, e = near + (r * r * q + (r - (near - 1.0)));
  // Biased to be positive: AVX2 has no arithmetic shift of 64 bits.
  const uint64_t power = bit_cast<uint64_t>(shifted) - bit_cast<uint64_t>(kRound) + 2048, half = power >> 1;
  const double first = bit_cast<double>((half - 1024 + 1023) << 52);
  const double second = bit_cast<double>((power - half - 1024 + 1023) << 52);
  return e * first * second;
}

}  // namespace safeops::cpu
