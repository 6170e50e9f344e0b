#include "cpu/engine/math.h"
#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// log(1 + 2 sinh(d/2)^2) where |d| < log 2, |d| - log 2 + log(1 + e^(-2 |d|)) from there on;  d = x - y
template <class C>
struct LogCosh {
  static constexpr C kLog2 = static_cast<C>(0x1.62e42fefa39efp-1);

  // Both series are Taylor's, their first term apart: it is exact, the rest is small beside it.
  static C sinh(C x) {  // |x| < log 2
    const C z = x * x;
    return x + x * z * math::polynomial(z, C(1) / C(6), C(1) / C(120), C(1) / C(5040), C(1) / C(362880),
                                        C(1) / C(39916800), C(1) / C(6227020800), C(1) / C(1307674368000));
  }

  static C log1p(C x) {  // 0 <= x <= 1/4, through log(1 + x) = 2 artanh(t)
    const C t = x / (2 + x), z = t * t;
    return 2 * t + 2 * t * z * math::polynomial(z, C(1) / C(3), C(1) / C(5), C(1) / C(7), C(1) / C(9), C(1) / C(11),
                                                C(1) / C(13), C(1) / C(15), C(1) / C(17));
  }

  C value(C x, C y) const {
    const C d = x - y, a = std::fabs(d), s = sinh(d / 2);
    const bool near = a < kLog2;  // NaN is far, and stays
    return select_or_zero(!near, a - kLog2) + log1p(select(near, 2 * s * s, math::exp(-2 * a)));
  }

  C slope(C x, C y) const {  // tanh(d)
    const C d = x - y, a = std::fabs(d), s = sinh(d), e = math::exp(-2 * a);
    return select(a < kLog2, s / std::sqrt(1 + s * s), std::copysign((1 - e) / (1 + e), d));
  }
};

SAFEOPS_POINTWISE_LOSS(log_cosh_loss, LogCosh)

}  // namespace safeops::cpu
