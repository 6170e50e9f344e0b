// Exponentials, sums and parameters that the softmax and the cross entropy share.
#pragma once

#include <cmath>
#include <limits>

#include "cpu/engine/exp.h"
#include "cpu/engine/rowwise.h"

namespace safeops::cpu {

template <class C>
constexpr C kMinusInfinity = -std::numeric_limits<C>::infinity();  // replaces a masked value: its exp is 0

template <class C>
inline C pivot_of(C maximum) {
  return select(maximum == kMinusInfinity<C>, C(0), maximum);  // a piece that keeps no value has maximum -inf
}

// Returns exp(a - b) for two maxima a <= b; 1 if a and b are equal infinities.
template <class C>
inline C ratio_of(double a, double b) {
  return exp_nonpositive(static_cast<C>(a == b ? 0.0 : a - b));
}

// Returns the sum of exp(x - pivot) over n values x <= pivot. Calls before(i) before each vector.
template <int kBytes, class C, class Before>
inline double sum_exponentials(const C* x, int64_t n, C pivot, const Before& before) {
  return sum_run<kBytes, C>(n, [&](int64_t i, Vector<C, kBytes>& v) {
    before(i);
    load_vector(x + i, v);
    v = exp_term(v - pivot);
  });
}

// Merges the states of two pieces of each row: the maximum, and the sum of exp(x - maximum).
template <class C>
inline void merge_exponentials(int64_t rows, double* maximum, double* total, const double* other_maximum,
                               const double* other_total) {
  SAFEOPS_SIMD
  for (int64_t r = 0; r < rows; ++r) {
    const double a = maximum[r], b = other_maximum[r], most = a > b ? a : b;
    total[r] = total[r] * ratio_of<C>(a, most) + other_total[r] * ratio_of<C>(b, most);
    maximum[r] = most;
  }
}

// Parameters of a row. kPivot: subtracted before exp. kInverse: 1 / sum of exp (log softmax: the logarithm of the sum).
// kDot, in the backward: sum of g y (log softmax: sum of g).
enum SoftmaxParameter { kPivot, kInverse, kDot };

}  // namespace safeops::cpu
