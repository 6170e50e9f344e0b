#include "cpu/engine/math.h"
#include "cpu/elementwise/unary.h"

namespace safeops::cpu {

// log(1 - e^x), x < 0.  d(log(1 - e^x)) = g e^x / (e^x - 1)
template <class C>
struct Log1mexp {
  static constexpr double most = 800;
  C eps, lowest;

  explicit Log1mexp(const Arguments& arguments) : eps(arguments.positive_eps<C>()), lowest(std::log(eps)) {}

  bool absent(C x) const { return x > -eps; }
  C stand_in(C, C) const { return lowest; }
  // Near 0, 1 - e^x is small and log sees its digits; far below, e^x is small and log1p sees them.
  C value(C x) const {
    const C near = math::log(-math::expm1_nonpositive(x)), far = math::log1p(-math::exp(x));
    return select(x > C(-0x1.62e42fefa39efp-1), near, far);  // -log 2
  }
  // Far below, e^x itself may be too small for its digits where g times it is not; near 0 the slope is one factor.
  C slope(C g, C x, C) const {
    const C root = math::exp(x * C(0.5)), rest = root / math::expm1_nonpositive(x);
    return select(x > C(-1), g * (root * rest), g * root * rest);
  }
};

SAFEOPS_UNARY(log1mexp, Log1mexp)

}  // namespace safeops::cpu
