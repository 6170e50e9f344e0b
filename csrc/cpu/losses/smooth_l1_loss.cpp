#include <limits>

#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// d^2 / (2 beta) below beta, |d| - beta/2 from there on; beta = 0 is |d|.
template <class C>
struct SmoothL1 {
  C beta, inverse, steepness;

  explicit SmoothL1(double given) : beta(static_cast<C>(given)) {
    if (!(beta >= std::numeric_limits<C>::min())) beta = 0;  // 1/beta would overflow, and no d is between 0 and beta
    inverse = beta == 0 ? 0 : 1 / beta;
    steepness = beta == 0 ? std::numeric_limits<C>::infinity() : inverse;
  }

  C value(C d) const {
    const C a = std::fabs(d), q = a < beta ? a : beta;
    return q * inverse * q / 2 + (a - q);
  }

  C slope(C d) const {  // clamp(d / beta, -1, 1), written so that NaN stays NaN and 0 stays 0
    const C s = d == 0 ? d : d * steepness;
    return s > 1 ? C(1) : s < -1 ? C(-1) : s;
  }
};

SAFEOPS_POINTWISE_LOSS(smooth_l1_loss, SmoothL1, double)

}  // namespace safeops::cpu
