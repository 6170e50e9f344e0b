#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

template <class C>
struct L1 {
  C value(C d) const { return std::fabs(d); }
  C slope(C d) const { return d > 0 ? C(1) : d < 0 ? C(-1) : d; }  // 0 at 0, NaN at NaN
};

SAFEOPS_POINTWISE_LOSS(l1_loss, L1)

}  // namespace safeops::cpu
