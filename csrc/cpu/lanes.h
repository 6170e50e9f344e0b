// The accumulators of a reduction: fp32 (or fp64) lanes that are emptied into double every kBlock additions.
#pragma once

#include "elementwise.h"

namespace safeops::cpu {

constexpr int64_t kLanes = 64;  // side by side: enough to hide the latency of an addition
constexpr int64_t kBlock = 16;  // additions to one lane before it is emptied
constexpr int64_t kColumns = 2048;  // lanes at most: columns that are summed in one go

// Sums of the terms of kept elements, of their weights, and how many they are: one entry per output.
struct Totals {
  double* value;
  double* weight;
  int64_t* count;
};

// ---- inner loops

constexpr int64_t kTree = kChunk / kLanes;  // rows of lanes in a full chunk
static_assert(kTree == 8);

// lanes[p] += sum over t of terms[t * period + p], for n terms
template <class T>
void add_loop(const T* terms, int64_t n, int64_t period, T* lanes) {
  if (n == kChunk && period == kLanes) {  // the common case: a tree, and one addition to each lane
    SAFEOPS_SIMD
    for (int64_t p = 0; p < kLanes; ++p) {
      const T* t = terms + p;
      const T low = static_cast<T>((t[0] + t[kLanes]) + (t[2 * kLanes] + t[3 * kLanes]));
      const T high = static_cast<T>((t[4 * kLanes] + t[5 * kLanes]) + (t[6 * kLanes] + t[7 * kLanes]));
      lanes[p] = static_cast<T>(lanes[p] + (low + high));
    }
    return;
  }
  for (; n > 0; n -= period, terms += period) {
    const int64_t m = n < period ? n : period;
    SAFEOPS_SIMD
    for (int64_t p = 0; p < m; ++p) lanes[p] = static_cast<T>(lanes[p] + terms[p]);
  }
}

template <class T, class S>
void empty_loop(T* lanes, int64_t period, S* totals) {
  SAFEOPS_SIMD
  for (int64_t p = 0; p < period; ++p) {
    totals[p] += static_cast<S>(lanes[p]);
    lanes[p] = 0;
  }
}

// Sum of n values.
template <class T, class S>
inline S sum_of(const T* values, int64_t n) {
  S sum = 0;
  _Pragma("omp simd reduction(+ : sum)")
  for (int64_t i = 0; i < n; ++i) sum += static_cast<S>(values[i]);
  return sum;
}

template <class T, class S>
void sum_loop(const T* values, int64_t n, S* out) {
  *out = sum_of<T, S>(values, n);
}

// (groups, reduced) -> (groups), all of it in one chunk; overwrites the values
template <class T, class S>
void rows_loop(T* values, int64_t groups, int64_t reduced, S* out) {
  // Neighbours first, across all rows at once: a tree. Counts of 128 still fit a byte.
  for (int fold = 1; reduced % 2 == 0 && fold < 128; fold *= 2) {
    reduced /= 2;
    SAFEOPS_SIMD
    for (int64_t i = 0; i < groups * reduced; ++i) values[i] = static_cast<T>(values[2 * i] + values[2 * i + 1]);
  }
  int64_t g = 0;
  if (reduced == 1) {
    SAFEOPS_SIMD
    for (g = 0; g < groups; ++g) out[g] = static_cast<S>(values[g]);
  } else if (reduced < 32) {
    for (; g + 8 <= groups; g += 8) {  // eight short rows side by side hide each other's latency
      const T* row = values + g * reduced;
      S sum[8] = {};
      for (int64_t r = 0; r < reduced; ++r)
        for (int k = 0; k < 8; ++k) sum[k] += static_cast<S>(row[k * reduced + r]);
      for (int k = 0; k < 8; ++k) out[g + k] = sum[k];
    }
  }
  for (; g < groups; ++g) out[g] = sum_of<T, S>(values + g * reduced, reduced);
}

// (groups, reduced, inner) -> (groups, inner), all of it in one chunk
template <class T, class S>
void group_loop(T* values, int64_t groups, int64_t reduced, int64_t inner, S* out) {
  for (int64_t g = 0; g < groups; ++g, values += reduced * inner, out += inner) {
    for (int64_t i = 0; i < inner; ++i) out[i] = 0;
    for (int64_t r = 0; r < reduced; ++r) {
      SAFEOPS_SIMD
      for (int64_t i = 0; i < inner; ++i) out[i] += static_cast<S>(values[r * inner + i]);
    }
  }
}

template <class T, class S>
struct SumGroups {
  decltype(pick<&rows_loop<T, S>>()) rows = pick<&rows_loop<T, S>>();
  decltype(pick<&group_loop<T, S>>()) columns = pick<&group_loop<T, S>>();

  void operator()(T* values, int64_t groups, int64_t reduced, int64_t inner, S* out) const {
    if (inner == 1)
      rows(values, groups, reduced, out);
    else
      columns(values, groups, reduced, inner, out);
  }
};

// ---- one quantity: values of type T, totals of type S

template <class T, class S>
class Lanes {
 public:
  void start(int64_t period) {
    period_ = period;
    emptied_ = false;
    for (int64_t p = 0; p < period; ++p) lanes_[p] = 0;
  }

  // terms[i] goes to lane i % period.
  void add(const T* terms, int64_t n) { add_(terms, n, period_, lanes_); }

  // terms[i] goes to lane first + i.
  void add_at(int64_t first, const T* terms, int64_t n) { add_(terms, n, n, lanes_ + first); }

  void empty() {
    if (!emptied_)
      for (int64_t p = 0; p < period_; ++p) totals_[p] = 0;
    emptied_ = true;
    empty_(lanes_, period_, totals_);
  }

  // Lane p belongs to output p % n.
  void finish(int64_t n, S* out) {
    if (n == 1 && !emptied_) return sum_lanes_(lanes_, period_, out);
    empty();
    if (n == 1)
      sum_totals_(totals_, period_, out);
    else
      fold_(totals_, 1, period_ / n, n, out);
  }

 private:
  decltype(pick<&add_loop<T>>()) add_ = pick<&add_loop<T>>();
  decltype(pick<&empty_loop<T, S>>()) empty_ = pick<&empty_loop<T, S>>();
  decltype(pick<&sum_loop<T, S>>()) sum_lanes_ = pick<&sum_loop<T, S>>();
  decltype(pick<&sum_loop<S, S>>()) sum_totals_ = pick<&sum_loop<S, S>>();
  decltype(pick<&group_loop<S, S>>()) fold_ = pick<&group_loop<S, S>>();
  int64_t period_;
  bool emptied_;
  alignas(64) T lanes_[kColumns];
  alignas(64) S totals_[kColumns];
};

}  // namespace safeops::cpu
