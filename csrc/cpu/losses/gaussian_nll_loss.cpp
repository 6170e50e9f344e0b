#include "cpu/engine/math.h"
#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// (log v + d^2 / v) / 2, plus log(2 pi) / 2 if `full`;  d = x - y, v = max(z, eps). A negative z gives NaN.
template <class C>
struct GaussianNll {
  C constant, eps;
  GaussianNll(bool full, double eps)
      : constant(full ? static_cast<C>(0x1.d67f1c864beb5p-1) : 0), eps(static_cast<C>(eps)) {}

  C value(C x, C y, C z) const {
    const C d = x - y, v = variance(z);
    return (math::log(v) + d * (d / v)) / 2 + constant;  // d / v first: d^2 alone may overflow
  }

  Slopes<C> slopes(C x, C y, C z) const {
    const C d = x - y, v = variance(z), slope = d / v;
    return {slope, -slope, (1 - d * slope) / v / 2};
  }

 private:
  C variance(C z) const {
    return select(z < 0, std::numeric_limits<C>::quiet_NaN(), math::at_least(z, eps));
  }
};

SAFEOPS_TERNARY_LOSS(gaussian_nll_loss, GaussianNll, bool, double)

}  // namespace safeops::cpu
