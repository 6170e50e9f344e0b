// Conversions between the four floating types and the compute types (float, double): of contiguous values, and of one
// value.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/limits.h"
#include "common/tensor.h"
#include "cpu/engine/bits.h"

namespace safeops::cpu {

struct Half { uint16_t bits; };
struct BFloat16 { uint16_t bits; };

// Converts n contiguous values from src to dst. Each such function is compiled for one pair of types.
using Convert = void (*)(const void* src, void* dst, int64_t n);

template <class C> Convert find_load(DType from);   // converts `from` to C; nullptr if `from` is C
template <class C> Convert find_store(DType to);    // converts C to `to`; nullptr if `to` is C

template <class C>
constexpr DType dtype_v = sizeof(C) == 4 ? DType::kFloat : DType::kDouble;

// ---- Conversions of one value without a branch, so that loops over them vectorise.

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(BFloat16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// Normal numbers are converted by rescaling the exponent, subnormal numbers by a subtraction (M. Dukhan's FP16
// library).
inline float widen(Half x) {
  const uint32_t w = static_cast<uint32_t>(x.bits) << 16;
  const uint32_t sign = w & 0x80000000u;
  const uint32_t twice = w + w;
  const float normal = bit_cast<float>((twice >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
  const float subnormal = bit_cast<float>((twice >> 17) | (126u << 23)) - 0.5f;
  return bit_cast<float>(sign | (twice < (1u << 27) ? bit_cast<uint32_t>(subnormal) : bit_cast<uint32_t>(normal)));
}

template <class S> struct Narrow;

template <> struct Narrow<float> {
  static float from(float x) { return x; }
  static float from(double x) { return static_cast<float>(x); }
};

template <> struct Narrow<double> {
  static double from(double x) { return x; }
};

// Rounds a double to float, to odd. Rounding the result to half or bfloat16 gives the bits of rounding the double once.
inline float round_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  const double back = nearest;
  const uint32_t bits = bit_cast<uint32_t>(nearest);
  const uint32_t toward_zero = bits - (std::fabs(back) > std::fabs(x) ? 1u : 0u);
  return back != x && x == x ? bit_cast<float>(toward_zero | 1u) : nearest;
}

template <> struct Narrow<BFloat16> {
  static BFloat16 from(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;  // rounds to nearest, ties to even
    return {static_cast<uint16_t>(x != x ? (bits >> 16) | 0x40u : rounded)};
  }
  static BFloat16 from(double x) { return from(round_to_odd(x)); }
};

template <> struct Narrow<Half> {
  static Half from(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    const float scaled = (bit_cast<float>(bits & 0x7FFFFFFFu) * 0x1.0p+112f) * 0x1.0p-110f;  // overflows to inf
    const uint32_t twice = bits + bits;
    uint32_t bias = twice & 0xFF000000u;
    bias = bias < 0x71000000u ? 0x71000000u : bias;
    const uint32_t sum = bit_cast<uint32_t>(bit_cast<float>((bias >> 1) + 0x07800000u) + scaled);
    const uint32_t finite = ((sum >> 13) & 0x7C00u) + (sum & 0x0FFFu);
    return {static_cast<uint16_t>(((bits >> 16) & 0x8000u) | (twice > 0xFF000000u ? 0x7E00u : finite))};
  }
  static Half from(double x) { return from(round_to_odd(x)); }
};

// Returns the only element of a one-element tensor.
double read_scalar(const View& view);

}  // namespace safeops::cpu
