// What the softmax and the cross entropy share, in both directions.
#pragma once

#include <cmath>
#include <limits>

#include "cpu/engine/exp.h"
#include "cpu/rows/rowwise.h"

namespace safeops::cpu {

template <class C>
constexpr C kNothing = -std::numeric_limits<C>::infinity();  // a masked value: it is no maximum, and its exp is 0

template <class C>
inline C pivot_of(C top) {
  return select(top == kNothing<C>, C(0), top);  // a piece may keep nothing
}

// exp(a - b) of two tops, 1 where both are the same infinity.
template <class C>
inline C ratio_of(double a, double b) {
  return exp_nonpositive(static_cast<C>(a == b ? 0.0 : a - b));
}

// sum of exp(x - pivot) over n values, of which one is the pivot; before(i) goes before those from i on
template <int kBytes, class C, class Before>
inline double sum_exponentials(const C* x, int64_t n, C pivot, const Before& before) {
  return sum_run<kBytes, C>(n, [&](int64_t i, Vector<C, kBytes>& v) {
    before(i);
    load_vector(x + i, v);
    v = exp_term(v - pivot);
  });
}

// Two pieces of a row: the largest value, and the sum of exp(x - it).
template <class C>
inline void merge_exponentials(int64_t rows, double* top, double* total, const double* other_top,
                               const double* other_total) {
  SAFEOPS_SIMD
  for (int64_t r = 0; r < rows; ++r) {
    const double a = top[r], b = other_top[r], most = a > b ? a : b;
    total[r] = total[r] * ratio_of<C>(a, most) + other_total[r] * ratio_of<C>(b, most);
    top[r] = most;
  }
}

// Parameters of a row: the pivot that is subtracted before exp, what follows from the sum of exp (its inverse, or its
// logarithm), and in the backward the sum of g y.
enum SoftmaxParameter { kPivot, kInverse, kDot };

}  // namespace safeops::cpu
