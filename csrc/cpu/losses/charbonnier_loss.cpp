#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// sqrt(d^2 + eps^2) = h sqrt(1 + (l / h)^2), h and l being the larger and the smaller of |d| and eps;  d = x - y
template <class C>
struct Charbonnier {
  C eps;
  explicit Charbonnier(double eps) : eps(static_cast<C>(eps)) {}

  C value(C x, C y) const {
    const C a = std::fabs(x - y), h = a > eps ? a : eps, q = (a > eps ? eps : a) / h;  // NaN stays NaN
    return h * std::sqrt(1 + q * q);
  }

  C slope(C x, C y) const {
    const C d = x - y, a = std::fabs(d), q = a > eps ? eps / a : a / eps;
    const C s = d > eps ? C(1) : d < -eps ? C(-1) : d / eps;
    return s / std::sqrt(1 + q * q);
  }
};

SAFEOPS_POINTWISE_LOSS(charbonnier_loss, Charbonnier, double)

}  // namespace safeops::cpu
