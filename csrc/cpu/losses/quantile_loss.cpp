#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// (1 - quantile) d where d > 0, quantile |d| elsewhere, and 0 for an infinite d whose share is 0;  d = x - y
template <class C>
struct Quantile {
  C over, under;
  explicit Quantile(double quantile) : over(static_cast<C>(1 - quantile)), under(static_cast<C>(quantile)) {}

  C value(C x, C y) const {
    const C a = std::fabs(x - y), share = x > y ? over : under;
    return share > 0 || a != a ? share * a : C(0);
  }

  C slope(C x, C y) const {
    const C d = x - y;
    return d > 0 ? over : d < 0 ? -under : d;  // 0 stays 0, and NaN stays NaN
  }
};

SAFEOPS_POINTWISE_LOSS(quantile_loss, Quantile, double)

}  // namespace safeops::cpu
