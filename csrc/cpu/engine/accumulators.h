// The accumulators of a reduction: fp32 (or fp64) lanes that are emptied into double every kBlock additions.
#pragma once

#include <numeric>

#include "cpu/engine/elementwise.h"
#include "cpu/engine/sums.h"

namespace safeops::cpu {

constexpr int64_t kLanes = 48;  // side by side at least: enough to hide the latency of an addition
constexpr int64_t kVector = 16;
constexpr int64_t kBlock = 16;  // additions to one lane before it is emptied
constexpr int64_t kMostCounts = 255;  // additions of 0 or 1 to a byte before it is emptied
constexpr int64_t kColumns = 4096;  // lanes at most: columns that are summed in one go

// The states of outputs, an entry each: what the kept elements have come to. Of a sum: of their terms, of their
// weights, and how many they are. Other folds say what theirs mean. An array that a fold does not use is null.
struct Totals {
  double* value;
  double* weight;
  double* spread;
  int64_t* count;

  Totals from(int64_t i) const {
    const auto at = [i](auto* all) { return all ? all + i : nullptr; };
    return {at(value), at(weight), at(spread), at(count)};
  }
};

// How many lanes rows of n take: several rows together, so that they make whole vectors, and so that a chunk of `most`
// terms is four periods, one tree.
inline int64_t lanes_for(int64_t n, int64_t most) {
  const int64_t whole = std::lcm(n, kVector);
  if (whole <= most / 4) return most / 4 / whole * whole;
  return whole <= most ? whole : n * ((kLanes + n - 1) / n);
}

// ---- inner loops

// lanes[p] += sum over t of terms[t * period + p], for n terms: four periods at a time in a tree, then one by one
template <class T>
void add_loop(const T* terms, int64_t n, int64_t period, T* lanes) {
  for (; n >= 4 * period; n -= 4 * period, terms += 4 * period) {
    const T *t1 = terms + period, *t2 = t1 + period, *t3 = t2 + period;
    SAFEOPS_SIMD
    for (int64_t p = 0; p < period; ++p) {
      const T four = static_cast<T>((terms[p] + t1[p]) + (t2[p] + t3[p]));
      lanes[p] = static_cast<T>(lanes[p] + four);
    }
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

// ---- one quantity: values of type T, totals of type S

template <class T, class S>
class Lanes {
 public:
  void start(int64_t period) {
    period_ = period;
    emptied_ = false;
    for (int64_t p = 0; p < period; ++p) lanes_[p] = 0;
  }

  // Additions to a lane that add() makes for n terms.
  int64_t additions(int64_t n) const { return n / period_ / 4 + n / period_ % 4; }

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
    empty();
    fold_(totals_, 1, period_ / n, n, out);
  }

 private:
  decltype(pick<&add_loop<T>>()) add_ = pick<&add_loop<T>>();
  decltype(pick<&empty_loop<T, S>>()) empty_ = pick<&empty_loop<T, S>>();
  decltype(pick<&group_loop<S, S>>()) fold_ = pick<&group_loop<S, S>>();
  int64_t period_;
  bool emptied_;
  alignas(64) T lanes_[kColumns];
  alignas(64) S totals_[kColumns];
};

}  // namespace safeops::cpu
