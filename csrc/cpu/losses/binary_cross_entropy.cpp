#include "cpu/engine/math.h"
#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// value = -(y log x + (1 - y) log(1 - x)). Bounds, as in torch: logarithms >= -100; in d/dx the divisor x (1 - x) >=
// 1e-12.
template <class C>
struct BinaryCrossEntropy {
  C value(C x, C y) const { return -(y * hit(x) + (1 - y) * miss(x)); }

  Slopes<C> slopes(C x, C y) const {
    return {(x - y) / math::at_least(x * (1 - x), C(1e-12)), miss(x) - hit(x)};
  }

 private:
  static C hit(C x) { return math::at_least(math::log(x), C(-100)); }
  static C miss(C x) { return math::at_least(math::log1p(-x), C(-100)); }
};

SAFEOPS_POINTWISE_LOSS(binary_cross_entropy, BinaryCrossEntropy)

}  // namespace safeops::cpu
