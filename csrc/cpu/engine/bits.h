// Numbers by their bit patterns, and selection without a branch.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace safeops::cpu {

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <class T>
using BitsOf = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;

// A positive number too large for a double is stored negated and divided by kBeyond. Numbers that are negative
// themselves never come near such magnitudes, so the sign tells.
constexpr double kBeyond = 0x1p+64;

inline bool is_beyond(double x) { return x <= -0x1p+959; }

// keep ? x : other, by bit pattern. Written with ?: it would become a masked load, which the prefetcher does not see:
// three times slower from memory.
template <class T>
inline T select(bool keep, T x, T other) {
  using Bits = BitsOf<T>;
  const Bits ones = static_cast<Bits>(-static_cast<Bits>(keep));
  return bit_cast<T>(static_cast<Bits>((bit_cast<Bits>(x) & ones) | (bit_cast<Bits>(other) & ~ones)));
}

// keep ? x : 0
template <class T>
inline T select_or_zero(bool keep, T x) {
  using Bits = BitsOf<T>;
  return bit_cast<T>(static_cast<Bits>(bit_cast<Bits>(x) & static_cast<Bits>(-static_cast<Bits>(keep))));
}

}  // namespace safeops::cpu
