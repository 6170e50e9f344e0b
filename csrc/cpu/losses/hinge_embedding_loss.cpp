#include "cpu/engine/math.h"
#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// value = x if y = 1, max(margin - x, 0) if y = -1, and for any other y the sum of both, as in torch. The comparisons
// hide a NaN in y, so y - y is added.
template <class C>
struct HingeEmbedding {
  static constexpr bool kFlat = true;
  C margin;
  explicit HingeEmbedding(double margin) : margin(static_cast<C>(margin)) {}

  C value(C x, C y) const {
    return select_or_zero(y != -1, x) + select_or_zero(y != 1, math::at_least(margin - x, C(0))) + (y - y);
  }

  Slopes<C> slopes(C x, C y) const {
    return {select_or_zero(y != -1, C(1)) - select_or_zero(y != 1 && !(margin <= x), C(1)), 0};
  }
};

SAFEOPS_POINTWISE_LOSS(hinge_embedding_loss, HingeEmbedding, double)

}  // namespace safeops::cpu
