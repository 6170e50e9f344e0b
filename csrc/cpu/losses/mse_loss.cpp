#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

template <class C>
struct Mse {
  C value(C d) const { return d * d; }
  C slope(C d) const { return 2 * d; }
};

SAFEOPS_POINTWISE_LOSS(mse_loss, Mse)

}  // namespace safeops::cpu
