// Sums many columns at once, over a block of at most kBlock rows: few enough rows that one fp32 (or fp64) accumulator
// per column adds them one after the other.
#pragma once

#include "cpu/engine/elementwise.h"

namespace safeops::cpu {

constexpr int64_t kBlock = 64;      // additions to one accumulator, at most
constexpr int64_t kColumns = 4096;  // accumulators, at most

// A loop over a row of `period` values takes whole registers, since gcc would take a remainder value by value. The
// values beyond the row belong to the next row; their sums go to kPad extra accumulators, which nobody reads.
constexpr int64_t kPad = 64;    // values in the widest register in a loop over bytes
constexpr int64_t kLanes = 16;  // values in the widest register in a loop over floats

inline int64_t padded(int64_t period, int64_t lanes) { return (period + lanes - 1) / lanes * lanes; }

// Calls body(at, m) for each row of `period` values among n values. The row starts at `at`, and the body takes m
// values: the row rounded up to whole registers, or the row alone if fewer values follow.
template <class Body>
inline void for_rows(int64_t n, int64_t period, int64_t lanes, const Body& body) {
  const int64_t width = padded(period, lanes);
  for (int64_t at = 0; at < n; at += period) body(at, n - at >= width ? width : std::min(period, n - at));
}

// Adds n values, which form rows of `period`: sums[p] += values[t * period + p] for t = 0, 1, ... in this order.
template <class T>
void add_loop(const T* values, int64_t n, int64_t period, T* sums) {
  constexpr int64_t lanes = sizeof(T) > 1 ? kLanes : kPad;
  const int64_t width = padded(period, lanes);
  for (; n >= 3 * period + width; n -= 4 * period, values += 4 * period) {
    const T *v1 = values + period, *v2 = v1 + period, *v3 = v2 + period;
    SAFEOPS_SIMD
    for (int64_t p = 0; p < width; ++p)
      sums[p] = static_cast<T>((((sums[p] + values[p]) + v1[p]) + v2[p]) + v3[p]);
  }
  for_rows(n, period, lanes, [&](int64_t at, int64_t m) __attribute__((always_inline)) {
    SAFEOPS_SIMD
    for (int64_t p = 0; p < m; ++p) sums[p] = static_cast<T>(sums[p] + values[at + p]);
  });
}

template <class T, class S>
void widen_loop(const T* sums, int64_t n, S* wide) {
  SAFEOPS_SIMD
  for (int64_t p = 0; p < n; ++p) wide[p] = static_cast<S>(sums[p]);
}

// The sums of one quantity over one block. T: the type of the values and accumulators; S: the type of the finished
// sums.
template <class T, class S>
class ColumnSums {
 public:
  void start(int64_t n) {
    n_ = n;
    std::fill_n(sums_, n, T(0));
  }

  // Adds values[i] to accumulator first + i % period.
  void add(const T* values, int64_t m, int64_t first, int64_t period) { add_(values, m, period, sums_ + first); }

  S* finish() {
    widen_(sums_, n_, wide_);
    return wide_;
  }

 private:
  decltype(pick<&add_loop<T>>()) add_ = pick<&add_loop<T>>();
  decltype(pick<&widen_loop<T, S>>()) widen_ = pick<&widen_loop<T, S>>();
  int64_t n_;
  alignas(64) T sums_[kColumns + kPad];
  alignas(64) S wide_[kColumns + kPad];
};

}  // namespace safeops::cpu
