#include <limits>

#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// value = d^2 / (2 beta) where |d| < beta, else |d| - beta/2; |d| if beta = 0.  d = x - y
template <class C>
struct SmoothL1 {
  C beta, inverse, steepness;  // inverse, steepness: both 1/beta; if beta = 0, 0 and inf

  explicit SmoothL1(double beta_) : beta(static_cast<C>(beta_)) {
    if (!(beta >= std::numeric_limits<C>::min())) beta = 0;  // 1/beta would overflow, and no d is between 0 and beta
    inverse = beta == 0 ? 0 : 1 / beta;
    steepness = beta == 0 ? std::numeric_limits<C>::infinity() : inverse;
  }

  C value(C x, C y) const {
    const C a = std::fabs(x - y), q = a < beta ? a : beta;
    return q * inverse * q / 2 + (a - q);
  }

  C slope(C x, C y) const {  // clamp(d / beta, -1, 1), written so that NaN stays NaN and 0 stays 0
    const C d = x - y;
    const C s = d == 0 ? d : d * steepness;
    return s > 1 ? C(1) : s < -1 ? C(-1) : s;
  }
};

SAFEOPS_POINTWISE_LOSS(smooth_l1_loss, SmoothL1, double)

}  // namespace safeops::cpu
