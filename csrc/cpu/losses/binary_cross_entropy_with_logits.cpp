#include "cpu/losses/logistic.h"
#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// value = z y log(1 + e^-x) + (1 - y) log(1 + e^x);  z = pos_weight
template <class C>
struct BinaryCrossEntropyWithLogits {
  C value(C x, C y, C z) const {
    const C hit = y * z, miss = 1 - y;
    return linear_cost(x, hit, miss) + (hit + miss) * Logistic<C>(x).tail;
  }

  Slopes<C> slopes(C x, C y, C z) const {
    const Logistic<C> l(x);
    const C hit = y * z, miss = 1 - y;
    const C up = product_slope(miss, math::at_least(x, C(0))), down = product_slope(hit, math::at_least(-x, C(0)));
    return {miss * l.p - hit * l.q, z * down - up + (z - 1) * l.tail, y * (down + l.tail)};
  }
};

SAFEOPS_TERNARY_LOSS(binary_cross_entropy_with_logits, BinaryCrossEntropyWithLogits)

}  // namespace safeops::cpu
