// What the two directions of the softmax share.
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

// Parameters of a row: the pivot that is subtracted before exp, what follows from the sum of exp (its inverse, or its
// logarithm), and in the backward the sum of g y.
enum SoftmaxParameter { kPivot, kInverse, kDot };

}  // namespace safeops::cpu
