#include "cpu/losses/logistic.h"
#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// With s = x + y and u = |x - y| / s, value = s/4 ((1 + u) log(1 + u) + (1 - u) log(1 - u)). For small u the two terms
// are of order u and cancel, since their sum is of order u^2. The sum equals log(1 - u^2) + u log(1 + 2 u / (1 - u)),
// whose terms are of order u^2: this form is used for u < 1/2.
template <class C>
struct JsDiv {
  C value(C x, C y) const {
    const C s = x + y, u = std::fabs(relative_difference(x, y));
    const bool is_small = u < C(0.5);
    const C first = math::log1p(select(is_small, -u * u, u)),
            second = math::log1p(select(is_small, 2 * u / (1 - u), -u));
    return s / 4 * select(is_small, first + u * second, (1 + u) * first + product(1 - u, second));
  }

  Slopes<C> slopes(C x, C y) const { return {slope(x, y), slope(y, x)}; }

 private:
  static C relative_difference(C x, C y) { return (x - y) / select(x + y == 0, C(1), x + y); }

  // Returns the derivative with respect to x: log(2 x / (x + y)) / 2, and 0 where x is 0.
  static C slope(C x, C y) {
    const C u = relative_difference(x, y);
    const C log = select(u < C(-0.5), math::log(x / ((x + y) / 2)), math::log1p(u));  // near u = -1, 1 + u loses digits
    return select_or_zero(x != 0, log / 2);
  }
};

SAFEOPS_POINTWISE_LOSS(js_div, JsDiv)

}  // namespace safeops::cpu
