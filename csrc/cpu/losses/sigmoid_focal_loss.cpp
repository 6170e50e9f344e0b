#include "cpu/engine/pow.h"
#include "cpu/losses/logistic.h"
#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// value = a m^gamma bce, where bce is the binary cross entropy of logit x and target y. m = y q + (1 - y) p is the
// probability of a miss. a = alpha y + (1 - alpha) (1 - y), or 1 if alpha is negative.
template <class C, bool kSquare>
struct FocalOf {
  C hit, miss, gamma;  // hit: alpha, miss: 1 - alpha; both 1 if alpha is negative

  FocalOf(double alpha, double gamma_)
      : hit(static_cast<C>(alpha < 0 ? 1 : alpha)),
        miss(static_cast<C>(alpha < 0 ? 1 : 1 - alpha)),
        gamma(static_cast<C>(gamma_)) {}

  C power(C m) const {
    if constexpr (kSquare) return m * m;
    return select(m == 0, select_or_zero(gamma == 0, C(1)), math::pow(m, gamma));
  }

  // Returns gamma m^(gamma - 1) bce, or 0 if m or gamma is 0. It is computed as gamma m^gamma (bce / m): bce / m is
  // representable, but for a subnormal m a small m^gamma divided by m may not be.
  C power_slope(C m, C m_power, C bce) const {
    if constexpr (kSquare) return 2 * m * bce;
    return select_or_zero(m != 0 && gamma != 0, gamma * m_power * (bce / m));
  }

  C value(C x, C y) const {
    const Logistic<C> l(x);
    return (hit * y + miss * (1 - y)) * power(y * l.q + (1 - y) * l.p) * (linear_cost(x, y, 1 - y) + l.tail);
  }

  Slopes<C> slopes(C x, C y) const {
    const Logistic<C> l(x);
    const C a = hit * y + miss * (1 - y), m = y * l.q + (1 - y) * l.p, pq = l.p * l.q;
    const C bce = linear_cost(x, y, 1 - y) + l.tail, m_power = power(m), turn = power_slope(m, m_power, bce);
    const C down = product_slope(y, math::at_least(-x, C(0))), up = product_slope(1 - y, math::at_least(x, C(0)));
    return {a * (m_power * ((1 - y) * l.p - y * l.q) + select_or_zero(pq != 0, turn * ((1 - y) - y) * pq)),
            (hit - miss) * m_power * bce + a * (turn * (l.q - l.p) + m_power * (down - up))};
  }
};

template <class C>
struct SigmoidFocal {
  template <class Run>
  static auto choose(Run run, double alpha, double gamma) {  // a square costs a seventh of a power
    return gamma == 2 ? run(FocalOf<C, true>(alpha, gamma)) : run(FocalOf<C, false>(alpha, gamma));
  }
};

SAFEOPS_POINTWISE_LOSS(sigmoid_focal_loss, SigmoidFocal, double, double)

}  // namespace safeops::cpu
