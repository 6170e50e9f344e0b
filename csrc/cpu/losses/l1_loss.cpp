#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// value = |x - y|
template <class C>
struct L1 {
  C value(C x, C y) const { return std::fabs(x - y); }

  C slope(C x, C y) const {
    const C d = x - y;
    return d > 0 ? C(1) : d < 0 ? C(-1) : d;  // 0 at 0, NaN at NaN
  }
};

SAFEOPS_POINTWISE_LOSS(l1_loss, L1)

}  // namespace safeops::cpu
