#include "cpu/losses/logistic.h"
#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// value = y (log y - x), where 0 log 0 is 0
template <class C>
struct KlOfProbabilities {
  C value(C x, C y) const { return product(y, log(y) - x); }
  Slopes<C> slopes(C x, C y) const { return {-y, product_slope(y, log(y) - x) + select_or_zero(y != 0, C(1))}; }

 private:
  static C log(C y) { return select_or_zero(y != 0, math::log(y)); }
};

// value = e^y (y - x); y is the logarithm of the target
template <class C>
struct KlOfLogs {
  C value(C x, C y) const { return product(exp_(y), difference(x, y)); }

  Slopes<C> slopes(C x, C y) const {
    const C e = exp_(y);
    return {-e, product(e, difference(x, y)) + e};
  }

 private:
  static C difference(C x, C y) { return select_or_zero(x != y, y - x); }  // 0 for equal infinities, too
};

template <class C>
struct KlDiv {
  template <class Run>
  static auto choose(Run run, bool log_target) {
    return log_target ? run(KlOfLogs<C>{}) : run(KlOfProbabilities<C>{});
  }
};

SAFEOPS_POINTWISE_LOSS(kl_div, KlDiv, bool)

}  // namespace safeops::cpu
