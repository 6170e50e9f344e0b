// Sums of many columns side by side: fp32 (or fp64) accumulators, each flushed into a double after kBlock additions.
#pragma once

#include <numeric>

#include "cpu/engine/elementwise.h"
#include "cpu/engine/row_sums.h"

namespace safeops::cpu {

constexpr int64_t kMinPeriod = 48;  // accumulators at least: enough to hide the latency of an addition
constexpr int64_t kVector = 16;     // values in the widest register
constexpr int64_t kBlock = 16;      // additions to an accumulator before it is flushed
constexpr int64_t kMostCounts = 255;  // additions of 0 or 1 to a byte before it is flushed
constexpr int64_t kColumns = 4096;  // accumulators at most

// The number of accumulators for rows of n columns. It spans several rows where that makes whole vectors, and divides a
// chunk of `most` values into four periods, which are added as one tree, where they fit.
inline int64_t period_for(int64_t n, int64_t most) {
  const int64_t aligned = std::lcm(n, kVector);
  if (aligned <= most / 4) return most / 4 / aligned * aligned;
  return aligned <= most ? aligned : n * ((kMinPeriod + n - 1) / n);
}

// ---- inner loops

// sums[p] += sum over t of values[t * period + p], for n values: four periods at a time in a tree, then one by one
template <class T>
void add_loop(const T* values, int64_t n, int64_t period, T* sums) {
  for (; n >= 4 * period; n -= 4 * period, values += 4 * period) {
    const T *v1 = values + period, *v2 = v1 + period, *v3 = v2 + period;
    SAFEOPS_SIMD
    for (int64_t p = 0; p < period; ++p) {
      const T four = static_cast<T>((values[p] + v1[p]) + (v2[p] + v3[p]));
      sums[p] = static_cast<T>(sums[p] + four);
    }
  }
  for (; n > 0; n -= period, values += period) {
    const int64_t m = n < period ? n : period;
    SAFEOPS_SIMD
    for (int64_t p = 0; p < m; ++p) sums[p] = static_cast<T>(sums[p] + values[p]);
  }
}

template <class T, class S>
void flush_loop(T* sums, int64_t period, S* wide) {
  SAFEOPS_SIMD
  for (int64_t p = 0; p < period; ++p) {
    wide[p] += static_cast<S>(sums[p]);
    sums[p] = 0;
  }
}

// ---- sums of one quantity: values of type T, sums of type S

template <class T, class S>
class ColumnSums {
 public:
  void start(int64_t period) {
    period_ = period;
    flushed_ = false;
    for (int64_t p = 0; p < period; ++p) sums_[p] = 0;
  }

  // values[i] goes to accumulator i % period.
  void add(const T* values, int64_t n) { add_(values, n, period_, sums_); }

  // values[i] goes to accumulator first + i.
  void add_at(int64_t first, const T* values, int64_t n) { add_(values, n, n, sums_ + first); }

  void flush() {
    if (!flushed_)
      for (int64_t p = 0; p < period_; ++p) wide_[p] = 0;
    flushed_ = true;
    flush_(sums_, period_, wide_);
  }

  // Accumulator p belongs to output p % n.
  void finish(int64_t n, S* out) {
    flush();
    sum_groups_(wide_, 1, period_ / n, n, out);
  }

 private:
  decltype(pick<&add_loop<T>>()) add_ = pick<&add_loop<T>>();
  decltype(pick<&flush_loop<T, S>>()) flush_ = pick<&flush_loop<T, S>>();
  decltype(pick<&group_loop<S, S>>()) sum_groups_ = pick<&group_loop<S, S>>();
  int64_t period_;
  bool flushed_;
  alignas(64) T sums_[kColumns];
  alignas(64) S wide_[kColumns];
};

}  // namespace safeops::cpu
