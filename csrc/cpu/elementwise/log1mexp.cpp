#include "cpu/engine/math.h"
#include "cpu/elementwise/unary.h"

namespace safeops::cpu {

// value = log(1 - e^x) for x <= -eps, else log(eps);  slope = g e^x / (e^x - 1)
template <class C>
struct Log1mexp {
  static constexpr double most = 800;
  C eps, lowest;

  explicit Log1mexp(const Arguments& arguments) : eps(arguments.positive_eps<C>()), lowest(std::log(eps)) {}

  bool absent(C x) const { return x > -eps; }
  C stand_in(C, C) const { return lowest; }
  // For x > -log 2, 1 - e^x is small, and expm1 keeps its digits. For other x, e^x is small, and log1p keeps its
  // digits.
  C value(C x) const {
    const C near = math::log(-math::expm1_nonpositive(x)), far = math::log1p(-math::exp(x));
    return select(x > C(-0x1.62e42fefa39efp-1), near, far);  // -log 2
  }
  // e^x = root^2. For x <= -1 the slope is (g root) rest, since e^x may be subnormal where g e^x is not. For other x
  // the derivative root rest is computed first.
  C slope(C g, C x, C) const {
    const C root = math::exp(x * C(0.5)), rest = root / math::expm1_nonpositive(x);
    return select(x > C(-1), g * (root * rest), g * root * rest);
  }
};

SAFEOPS_UNARY(log1mexp, Log1mexp)

}  // namespace safeops::cpu
