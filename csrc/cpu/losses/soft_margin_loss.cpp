#include "cpu/losses/logistic.h"
#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// value = log(1 + e^(-y x))
template <class C>
struct SoftMargin {
  C value(C x, C y) const { return softplus(-(y * x)); }

  Slopes<C> slopes(C x, C y) const {
    const C q = -Logistic<C>(y * x).q;
    return {product(q, y), product(q, x)};
  }
};

SAFEOPS_POINTWISE_LOSS(soft_margin_loss, SoftMargin)

}  // namespace safeops::cpu
