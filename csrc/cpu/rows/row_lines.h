// Reductions of one run of contiguous values, in registers: for rows, where lanes must become one number.
// A run has at least kShortest values: what is left at its end is read as a whole register that overlaps the last one.
#pragma once

#include <algorithm>

#include "cpu/engine/convert.h"
#include "cpu/engine/sums.h"

namespace safeops::cpu {

constexpr int64_t kShortest = 16;

template <class V, class T>
inline void load_line(const T* from, V& line) {
  std::memcpy(&line, from, sizeof(line));
}

// Zeroes what a line's words of a mask do not keep.
template <class C, class V>
inline void keep_bits(const void* keep, V& line) {
  using Bits [[gnu::vector_size(sizeof(V))]] = BitsOf<C>;
  Bits ones;
  std::memcpy(&ones, keep, sizeof(ones));
  line = reinterpret_cast<V>(reinterpret_cast<Bits>(line) & ones);
}

// Zeroes all but the last `kept` values of a line.
template <class C, class V>
inline void keep_last(int64_t kept, V& line) {
  alignas(64) static constexpr struct Table {
    uint8_t bytes[128] = {};
    constexpr Table() {
      for (int i = 64; i < 128; ++i) bytes[i] = 0xFF;
    }
  } table;
  keep_bits<C>(table.bytes + 64 - sizeof(V) + kept * sizeof(C), line);
}

// The sum of n values; get(i, line) says those from i on. At most 16 additions to a lane, then double.
template <int kBytes, class C, class Get>
inline double sum_lines(int64_t n, const Get& get) {
  constexpr int64_t side = kBytes / sizeof(C);
  using V = Line<C, kBytes>;
  double total = 0;
  for (int64_t i = 0; i < n;) {
    V a{}, b{}, c{}, d{}, line;
    const int64_t stop = std::min(n, i + 64 * side);
    for (; i + 4 * side <= stop; i += 4 * side) {
      get(i, line), a += line;
      get(i + side, line), b += line;
      get(i + 2 * side, line), c += line;
      get(i + 3 * side, line), d += line;
    }
    for (; i + side <= stop; i += side) get(i, line), a += line;
    if (i < stop) {  // stop is n
      get(n - side, line);
      keep_last<C>(n - i, line);
      b += line;
      i = n;
    }
    a = (a + b) + (c + d);
    total += static_cast<double>(sum_line<C, C>(a));
  }
  return total;
}

template <class V>
inline void largest_of(V& most, const V& line) {
  most = line > most ? line : most;
}

// The largest of n values; NaN counts for nothing, unless it stands among the first.
template <int kBytes, class C>
inline C max_lines(const C* x, int64_t n) {
  constexpr int64_t side = kBytes / sizeof(C);
  using V = Line<C, kBytes>;
  V a, b, line;
  load_line(x, a);
  load_line(x + n - side, b);
  int64_t i = side;
  for (; i + 2 * side <= n; i += 2 * side) {
    load_line(x + i, line), largest_of(a, line);
    load_line(x + i + side, line), largest_of(b, line);
  }
  if (i + side <= n) load_line(x + i, line), largest_of(a, line);
  largest_of(a, b);
  C lanes[side];
  std::memcpy(lanes, &a, sizeof(lanes));
  for (int64_t half = side / 2; half > 0; half /= 2)
    for (int64_t k = 0; k < half; ++k) lanes[k] = lanes[k + half] > lanes[k] ? lanes[k + half] : lanes[k];
  return lanes[0];
}

// Calls one(i) for each i in [0, n), n >= kShortest, in blocks that the compiler vectorises. The last block overlaps:
// one() may be called twice for an i.
template <class One>
inline void for_blocks(int64_t n, const One& one) {
  int64_t i = 0;
  for (; i + kShortest <= n; i += kShortest) {
    SAFEOPS_SIMD
    for (int64_t k = 0; k < kShortest; ++k) one(i + k);
  }
  if (i == n) return;
  SAFEOPS_SIMD
  for (int64_t k = 0; k < kShortest; ++k) one(n - kShortest + k);
}

}  // namespace safeops::cpu
