// The logistic function and its logarithm, for losses of logits. p and q = 1 - p are computed separately, since the
// subtraction would cancel. product() makes an infinite logit cost nothing if it agrees with the target.
#pragma once

#include "cpu/engine/exp.h"
#include "cpu/engine/math.h"

namespace safeops::cpu {

// Returns a b, but 0 if a is 0 and b infinite.
template <class C>
C product(C a, C b) { return select_or_zero(a != 0 || std::fabs(b) != math::kInf, a * b); }

// Returns the derivative of product(a, b) with respect to a.
template <class C>
C product_slope(C a, C b) { return select_or_zero(a != 0 || std::fabs(b) != math::kInf, b); }

template <class C>
struct Logistic {
  C p, q, tail;  // 1 / (1 + e^-x), 1 / (1 + e^x), log(1 + e^-|x|)

  explicit Logistic(C x) {
    const C e = exp_nonpositive(-std::fabs(x)), near = 1 / (1 + e), far = e * near;
    p = select(x < 0, far, near);
    q = select(x < 0, near, far);
    tail = math::log1p_unit(e);
  }
};

// Returns hit max(-x, 0) + miss max(x, 0); one of the two maxima is 0. The cost of logit x, hit log(1 + e^-x) + miss
// log(1 + e^x), is this plus (hit + miss) tail.
template <class C>
C linear_cost(C x, C hit, C miss) { return product(select(x < 0, hit, miss), std::fabs(x)); }

// Returns log(1 + e^x).
template <class C>
C softplus(C x) { return math::at_least(x, C(0)) + math::log1p_unit(exp_nonpositive(-std::fabs(x))); }

}  // namespace safeops::cpu
