// Bit patterns of numbers, and selection without a branch.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

// gcc warns that the ABI of vectors passed by value depends on the instruction set. All such calls are inlined.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace safeops::cpu {

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <class T>
using BitsOf = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;

// T is a number or a GNU vector. ElementOf<T>: the type of T's elements. WithElement<T, E>: a vector of elements of
// type E that has as many bytes as T; E itself if T is a number.
template <class T, class = void>
struct ElementsOf {
  using Type = T;
  template <class E>
  using With = E;
};

template <class T>
struct ElementsOf<T, std::void_t<decltype(std::declval<T&>()[0])>> {
  using Type = std::remove_reference_t<decltype(std::declval<T&>()[0])>;
  template <class E>
  using With [[gnu::vector_size(sizeof(T))]] = E;
};

template <class T>
using ElementOf = typename ElementsOf<T>::Type;
template <class T, class E>
using WithElement = typename ElementsOf<T>::template With<E>;

// Stores a positive number x that is too large for a double as -x / kBeyond. All other numbers stored beside it are
// greater than -2^959, so is_beyond() recognises such an x.
constexpr double kBeyond = 0x1p+64;

inline bool is_beyond(double x) { return x <= -0x1p+959; }

// keep ? x : other, by bit pattern. For ?: the compiler would emit a masked load, which the hardware prefetcher does
// not see: a loop over memory then takes three times as long.
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

// zero ? 0 : x, for a number or a GNU vector of numbers.
template <class T, class Condition>
inline T zero_where(const Condition& zero, const T& x) {
  if constexpr (std::is_arithmetic_v<T>)
    return select_or_zero(!zero, x);
  else
    return zero ? T{} : x;
}

}  // namespace safeops::cpu
