#include "cpu/engine/math.h"
#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// With a = |x - y| and e = exp(-a): value = log(1 + (1 - e)^2 / (2 e)) where a < log 2, else a - log 2 + log(1 + e^2).
template <class C>
struct LogCosh {
  C value(C x, C y) const {
    constexpr C kLog2 = static_cast<C>(0x1.62e42fefa39efp-1);
    const C a = std::fabs(x - y), one_minus_e = -math::expm1_nonpositive(-a), e = 1 - one_minus_e;
    const bool far = !(a < kLog2);  // true also for NaN, which then shows
    return select_or_zero(far, a - kLog2) + math::log1p_unit(select(far, e * e, one_minus_e * one_minus_e / (2 * e)));
  }

  C slope(C x, C y) const {  // tanh(x - y)
    const C d = x - y, one_minus_e = -math::expm1_nonpositive(-2 * std::fabs(d));
    return std::copysign(one_minus_e / (2 - one_minus_e), d);
  }
};

SAFEOPS_POINTWISE_LOSS(log_cosh_loss, LogCosh)

}  // namespace safeops::cpu
