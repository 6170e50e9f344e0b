#include "cpu/losses/logistic.h"
#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// value = (1 - quantile) d where d > 0, else quantile |d|;  d = x - y. Where the factor is 0, an infinite d costs 0.
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

// quantile_loss with one quantile per element: the operand z. A z outside [0, 1] gives NaN.
template <class C>
struct QuantileOfEach {
  C value(C x, C y, C z) const {
    return product(select(x > y, 1 - bounded(z), bounded(z)), std::fabs(x - y));
  }

  Slopes<C> slopes(C x, C y, C z) const {
    const C d = x - y, share = select(d > 0, 1 - bounded(z), bounded(z));
    const C slope = select(d > 0, share, select(d < 0, -share, d + (share - share)));  // 0 stays 0, NaN stays NaN
    return {slope, -slope, product_slope(share, -d) + (share - share)};
  }

 private:
  static C bounded(C z) { return select(z >= 0 && z <= 1, z, std::numeric_limits<C>::quiet_NaN()); }
};

SAFEOPS_TERNARY_LOSS(quantiles_loss, QuantileOfEach)

}  // namespace safeops::cpu
