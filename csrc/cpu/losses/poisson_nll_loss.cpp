#include "cpu/losses/logistic.h"
#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// If kLog, x is the logarithm of the rate, and the loss is e^x - y x. Else x is the rate, and the loss is x - y log(x +
// eps). kFull adds Stirling's log y! = y log y - y + log(2 pi y) / 2 where y > 1.
template <class C, bool kLog, bool kFull>
struct PoissonOf {
  C eps;

  C value(C x, C y) const {
    C loss = kLog ? exp_(x) - product(y, x) : x - product(y, math::log(x + eps));
    if constexpr (kFull) {
      constexpr C kLog2Pi = static_cast<C>(0x1.d67f1c864beb5p+0);
      const bool has_factorial = y > 1;
      const C n = select(has_factorial, y, C(1)), log = math::log_positive(n);
      loss += select_or_zero(has_factorial, n * log - n + (kLog2Pi + log) / 2);
    }
    return loss;
  }

  Slopes<C> slopes(C x, C y) const {
    const C log = kLog ? x : math::log(x + eps);
    C dy = -product_slope(y, log);
    if constexpr (kFull) {
      const bool has_factorial = y > 1;
      const C n = select(has_factorial, y, C(1));
      dy += select_or_zero(has_factorial, math::log_positive(n) + C(0.5) / n);
    }
    return {kLog ? exp_(x) - y : 1 - y / (x + eps), dy};
  }
};

template <class C>
struct PoissonNll {
  template <class Run>
  static auto choose(Run run, bool log_input, bool full, double eps) {
    const C e = static_cast<C>(eps);
    if (log_input) return full ? run(PoissonOf<C, true, true>{e}) : run(PoissonOf<C, true, false>{e});
    return full ? run(PoissonOf<C, false, true>{e}) : run(PoissonOf<C, false, false>{e});
  }
};

SAFEOPS_POINTWISE_LOSS(poisson_nll_loss, PoissonNll, bool, bool, double)

}  // namespace safeops::cpu
