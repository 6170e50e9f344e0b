// The accumulators of a reduction: fp32 (or fp64) lanes that are emptied into double every kBlock additions.
#pragma once

#include "elementwise.h"

namespace safeops::cpu {

constexpr int64_t kLanes = 64;  // side by side: enough to hide the latency of an addition
constexpr int64_t kBlock = 16;  // additions to one lane before it is emptied

// Sums of the terms of kept elements, of their weights, and how many they are: one entry per output.
struct Totals {
  double* value;
  double* weight;
  int64_t* count;
};

// ---- inner loops

// lanes[p] += sum over t of terms[t * period + p], for n terms
template <class T>
void add_loop(const T* terms, int64_t n, int64_t period, T* lanes) {
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

// (groups, reduced, inner) -> (groups, inner), all of it in one chunk
template <class T, class S>
void group_loop(const T* values, int64_t groups, int64_t reduced, int64_t inner, S* out) {
  for (int64_t g = 0; g < groups; ++g, values += reduced * inner, out += inner) {
    if (inner == 1) {
      S sum = 0;
      if (reduced >= 16) {
        _Pragma("omp simd reduction(+ : sum)")
        for (int64_t r = 0; r < reduced; ++r) sum += static_cast<S>(values[r]);
      } else {
        for (int64_t r = 0; r < reduced; ++r) sum += static_cast<S>(values[r]);
      }
      *out = sum;
    } else {
      for (int64_t i = 0; i < inner; ++i) out[i] = 0;
      for (int64_t r = 0; r < reduced; ++r) {
        SAFEOPS_SIMD
        for (int64_t i = 0; i < inner; ++i) out[i] += static_cast<S>(values[r * inner + i]);
      }
    }
  }
}

// ---- one quantity: values of type T, totals of type S

template <class T, class S>
class Lanes {
 public:
  void start(int64_t period) {
    period_ = period;
    for (int64_t p = 0; p < period; ++p) lanes_[p] = 0, totals_[p] = 0;
  }

  void add(const T* terms, int64_t n) { add_(terms, n, period_, lanes_); }

  void empty() { empty_(lanes_, period_, totals_); }

  // Lane p belongs to output p % n.
  void finish(int64_t n, S* out) {
    empty();
    group_(totals_, 1, period_ / n, n, out);
  }

 private:
  decltype(pick<&add_loop<T>>()) add_ = pick<&add_loop<T>>();
  decltype(pick<&empty_loop<T, S>>()) empty_ = pick<&empty_loop<T, S>>();
  decltype(pick<&group_loop<S, S>>()) group_ = pick<&group_loop<S, S>>();
  int64_t period_;
  alignas(64) T lanes_[kChunk];
  alignas(64) S totals_[kChunk];
};

}  // namespace safeops::cpu
