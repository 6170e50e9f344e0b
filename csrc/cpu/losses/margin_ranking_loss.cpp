#include "cpu/engine/math.h"
#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// value = max(margin - z (x - y), 0). x should be the larger one if z = 1, y if z = -1.
template <class C>
struct MarginRanking {
  static constexpr bool kFlat = true;
  C margin;
  explicit MarginRanking(double margin) : margin(static_cast<C>(margin)) {}

  C value(C x, C y, C z) const { return math::at_least(margin - z * (x - y), C(0)); }

  Slopes<C> slopes(C x, C y, C z) const {
    const bool active = !(margin - z * (x - y) <= 0);
    return {select_or_zero(active, -z), select_or_zero(active, z), select_or_zero(active, y - x)};
  }
};

SAFEOPS_TERNARY_LOSS(margin_ranking_loss, MarginRanking, double)

}  // namespace safeops::cpu
