#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// value = (x - y)^2
template <class C>
struct Mse {
  C value(C x, C y) const { return (x - y) * (x - y); }
  C slope(C x, C y) const { return 2 * (x - y); }
};

SAFEOPS_POINTWISE_LOSS(mse_loss, Mse)

}  // namespace safeops::cpu
