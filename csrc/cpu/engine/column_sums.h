// Sums of columns side by side, over one block: so few rows that an fp32 (or fp64) accumulator adds them one by one.
#pragma once

#include "cpu/engine/elementwise.h"

namespace safeops::cpu {

constexpr int64_t kBlock = 64;      // additions to an accumulator
constexpr int64_t kColumns = 4096;  // accumulators at most

// A loop over a row of `period` values takes whole registers, since gcc would take a remainder value by value. The
// values beyond the row belong to the next row; they go to kPad extra accumulators, which nobody reads.
constexpr int64_t kPad = 64;    // values that gcc takes at once in a loop over bytes: the widest register's bytes
constexpr int64_t kLanes = 16;  // values that gcc takes at once in a loop over floats

inline int64_t padded(int64_t period, int64_t lanes) { return (period + lanes - 1) / lanes * lanes; }

// Calls body(at, m) for each row of `period` values among n. The row starts at `at`; the loop takes m values: the width
// in whole registers, or the row alone if fewer values follow.
template <class Body>
inline void for_rows(int64_t n, int64_t period, int64_t lanes, const Body& body) {
  const int64_t width = padded(period, lanes);
  for (int64_t at = 0; at < n; at += period) body(at, n - at >= width ? width : std::min(period, n - at));
}

// sums[p] += values[t * period + p], one t after the other, for n values
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

// Sums of one quantity: values of type T, sums of type S.
template <class T, class S>
class ColumnSums {
 public:
  void start(int64_t n) {
    n_ = n;
    std::fill_n(sums_, n, T(0));
  }

  // values[i] goes to accumulator first + i % period.
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
